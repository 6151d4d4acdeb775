"""RESULTS.md, made of what is recorded in benchmarks/results/, and the numbers in README: ``make results``.

Nothing is decided here: verdicts and numbers are those of the records. What a benchmark does not measure is said in its
own words, which are taken from its module.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from benchmarks.harness import Finding, Verdict
from benchmarks.plan import PARTS, Planned, planned
from benchmarks.readme_numbers import README, with_numbers
from benchmarks.recording import Record, RecordedTable, read_records
from elastic_ext.records.files import write_whole

__all__ = ["PAGE", "docstrings", "main", "page_of"]

PAGE = Path(__file__).resolve().parent / "RESULTS.md"

_NOT_MEASURED = re.compile(r"^Not measured.+?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)
_HEAD = (
    "| case | claim | ours | peer | ratio | A/A interval | verdict | date | commit | others, in the same rounds |",
    "|---|---|---:|---:|---:|---:|---|---|---|---|",
)
_INTRODUCTION = """\
# Results

What was measured of elastic_ext, beside what one would use in its place. A line is a claim: what ours took, what the
peer took, and whether that is what is claimed. `make results` makes this page from the files in
[results/](results), which have more: every table as it was printed, with its notes. `make bench` measures all of it
again in under an hour, with fewer rounds; `make bench-whole ARGS="NAME --record"` measures one benchmark whole and
records it.

## How to read it

- **ours** and **peer** are medians, of what the claim names. Compare them within one line alone: days and machines
  differ. Both did the same work, in turns, on the same machine; a benchmark in which they do not ends with an error.
- **ratio** is ours over the peer's: 0.5 is half the time, 1 is the same, 1.05 is 5% more. It is the median over the
  rounds of (ours / peer), both of one round, so it may differ a little from the ratio of the medians. *Less is better*,
  but where the values are so many *a second*: there more is better. Where a claim is of a difference, that stands below
  the ratio, with the range that it has in nine of ten resamplings.
- **A/A interval** is what the machine makes of no difference at all: the peer ran twice in each round, and this is
  where the median of its second reading over its first lies (or, in µs, of the one less the other), from the 5th to the
  95th percentile of resamplings. A ratio inside of it is no difference that was seen.
- **verdict** is whether the claim held. *pass* and *fail* are what they say. *inconclusive*: the A/A interval is wider
  than the margin that is claimed (its distance from 1), so that this machine could not tell. *none claimed*: it was
  measured, and nothing is promised.
- **p50**, **p99** and **largest** are of single occasions: half of them took no longer, 99 of 100, all.
- **commit** is what was measured. One with a `+` added the results to this repository: what was measured is that tree
  or one just before. A line says nothing of what was changed after its commit.
