"""Decisions of the tuner as sentences for people, with numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from elastic_ext.config.keys import TORCH

from .measurements import PointMeasurement
from .space import KNOBS, Point, Value

if TYPE_CHECKING:
    from .search import PointProposal

__all__ = [
    "SET_ASIDE",
    "change_in_words",
    "listed",
    "longest_wait_in_words",
    "nothing_new_in_words",
    "number_in_words",
    "rate_in_words",
    "size_change_in_words",
    "way_in_words",
    "why_best_again",
    "why_edited",
    "why_try",
]

_RESUME = "`elastic-ext tuning resume` lets the tuner go on from there"
_WORTH_TELLING = 0.1
"""Share of a step from which on people are told of a wait."""


def change_in_words(new: Point, old: Point) -> str:
    """The knobs that ``new`` changes from ``old``, such as "micro-batch 8 instead of 1, 4 workers instead of 0"."""
    pairs = zip(Point._fields, new, old, strict=True)
    return ", ".join(_one_in_words(name, after, before) for name, after, before in pairs if after != before)


def size_change_in_words(new: int, old: int) -> str:
    """A change of the global batch size in words, such as "128 samples a step instead of 64"."""
    return f"{new:,} samples a step instead of {old:,}"


def way_in_words(here: Point, target: Point, size_here: int, size: int) -> str:
    """A change of the global batch size and of knobs in words, from ``size_here`` and ``here`` to ``size`` and
    ``target``."""
    words = [size_change_in_words(size, size_here)] if size != size_here else []
    return ", ".join([*words, *([change_in_words(target, here)] if target != here or not words else [])])


def _one_in_words(name: str, new: Value, old: Value) -> str:
    before, after = _value(name, old), _value(name, new)
    if after in _DEFAULTS.values():  # words such as "{} workers" are for a number
        return f"{after} instead of {KNOBS[name].words.format(before)}"
    return f"{KNOBS[name].words.format(after)} instead of {before}"


_DEFAULTS: Mapping[Value, str] = {None: "the default", TORCH: "torch's default"}


def _value(name: str, value: Value) -> str:
    if value in _DEFAULTS:
        return _DEFAULTS[value]
    if isinstance(value, bool):
        return "on" if value else "off"
    if name == "activation_checkpoint" and isinstance(value, float):
        return f"{value:.0%}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def number_in_words(amount: float) -> str:
    """A number of about three digits or more, such as "1,240"."""
    return f"{amount:,.{0 if amount >= 100 else 1 if amount >= 10 else 2}f}"


def rate_in_words(samples_per_second: float) -> str:
    """A rate with its unit, such as "1,240 samples/s"."""
    return f"{number_in_words(samples_per_second)} samples/s"


def longest_wait_in_words(measured: PointMeasurement | None) -> str:
    """The longest wait in a step, such as "samples were waited for 61% of the step"; empty where all are short."""
    if measured is None:
        return ""
    shares = {name: measured.phases.get(name, 0.0) / measured.seconds for name in ("data", "communication", "transfer")}
    name = max(shares, key=lambda each: shares[each])
    share = min(shares[name], 1.0)
    if share < _WORTH_TELLING:
        return ""
    return {
        "data": f"samples were waited for {share:.0%} of the step",
        "communication": f"gradients of other ranks were waited for {share:.0%} of the step",
        "transfer": f"samples were on their way to the accelerator {share:.0%} of the step",
    }[name]


def why_try(proposal: PointProposal, best: PointMeasurement, here: Point, num_samples: int) -> str:
    """Why a proposed point is tried, as a sentence: what changes from ``here``, and rates by ``num_samples`` a step."""
    rate, now = num_samples / proposal.seconds, num_samples / best.seconds
    words = f"{change_in_words(proposal.point, here)}: {rate_in_words(rate)} predicted"
    if rate < now:
        words += f" ({number_in_words(num_samples / proposal.least_seconds)} if all goes well)"
    words += f", {number_in_words(now)} {'now' if best.point == here else 'with the best config so far'}"
    wait = longest_wait_in_words(best)
    return f"{words}; {wait}" if wait else words


SET_ASIDE = "slower than predicted: what was measured is set aside until the best config before is measured once more"
"""Why a probe is undone whose steps are doubted, as the end of its decision's reason."""


def why_best_again(change: str, *, best: float, measured: float) -> str:
    """Why the best config before is put in force again, after a probe whose steps are doubted; rates in samples/s."""
    return (
        f"{change}: the config that gave {rate_in_words(best)} is measured once more, as the job itself may have "
        f"become slower; if it has not, the {rate_in_words(measured)} measured now count as well, and the tuner keeps "
        "the fastest; if it has, the search begins again"
    )


def nothing_new_in_words(why: str) -> str:
    """The sentence that says that the tuner puts no other config in force to measure it, and why."""
    return f"the tuner tries nothing new: {why}"


def why_edited(author: str, version: int, edited: Sequence[str]) -> str:
    """Why the tuner decides nothing more after an edit of the config by a person, or else by a node's file, as a
    sentence."""
    who = "a person" if author == "person" else "the config file of a node"
    if not edited:
        return f"{who} wrote version {version}, which changes nothing; {_RESUME}"
    keys = listed(edited[:3]) + (" and more" if len(edited) > 3 else "")
    return f"{who} set {keys} in version {version}; {_RESUME}"


def listed(names: Sequence[str]) -> str:
    """Some names as a person writes them: "a, b and c"."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
