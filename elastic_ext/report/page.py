"""The page: one HTML document that needs nothing else."""

from __future__ import annotations

from elastic_ext.records.text import counted

from .columns import Columns, columns_of
from .frame import LEFT, RIGHT
from .heat_chart import busy_map, step_map
from .lanes import event_key, lanes
from .line_charts import arithmetic_chart, memory_chart, speed_chart, token_chart
from .markup import tag, text
from .numbers import elapsed_in_words, moment, percent
from .opening import notes, summary, tiles
from .record import RunRecord
from .scales import TimeScale
from .script import script
from .stack_chart import HATCHES, ledger_bar, legend, stack_chart
from .style import style
from .tables import config_table, event_table, ledger_table, rank_table

__all__ = ["MARK", "page"]

MARK = "<!-- elastic-ext report -->"
"""Stands near the beginning of every report, so that one can be told from other files."""
_MOST_REMARKS = 200


def page(record: RunRecord, *, made_at: float, version: str) -> str:
    """All of it. The record's bins are widened."""
    columns = columns_of(record, cells=False)
    scale = TimeScale(begin=record.begin, end=record.end, left=LEFT, right=RIGHT)
    parts = [
        _heading(record),
        tiles(record),
        tag("p", text(summary(record)), class_="summary"),
        notes(record),
        _ledger(record),
        _remarks(record),
        _over_time(record, columns, scale),
        script(record, columns),
    ]
    maps = columns_of(record, cells=True)
    parts[-1:-1] = [
        _ranks(record, maps, scale),
        _section("Configs", _CONFIG_WORDS, config_table(record)) if record.periods else "",
        _section("Events", "", event_table(record)),
        _footer(record, made_at, version),
    ]
    main = tag("main", *(each for each in parts[:-1] if each))
    title = f"{_name(record)}: goodput {percent(record.ledger.goodput)}"
    head = tag(
        "head",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">",
        tag("title", text(title)),
        tag("style", style()),
    )
    body = tag("body", HATCHES, main, '<div id="tip" role="presentation"></div>', parts[-1])
    return f"<!DOCTYPE html>\n{MARK}\n{tag('html', head, body, lang='en')}\n"


_BUSY_WORDS = """What a rank does by itself for a step: data, forward, backward, optimizer, without waiting for others.
Step times are alike on ranks that wait for one another; this is where a slow one stands out."""
_RATE_WORDS = "Of all ranks, over the time of training: checkpoints and changes count."
_MFU_WORDS = """The model's matrix products, convolutions and attention, as a part of what its device could have done in
that time at best: in the rank in the middle, over the time of training."""
_CONFIG_WORDS = """Speed is counted in steps, without startup, checkpoints and changes: the window in the middle, and in
brackets those at a quarter and three quarters. An effect is told where these do not overlap with those of the config
before. Tokens and MFU are of all the time of training."""


def _name(record: RunRecord) -> str:
    return record.job or "A job without a name"


def _heading(record: RunRecord) -> str:
    which = f"training {record.number} of {record.num_trainings} in " if record.num_trainings > 1 else ""
    when = f"{moment(record.begin)} to {moment(record.end)} UTC"
    about = f"{which}{record.path} · {when} · {counted(len(record.ranks), 'rank')}"
    return tag("header", tag("h1", text(_name(record))), tag("p", text(about), class_="about"))


def _ledger(record: RunRecord) -> str:
    words = f"Entries are means over {counted(len(record.ranks), 'rank')}, and add up to the wall time."
    bar = tag("div", ledger_bar(record.ledger), class_="scroll")
    return _section("Where the time went", words, bar + legend(record.ledger.seconds) + ledger_table(record))


def _remarks(record: RunRecord) -> str:
    if not record.remarks:
        return ""
    items = []
    for each in record.remarks[:_MOST_REMARKS]:
        when = f"{elapsed_in_words(each.begin - record.begin)} to {elapsed_in_words(each.end - record.begin)}"
        items.append(tag("li", tag("span", text(each.kind), class_="kind"), text(f" ({when}): {each.text}")))
    return _section("What holds it up", "", tag("ul", *items, class_="plain"))


def _over_time(record: RunRecord, columns: Columns, scale: TimeScale) -> str:
    parts = [
        _drawing("Configs and events", "", lanes(record, scale), event_key(record)),
        _drawing("What time went into", "", stack_chart(columns, scale), legend(record.ledger.seconds)),
        _drawing(
            "Samples per second in steps",
            "Bands are the middle half of each config's windows.",
            speed_chart(record, columns, scale),
        ),
        _drawing("Tokens per second", _RATE_WORDS, token_chart(record, columns, scale)),
        _drawing("MFU", _MFU_WORDS, arithmetic_chart(record, columns, scale)),
        _drawing("Memory of the host", "", memory_chart(columns, scale, of_accelerator=False), _memory_key(record)),
        _drawing(
            "Memory of the accelerator",
            "What tensors hold of it.",
            memory_chart(columns, scale, of_accelerator=True),
            _memory_key(record),
        ),
    ]
    words = (
        f"Time since the first process was started, {moment(record.begin)} UTC; a moment is at the same place in each."
    )
    return _section("Over time", words, "".join(parts))


def _ranks(record: RunRecord, columns: Columns, scale: TimeScale) -> str:
    ranks = [each.rank for each in record.ranks]
    parts = [
        _drawing("Step time", "", step_map(columns, ranks, scale)),
        _drawing("Local busy time", _BUSY_WORDS, busy_map(columns, ranks, scale)),
        tag("details", tag("summary", text("Ranks in numbers")), rank_table(record), open=len(ranks) <= 16),
    ]
    return _section("Ranks", "", "".join(parts))


def _memory_key(record: RunRecord) -> str:
    if len(record.ranks) == 1:
        return ""
    names = (("b", "the rank with the most"), ("a", "the rank in the middle"))
    items = [tag("li", tag("span", "", class_=f"stroke {name}"), tag("span", text(words))) for name, words in names]
    return tag("ul", *items, class_="legend")


def _drawing(title: str, words: str, drawing: str, below: str = "") -> str:
    if not drawing:
        return ""
    said = tag("p", text(words), class_="soft") if words else ""
    return tag("h3", text(title)) + said + tag("div", drawing, class_="scroll") + below


def _section(title: str, words: str, inside: str) -> str:
    if not inside:
        return ""
    return tag("section", tag("h2", text(title)), tag("p", text(words), class_="soft") if words else "", inside)


def _footer(record: RunRecord, made_at: float, version: str) -> str:
    return tag("footer", text(f"elastic-ext {version} · made {moment(made_at)} UTC · elastic-ext report {record.path}"))