- **others** ran in the same rounds: their ratio to the same peer, or what they took where there is none.
"""


def docstrings(folder: Path = PAGE.parent) -> dict[str, str]:
    """What each module of the benchmarks says of itself, by its name."""
    sources = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    return {name: ast.get_docstring(ast.parse(source)) or "" for name, source in sources.items()}


def page_of(records: Sequence[Record], words: Mapping[str, str]) -> str:
    """The page of these records; ``words`` has what each benchmark says of itself."""
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record.benchmark, []).append(record)
    parts = []
    for part in PARTS:
        parts += [f"## {part.title}\n\n{part.question}\n"]
        parts += [_benchmark(each, by_name.get(each.name, ()), words[each.name]) for each in part.benchmarks]
    return "\n".join([_INTRODUCTION, _in_short(by_name), _not_measured(records, by_name), *parts])


def _in_short(by_name: Mapping[str, Sequence[Record]]) -> str:
    lines = ["## In short", "", "| part | pass | fail | inconclusive | none claimed |", "|---|---:|---:|---:|---:|"]
    total: Counter[Verdict] = Counter()
    for part in PARTS:
        findings = (
            finding
            for each in part.benchmarks
            for record in by_name.get(each.name, ())
            for table in record.tables
            for finding in _shown(table)
        )
        verdicts = Counter(each.verdict for each in findings)
        total.update(verdicts)
        anchor = part.title.lower().replace(" ", "-")
        lines.append(f"| [{part.title}](#{anchor}) | {_counted(verdicts)} |")
    return "\n".join([*lines, f"| all | {_counted(total)} |", ""])


def _counted(verdicts: Mapping[Verdict, int]) -> str:
    return " | ".join(str(verdicts.get(name, 0)) for name in get_args(Verdict))


def _not_measured(records: Sequence[Record], by_name: Mapping[str, Sequence[Record]]) -> str:
    names = sorted({record.accelerator for record in records if record.accelerator})
    on_gpu = f"On a GPU: only what has a GPU's name below ({', '.join(names)})." if names else _NO_GPU
    never = [f"`{each.name}`" for each in planned() if each.name not in by_name]
    cpus = sorted({record.num_cpus for record in records if not record.accelerator})
    lines = [
        "## What was not measured",
        "",
        f"- {on_gpu}",
        "- More than one machine: ranks, nodes and the master are processes of one machine, which talk over loopback",
        f"  with gloo and share its {' or '.join(map(str, cpus))} processors.",
        "- Network file systems and object stores: files lie on the machine's own disk.",
        "- Models of more than 100 million parameters.",
    ]
    if never:
        lines.append(f"- What was never recorded: {', '.join(never)}.")
    return "\n".join([*lines, "- Beyond that, what each benchmark says of itself below.", ""])


_NO_GPU = "A GPU: nothing has run on one yet. `make gpu` runs the tests that need one, and measures and records there."


def _benchmark(each: Planned, records: Sequence[Record], words: str) -> str:
    first = words.partition("\n\n")[0]
    without = _NOT_MEASURED.search(words)
    said = [" ".join(text.split()).replace("``", "`") for text in (first, without[0] if without else "") if text]
    lines = [f"### {each.title}", "", f"`{each.name}`: {' '.join(said)}", ""]
    if not records:
        return "\n".join([*lines, "Never recorded.", ""])
    for record in records:
        lines += [_in_words(record), "", *_HEAD]
        for table in record.tables:
            lines += _lines(table, record)
        lines.append("")
    return "\n".join(lines)


def _in_words(record: Record) -> str:
    versions = ", ".join(f"{'Python' if name == 'python' else name} {each}" for name, each in record.versions.items())
    machine = f"{record.num_cpus} processors, {record.cpu}, {record.memory} of memory"
    gpu = f"**On {record.accelerator}**, " if record.accelerator else ""
    short = " A short run." if record.form == "short" else ""
    suffix = ".gpu" if record.accelerator else ""
    where = f"[results/{record.benchmark}{suffix}.json](results/{record.benchmark}{suffix}.json)"
    return f"{gpu}{machine}; {versions}.{short} The tables: {where}."


def _shown(table: RecordedTable) -> Sequence[Finding]:
    """What has a line: all claims, and where nothing is claimed all that was measured."""
    claimed = [each for each in table.findings if each.verdict != "none claimed"]
    return claimed or table.findings


def _lines(table: RecordedTable, record: Record) -> Iterable[str]:
    shown = _shown(table)
    case = f"{table.title} ({table.repeated})" if table.repeated else table.title
    others = "; ".join(_other(each) for each in table.findings if each not in shown)
    for each in shown:
        ratio = "" if each.ratio is None else _ratio(each.ratio)
        cells = (
            case,
            each.claim,
            each.value,
            each.peer_value or "",
            f"{ratio}<br>{each.difference}" if each.difference else ratio,
            _interval(each),
            f"**{each.verdict}**" if each.verdict == "fail" else each.verdict,
            record.date,
            f"{record.commit[:10]}{'+' if record.commit_is == 'added' else ''}",
            others,
        )
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        case, others = "", ""


def _other(each: Finding) -> str:
    return f"{each.side} {each.value if each.ratio is None else _ratio(each.ratio)}"


def _ratio(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio >= 0.01 else f"{ratio:.2g}"


def _interval(each: Finding) -> str:
    if each.aa_interval is None:
        return ""
    low, high = each.aa_interval
    return f"{_ratio(low)} to {_ratio(high)}" if each.aa_unit == "ratio" else f"{low:+.1f} to {high:+.1f} µs"


def main(arguments: Sequence[str]) -> int:
    """Write the page, and the numbers into README."""
    assert not arguments, f"this takes no arguments, not {list(arguments)}"
    records = read_records()
    page = page_of(records, docstrings())
    write_whole(PAGE, page.encode())
    write_whole(README, with_numbers(README.read_text(encoding="utf-8"), records).encode())
    sys.stdout.write(f"{PAGE}: {len(page.splitlines())} lines\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
