"""What a page begins with: the numbers that matter, a sentence, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_ext.profile.ledger import USEFUL, Entry
from elastic_ext.profile.summary import number_in_words
from elastic_ext.records.text import counted

from .entries import LABELS, ORDER
from .markup import tag, text
from .numbers import amount, percent, seconds_in_words
from .record import RunRecord

__all__ = ["notes", "summary", "tiles"]

_MOST_LOSSES = 3
_LEAST_SHARE = 0.005


def tiles(record: RunRecord) -> str:
    steps = record.last_step - record.first_step
    again = f"{record.num_steps_again:,} taken again" if record.num_steps_again else "none taken again"
    speed, step = record.samples_per_second, record.step_seconds
    samples = f"{amount(speed.low)} to {amount(speed.high)} in steps" if speed else "not known"
    spread = f"{seconds_in_words(step.low)} to {seconds_in_words(step.high)}" if step else "not known"
    per_wall = record.num_samples / record.ledger.wall_seconds if record.ledger.wall_seconds > 0 else 0.0
    failures = counted(record.num_failures, "failure") if record.num_failures else "no failure"
    shown = (
        ("Goodput", percent(record.ledger.goodput), "of the wall time was useful steps"),
        (
            "Wall time",
            seconds_in_words(record.ledger.wall_seconds),
            f"{seconds_in_words(record.ledger.useful_seconds)} useful",
        ),
        ("Steps", f"{steps:,}", f"to step {record.last_step:,}; {again}"),
        ("Samples/s", amount(speed.middle) if speed else "?", samples),
        ("Samples/s overall", amount(per_wall), f"{record.num_samples:,} samples by the wall clock"),
        *_of_tokens(record),
        *_of_arithmetic(record),
        ("Step time", seconds_in_words(step.middle) if step else "?", spread),
        ("Restarts", str(record.num_restarts), failures),
        *_of_numbers(record),
    )
    return tag(
        "dl",
        *(
            tag(
                "div",
                tag("dt", text(name)),
                tag("dd", text(value), tag("span", text(small), class_="small")),
                class_="first" if place == 0 else None,
            )
            for place, (name, value, small) in enumerate(shown)
        ),
        class_="tiles",
    )


def _of_tokens(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    tokens = record.tokens_per_second
    if tokens is not None:
        small = f"{number_in_words(tokens.low)} to {number_in_words(tokens.high)}, all ranks"
        yield "Tokens/s", number_in_words(tokens.middle), small


def _of_numbers(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    number, num_skipped = record.not_finite
    if number:
        yield "Not finite", counted(number, "step"), f"{num_skipped:,} left out, since the last start"


def _of_arithmetic(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    mfu = record.mfu
    if mfu is not None:
        yield "MFU", percent(mfu.middle), f"{percent(mfu.low)} to {percent(mfu.high)} of the device's best"


def summary(record: RunRecord) -> str:
    """Where the time went, in a sentence."""
    ledger = record.ledger
    if ledger.wall_seconds <= 0:
        return "No time is known of."
    lost = sorted((each for each in ORDER if each not in USEFUL), key=lambda each: -ledger.seconds[each])
    named = [
        f"{LABELS[each]} ({percent(ledger.seconds[each] / ledger.wall_seconds)})"
        for each in lost[:_MOST_LOSSES]
        if ledger.seconds[each] / ledger.wall_seconds >= _LEAST_SHARE
    ]
    exposed = ledger.seconds[Entry.COMMUNICATION] / ledger.wall_seconds
    text_of = f"Of {seconds_in_words(ledger.wall_seconds)}, {percent(ledger.goodput)} went into useful steps"
    if exposed >= _LEAST_SHARE:
        text_of += f", {percent(exposed)} of it all being exposed communication in them"
    return f"{text_of}. " + (
        f"The most went elsewhere for {_listed(named)}." if named else "Hardly any went elsewhere."
    )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def notes(record: RunRecord) -> str:
    if not record.notes:
        return ""
    return tag("ul", *(tag("li", text(each)) for each in record.notes), class_="plain soft", aria_label="notes")
