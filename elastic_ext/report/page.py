"""The report of a training as one HTML document without other files: its tiles, its tables, and the whole page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from elastic_ext.profile.ledger import USEFUL, TimeUse
from elastic_ext.profile.summary import number_in_words
from elastic_ext.records.measures import METRICS, Metric, words_of
from elastic_ext.records.text import counted, size_in_words

from .axes import GROUP_NAMES, LEFT, RIGHT, TimeColumns, TimeScale, columns_of, event_key, lanes
from .charts import (
    HATCHES,
    arithmetic_chart,
    busy_map,
    ledger_bar,
    legend,
    logged_chart,
    memory_chart,
    speed_chart,
    stack_chart,
    step_map,
    swatch,
    token_chart,
    world_chart,
)
from .events import Quartiles
from .markup import LABELS, MEANINGS, ORDER, amount, elapsed_in_words, moment, percent, seconds_in_words, tag, text
from .record import ON_PAGE, RankRecord, RunRecord
from .style import script, style

__all__ = [
    "MARK",
    "config_table",
    "event_table",
    "ledger_table",
    "losses",
    "notes",
    "page",
    "rank_table",
    "summary",
    "tiles",
    "world_table",
]


# --- what a page begins with: the numbers that matter, a sentence, and what was left out -----------------------------

_MOST_LOSSES = 3
_LEAST_SHARE = 0.005


def tiles(record: RunRecord) -> str:
    """The numbers that a page begins with, each in a tile: goodput, wall time, steps, speed, MFU, restarts."""
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
        *_of_metrics(record),
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


def _of_metrics(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    metrics = record.metrics
    for name, row in _shown_metrics(record):
        assert row.unit is not None
        small = [f"{metrics[part]:,} {METRICS[part].words}" for part in ON_PAGE[name]]
        small.append("since the last start" if row.over_steps == "total" else "as last reported")
        yield row.words.capitalize(), row.unit.in_words(metrics[name]), ", ".join(small)


def _shown_metrics(record: RunRecord) -> list[tuple[str, Metric]]:
    """The metrics that the page shows, without those that are 0."""
    return [(name, METRICS[name]) for name in ON_PAGE if record.metrics[name]]


def _of_arithmetic(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    mfu = record.mfu
    if mfu is not None:
        yield "MFU", percent(mfu.middle), f"{percent(mfu.low)} to {percent(mfu.high)} of the device's best"


def summary(record: RunRecord) -> str:
    """Where the wall time of a training went, in a sentence or two."""
    ledger = record.ledger
    if ledger.wall_seconds <= 0:
        return "The files of the run tell of no time."
    exposed = ledger.seconds[TimeUse.COMMUNICATION] / ledger.wall_seconds
    text_of = f"Of {seconds_in_words(ledger.wall_seconds)}, {percent(ledger.goodput)} went into useful steps"
    if exposed >= _LEAST_SHARE:
        text_of += f", {percent(exposed)} of the wall time being exposed communication in these steps"
    return f"{text_of}. {losses(record)}."


def losses(record: RunRecord) -> str:
    """What most of the time went into that was not useful, with the shares of the wall time."""
    ledger, wall = record.ledger, record.ledger.wall_seconds
    lost = sorted((each for each in ORDER if each not in USEFUL), key=lambda each: -ledger.seconds[each])
    named = [
        f"{LABELS[each]} ({percent(ledger.seconds[each] / wall)})"
        for each in lost[:_MOST_LOSSES]
        if wall > 0 and ledger.seconds[each] / wall >= _LEAST_SHARE
    ]
    return f"Of the rest, most went into {_listed(named)}" if named else "Hardly any time went elsewhere"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def notes(record: RunRecord) -> str:
    """What the report left out or had to assume, as a list; empty where nothing."""
    if not record.notes:
        return ""
    return tag("ul", *(tag("li", text(each)) for each in record.notes), class_="plain soft", aria_label="notes")


# --- what the drawings show, and what they leave out, in numbers and words -------------------------------------------

_MOST_ROWS = 200
_MOST_LENGTH = 600
_MOST_RANKS = 64


def ledger_table(record: RunRecord) -> str:
    """The goodput ledger as a table: each entry with time in it, the sum of the useful ones, and the wall time."""
    ledger = record.ledger
    rows = [_ledger_row(entry, record) for entry in ORDER if entry in USEFUL and ledger.seconds[entry] > 0]
    rows.append(_sum_row("useful", ledger.useful_seconds, record))
    rows += [_ledger_row(entry, record) for entry in ORDER if entry not in USEFUL and ledger.seconds[entry] > 0]
    rows.append(_sum_row("wall time", sum(ledger.seconds.values()), record))
    head = ("", "what", "time", "share", "rank with the most", "what it is")
    return _table("Goodput ledger", head, rows, class_="ledger")


def config_table(record: RunRecord) -> str:
    """The configs as a table: when each was in force, what changed, and its effect on speed."""
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
        *("against the config before", "what changed"),
    )
    return _table("Configs in force", head, _shortened(rows, len(head)), class_="wide")


def world_table(record: RunRecord) -> str:
    """The numbers of ranks as a table: from when on, and why; empty where there were always as many."""
    if len(record.worlds) < 2:
        return ""
    rows = [
        _row(counted(each.num_ranks, "rank"), elapsed_in_words(each.begin - record.begin), each.text[:_MOST_LENGTH])
        for each in record.worlds
    ]
    return _table("Numbers of ranks", ("ranks", "from", "why"), _shortened(rows, 3), class_="wide")


def event_table(record: RunRecord) -> str:
    """The events of a training as a table; empty where there were none."""
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
    """The ranks as a table, the busiest first."""
    ordered = sorted(
        record.ranks, key=lambda each: each.busy_seconds.middle if each.busy_seconds else 0.0, reverse=True
    )
    metrics = _shown_metrics(record)
    rows = [_rank_row(each, [name for name, _ in metrics]) for each in ordered[:_MOST_RANKS]]
    head = (
        "rank",
        "busy for a step",
        "step time",
        "MFU",
        "steps",
        "waiting for data",
        "exposed communication",
        "processes",
        *(metric.words for _, metric in metrics),
        "memory",
        "on the accelerator",
    )
    if len(ordered) > _MOST_RANKS:
        rows.append(
            _whole_row(
                f"and {len(ordered) - _MOST_RANKS} ranks that are less busy: elastic-ext report --json has all ranks",
                len(head),
            )
        )
    return _table("Ranks", head, rows, class_="wide")


def _ledger_row(entry: TimeUse, record: RunRecord) -> str:
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


def _rank_row(rank: RankRecord, metrics: Sequence[str]) -> str:
    return _row(
        str(rank.rank),
        _spread(rank.busy_seconds, seconds_in_words),
        _spread(rank.step_seconds, seconds_in_words),
        "" if rank.mfu is None else percent(rank.mfu.middle),
        f"{rank.num_steps:,}",
        percent(_share_of(rank, TimeUse.DATA)),
        percent(_share_of(rank, TimeUse.COMMUNICATION)),
        str(rank.num_processes),
        *(words_of(name, rank.metrics) for name in metrics),
        "" if rank.most_host_bytes is None else size_in_words(rank.most_host_bytes),
        "" if rank.most_accelerator_bytes is None else size_in_words(rank.most_accelerator_bytes),
    )


def _share_of(rank: RankRecord, entry: TimeUse) -> float:
    return rank.ledger.seconds[entry] / rank.ledger.wall_seconds if rank.ledger.wall_seconds > 0 else 0.0


def _part(spent: float, record: RunRecord) -> float:
    return spent / record.ledger.wall_seconds if record.ledger.wall_seconds > 0 else 0.0


def _spread(spread: Quartiles | None, words: Callable[[float], str] = amount) -> str:
    if spread is None:
        return ""
    return f"{words(spread.middle)} ({words(spread.low)} to {words(spread.high)})"


def _ranks_in_words(ranks: Sequence[int]) -> str:
    if not ranks:
        return "agent"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"


def _shortened(rows: list[str], num_columns: int) -> list[str]:
    """The rows of a table; of too many, the first and the last ones, with a row between them that counts the others."""
    if len(rows) <= _MOST_ROWS:
        return rows
    half = _MOST_ROWS // 2
    between = _whole_row(f"{len(rows) - 2 * half} more, which elastic-ext report --json has", num_columns)
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


# --- one HTML document that needs nothing else -----------------------------------------------------------------------

MARK = "<!-- elastic-ext report -->"
"""A comment near the beginning of every report, by which a file is known to be one and may be written over."""
_MOST_REMARKS = 200


def page(record: RunRecord, *, made_at: float, version: str) -> str:
    """The whole report as an HTML document. The record's bins are widened to the columns of the drawings."""
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
        _section("Members", "", world_table(record)),
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
that time at best: on the median rank, over the time of training."""
_CONFIG_WORDS = """Speed is counted in steps, without startup, checkpoints and changes: the median of a config's
windows, and in brackets their quartiles. An effect is told where the quartiles do not overlap with those of the config
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
    return _section("What holds training up", "", tag("ul", *items, class_="plain"))


