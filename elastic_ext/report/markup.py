"""Elements of HTML and SVG as text: the one place that escapes. Pure."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

__all__ = ["number", "path_of", "svg", "tag", "text"]

_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML may not hold; and surrogates, which no encoding has."""
_EMPTY = frozenset(("br", "col", "meta", "rect", "line", "path", "circle", "polygon", "use"))


def text(value: object) -> str:
    """What a reader sees of ``value``, whatever is in it."""
    return html.escape(_FORBIDDEN.sub("\ufffd", str(value)), quote=True)


def tag(element: str, /, *inside: str, **attributes: object) -> str:
    """An element with markup inside it. ``class_`` is class, ``aria_x`` aria-x; what is None or False is left out."""
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
    """A drawing, with what is said to those who cannot see it; ``name`` is of this one alone on its page."""
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
    """With one digit after the point at most, which is enough for a place in a drawing."""
    return f"{value:.1f}".removesuffix(".0") if abs(value) >= 0.05 else "0"


def path_of(points: Iterable[tuple[float, float]], *, is_closed: bool = False) -> str:
    """The data of a path through these points."""
    data = "L".join(f"{number(x)} {number(y)}" for x, y in points)
    return f"M{data}{'Z' if is_closed else ''}" if data else ""
