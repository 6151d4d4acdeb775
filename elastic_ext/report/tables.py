"""Tables: what the drawings show, and what they leave out, in numbers and words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from elastic_ext.profile.ledger import USEFUL, Entry
from elastic_ext.profile.summary import number_in_words
from elastic_ext.records.text import not_finite_in_words, size_in_words

from .effects import Spread
from .entries import LABELS, MEANINGS, ORDER
from .lanes import GROUP_NAMES
from .markup import tag, text
from .numbers import amount, elapsed_in_words, moment, percent, seconds_in_words
from .record import RankRecord, RunRecord
from .stack_chart import swatch

__all__ = ["config_table", "event_table", "ledger_table", "rank_table"]

_MOST_ROWS = 200
_MOST_LENGTH = 600
_MOST_RANKS = 64


def ledger_table(record: RunRecord) -> str:
    """Every entry that there is, with the sums of those that are useful and of the others."""
    ledger = record.ledger
    rows = [_ledger_row(entry, record) for entry in ORDER if entry in USEFUL and ledger.seconds[entry] > 0]
    rows.append(_sum_row("useful", ledger.useful_seconds, record))
    rows += [_ledger_row(entry, record) for entry in ORDER if entry not in USEFUL and ledger.seconds[entry] > 0]
    rows.append(_sum_row("wall time", sum(ledger.seconds.values()), record))
    head = ("", "what", "time", "share", "rank with the most", "what it is")
    return _table("Goodput ledger", head, rows, class_="ledger")


def config_table(record: RunRecord) -> str:
    """Which config was in force when, and what it has brought; empty where only one was."""
    rows = []
    before = None
    has_tokens = any(each.tokens_per_second for each in record.periods)
    has_mfu = any(each.mfu for each in record.periods)
    for period in record.periods:
        rows.append(
            _row(
                f"v{period.name}",
                elapsed_in_words(period.begin - record.begin),
                f"{period.num_steps:,}",
                _spread(period.samples_per_second),
                _spread(period.step_seconds, seconds_in_words),
                *([_spread(period.tokens_per_second, number_in_words)] if has_tokens else ()),
                *([_spread(period.mfu, percent)] if has_mfu else ()),
                period.compared_with(before),
                period.text or "as training began",
            )
        )
        before = period
    head = (
        *("config", "from", "steps", "samples/s in steps", "step time"),
        *(("tokens/s",) if has_tokens else ()),
        *(("MFU",) if has_mfu else ()),
        *("against the one before", "what changed"),
    )
    return _table("Configs in force", head, _shortened(rows, len(head)), class_="wide")


def event_table(record: RunRecord) -> str:
    """What happened; empty where nothing did."""
    rows = [
        _row(
            elapsed_in_words(each.time - record.begin),
            moment(each.time),
            GROUP_NAMES[each.group],
            "" if each.step is None else f"{each.step:,}",
            _ranks_in_words(each.ranks),
            each.text[:_MOST_LENGTH],
        )
        for each in record.happenings
    ]
    head = ("after", "at (UTC)", "what", "step", "who", "in words")
    return _table("Events", head, _shortened(rows, len(head)), class_="wide") if rows else ""


def rank_table(record: RunRecord) -> str:
    """Each rank, those that are the busiest first."""
    ordered = sorted(
        record.ranks, key=lambda each: each.busy_seconds.middle if each.busy_seconds else 0.0, reverse=True
    )
    has_not_finite = record.not_finite[0] > 0
    rows = [_rank_row(each, has_not_finite=has_not_finite) for each in ordered[:_MOST_RANKS]]
    head = (
        "rank",
        "busy for a step",
        "step time",
        "MFU",
        "steps",
        "waiting for data",
        "exposed communication",
        "processes",
        *(("not finite",) if has_not_finite else ()),
        "memory",
        "on the accelerator",
    )
    if len(ordered) > _MOST_RANKS:
        rows.append(
            _whole_row(f"and {len(ordered) - _MOST_RANKS} ranks that are less busy: all are in --json", len(head))
        )
    return _table("Ranks", head, rows, class_="wide")


def _ledger_row(entry: Entry, record: RunRecord) -> str:
    spent = record.ledger.seconds[entry]
    worst = max(record.ranks, key=lambda each: _share_of(each, entry))
    most = f"rank {worst.rank}: {percent(_share_of(worst, entry))}" if len(record.ranks) > 1 else ""
    cells = [text(seconds_in_words(spent)), text(percent(_part(spent, record))), text(most)]
    return tag(
        "tr",
        tag("td", swatch(entry)),
        tag("th", text(LABELS[entry]), scope="row"),
        *(tag("td", each, class_="number") for each in cells),
        tag("td", text(MEANINGS[entry]), class_="words"),
    )


def _sum_row(name: str, spent: float, record: RunRecord) -> str:
    cells = [text(seconds_in_words(spent)), text(percent(_part(spent, record)))]
    return tag(
        "tr",
        tag("td"),
        tag("th", text(name), scope="row"),
        *(tag("td", each, class_="number") for each in cells),
        tag("td"),
        tag("td"),
        class_="sum",
    )


def _rank_row(rank: RankRecord, *, has_not_finite: bool) -> str:
    number, num_skipped = rank.not_finite or (0, 0)
    return _row(
        str(rank.rank),
        _spread(rank.busy_seconds, seconds_in_words),
        _spread(rank.step_seconds, seconds_in_words),
        "" if rank.mfu is None else percent(rank.mfu.middle),
        f"{rank.num_steps:,}",
        percent(_share_of(rank, Entry.DATA)),
        percent(_share_of(rank, Entry.COMMUNICATION)),
        str(rank.num_processes),
        *((not_finite_in_words(number, num_skipped) if number else "",) if has_not_finite else ()),
        "" if rank.most_host_bytes is None else size_in_words(rank.most_host_bytes),
        "" if rank.most_accelerator_bytes is None else size_in_words(rank.most_accelerator_bytes),
    )


def _share_of(rank: RankRecord, entry: Entry) -> float:
    return rank.ledger.seconds[entry] / rank.ledger.wall_seconds if rank.ledger.wall_seconds > 0 else 0.0


def _part(spent: float, record: RunRecord) -> float:
    return spent / record.ledger.wall_seconds if record.ledger.wall_seconds > 0 else 0.0


def _spread(spread: Spread | None, words: Callable[[float], str] = amount) -> str:
    if spread is None:
        return ""
    return f"{words(spread.middle)} ({words(spread.low)} to {words(spread.high)})"


def _ranks_in_words(ranks: Sequence[int]) -> str:
    if not ranks:
        return "agent"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"


def _shortened(rows: list[str], num_columns: int) -> list[str]:
    """The first and the last of too many."""
    if len(rows) <= _MOST_ROWS:
        return rows
    half = _MOST_ROWS // 2
    between = _whole_row(f"{len(rows) - 2 * half} more, which are in --json", num_columns)
    return [*rows[:half], between, *rows[-half:]]


def _whole_row(words: str, num_columns: int) -> str:
    return tag("tr", tag("td", text(words), colspan=num_columns, class_="words"))


def _row(first: str, *others: str) -> str:
    last = others[-1]
    cells = [tag("td", text(each)) for each in others[:-1]]
    return tag("tr", tag("th", text(first), scope="row"), *cells, tag("td", text(last), class_="words"))


def _table(caption: str, head: Sequence[str], rows: Iterable[str], *, class_: str) -> str:
    heads = tag("tr", *(tag("th", text(each), scope="col") for each in head))
    inside = tag("table", tag("caption", text(caption)), tag("thead", heads), tag("tbody", *rows), class_=class_)
    return tag("div", inside, class_="scroll", tabindex=0, role="region", aria_label=caption)
