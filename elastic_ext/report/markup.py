"""HTML and SVG elements as text, and the words for numbers and ledger entries. Pure."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone

from elastic_ext.profile.ledger import ENTRIES, TimeUse

__all__ = [
    "HATCHED",
    "LABELS",
    "MEANINGS",
    "ORDER",
    "amount",
    "elapsed_in_words",
    "moment",
    "number",
    "path_of",
    "percent",
    "seconds_in_words",
    "svg",
    "tag",
    "text",
]


# --- elements of HTML and SVG as text: the one place that escapes ----------------------------------------------------

_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML may not hold, and surrogates, which no encoding has."""
_EMPTY = frozenset(("br", "col", "meta", "rect", "line", "path", "circle", "polygon", "use"))


def text(value: object) -> str:
    """``value`` as escaped text for HTML and SVG, whatever is in it."""
    return html.escape(_FORBIDDEN.sub("\ufffd", str(value)), quote=True)


def tag(element: str, /, *inside: str, **attributes: object) -> str:
    """An HTML or SVG element with markup inside it.

    The attribute ``class_`` becomes class, and ``aria_x`` aria-x; attributes that are None or False are left out.
    """
    parts = [f"<{element}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        shown = number(value) if isinstance(value, float) else str(value)
        parts.append(f' {key.rstrip("_").replace("_", "-")}="{text("" if value is True else shown)}"')
    if not inside and element in _EMPTY:
        return "".join([*parts, "/>"])
    return "".join([*parts, ">", *inside, f"</{element}>"])


def svg(name: str, title: str, description: str, *inside: str, width: float, height: float, class_: str = "") -> str:
    """An SVG drawing, with a title and a description for those who cannot see it; ``name`` is unique on its page."""
    return tag(
        "svg",
        tag("title", text(title), id=f"{name}-title"),
        tag("desc", text(description), id=f"{name}-desc"),
        *inside,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        class_=f"drawing {class_}".strip(),
        id=name,
    )


def number(value: float) -> str:
    """A place or a length in a drawing as text, with one digit after the point at most."""
    return f"{value:.1f}".removesuffix(".0") if abs(value) >= 0.05 else "0"


def path_of(points: Iterable[tuple[float, float]], *, is_closed: bool = False) -> str:
    """The data of an SVG path through ``points``."""
    data = "L".join(f"{number(x)} {number(y)}" for x, y in points)
    return f"M{data}{'Z' if is_closed else ''}" if data else ""


# --- times and amounts in words, for the page ------------------------------------------------------------------------

_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def seconds_in_words(seconds: float) -> str:
    """A length of time with three digits or two units, such as ``49.9 ms``, ``12.3 s`` and ``2 h 5 min``."""
    if seconds < 0.9995:
        return f"{amount(seconds * 1e6)} µs" if 0 < seconds < 0.9995e-3 else f"{amount(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{amount(seconds)} s"
    return _in_units(round(seconds))


def elapsed_in_words(seconds: float) -> str:
    """The time since the beginning as a mark on an axis, such as ``0``, ``30 s`` and ``1 h 30 min``."""
    if seconds <= 0:
        return "0"
    return seconds_in_words(seconds) if seconds < 1 else _in_units(round(seconds))


def amount(value: float) -> str:
    """A number with three digits, or all those before the point, such as ``0.0123``, ``12.3`` and ``12,345``."""
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3g}"
    return f"{value:.3g}" if abs(value) >= 1e-4 else f"{value:.2g}"


def percent(share: float) -> str:
    """A share as a percentage, such as ``41.6%``; a share above 0, however small, is not shown as 0."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share:.1%}"


def moment(seconds: float) -> str:
    """Seconds since 1970 as a date and time in UTC."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # which no clock has shown
        return "a time that cannot be"


def _in_units(seconds: int) -> str:
    for place, (unit, length) in enumerate(_UNITS):
        if seconds >= length:
            whole, rest = divmod(seconds, length)
            if place + 1 < len(_UNITS):
                lower, its_length = _UNITS[place + 1]
                if rest // its_length:
                    return f"{whole} {unit} {rest // its_length} {lower}"
            return f"{whole} {unit}"
    return "0 s"


# --- what a report calls the ledger's entries, and in which order it shows them --------------------------------------

ORDER = ENTRIES
LABELS: Mapping[TimeUse, str] = {
    TimeUse.FORWARD: "forward",
    TimeUse.BACKWARD: "backward",
    TimeUse.OPTIMIZER: "optimizer",
    TimeUse.TRANSFER: "to the accelerator",
    TimeUse.STEP: "steps, not measured",
    TimeUse.COMMUNICATION: "exposed communication",
    TimeUse.OTHER: "the loop's own work",
    TimeUse.DATA: "waiting for data",
    TimeUse.AGREEMENT: "agreement",
    TimeUse.CHECKPOINT: "checkpoints",
    TimeUse.CHANGE: "changes",
    TimeUse.MEMBERSHIP: "members that come or leave",
    TimeUse.ROLLED_BACK: "steps rolled back",
    TimeUse.LOST_STEPS: "steps taken again",
    TimeUse.STARTUP: "startup",
    TimeUse.RESTART: "restarts",
    TimeUse.UNSEEN: "lost with a process",
    TimeUse.OUTSIDE: "outside of epochs",
    TimeUse.STOPPED: "nothing running",
}
MEANINGS: Mapping[TimeUse, str] = {
    TimeUse.FORWARD: "the model's forward pass, and the loss",
    TimeUse.BACKWARD: "the backward pass, as long as gradients are computed",
    TimeUse.OPTIMIZER: "the optimizer's step",
    TimeUse.TRANSFER: "batches on their way to the accelerator",
    TimeUse.STEP: "steps of processes in which no step was timed phase by phase",
    TimeUse.COMMUNICATION: "waiting for gradients and for other ranks, with nothing left to compute",
    TimeUse.OTHER: "what the loop does besides: logging, metrics, schedules",
    TimeUse.DATA: "waiting for a batch",
    TimeUse.AGREEMENT: "agreeing with the other ranks between steps",
    TimeUse.CHECKPOINT: "training waits for a checkpoint",
    TimeUse.CHANGE: "configs coming into force",
    TimeUse.MEMBERSHIP: "deciding on other members, and going to their world",
    TimeUse.ROLLED_BACK: "steps that a process took back, as when memory ran out",
    TimeUse.LOST_STEPS: "steps that came to nothing, as training went on from an earlier one",
    TimeUse.STARTUP: "from the start of a process to its first step",
    TimeUse.RESTART: "from a failure or the end of a process to the first step of the next",
    TimeUse.UNSEEN: "no record covers this time: from a process's last record to its failure, or unreadable lines",
    TimeUse.OUTSIDE: "evaluation, and what else lies between epochs and after them",
    TimeUse.STOPPED: "no process, and no launcher about to start one",
}
HATCHED = frozenset((TimeUse.LOST_STEPS, TimeUse.RESTART, TimeUse.UNSEEN, TimeUse.STOPPED))
"""Ledger entries that are drawn hatched as well, for those to whom colours look alike."""