def _over_time(record: RunRecord, columns: TimeColumns, scale: TimeScale) -> str:
    parts = [
        _drawing("Configs and events", "", lanes(record, scale), event_key(record)),
        _drawing("What time went into", "", stack_chart(columns, scale), legend(record.ledger.seconds)),
        _drawing(
            "Samples per second in steps",
            "Bands are the middle half of each config's windows.",
            speed_chart(record, columns, scale),
        ),
        _drawing("Ranks that train together", "", world_chart(record, scale)),
        *(
            _drawing(f"Logged: {name}", _logged_words(columns, name), logged_chart(name, record, columns, scale))
            for name in record.logged
        ),
        _drawing("Tokens per second", _RATE_WORDS, token_chart(record, columns, scale)),
        _drawing("MFU", _MFU_WORDS, arithmetic_chart(record, columns, scale)),
        _drawing("Memory of the host", "", memory_chart(columns, scale, of_accelerator=False), _memory_key(record)),
        _drawing(
            "Memory of the accelerator",
            "What tensors hold of the accelerator's memory.",
            memory_chart(columns, scale, of_accelerator=True),
            _memory_key(record),
        ),
    ]
    words = (
        f"Time since the first process was started, {moment(record.begin)} UTC; a moment is at the same place in each "
        "drawing."
    )
    return _section("Over time", words, "".join(parts))


def _logged_words(columns: TimeColumns, name: str) -> str:
    """The first and the last value of a number that the script has logged, as far as the columns tell them apart."""
    values = [column.logged[name] for column in columns if name in column.logged]
    return f"From {values[0]:.4g} to {values[-1]:.4g}: means over ranks and steps." if values else ""


def _ranks(record: RunRecord, columns: TimeColumns, scale: TimeScale) -> str:
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
    names = (("b", "the rank with the most"), ("a", "the median rank"))
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
