"""Recorded results: one file of JSON a benchmark and kind of device, with the newest run of it and nothing older.

``python -m benchmarks --record`` writes these files, ``make results`` makes RESULTS.md of them (results_page.py).
Only the newest run is in a file, since what git shows of a file is then what has changed between two runs of a
benchmark; what was before is in git's history. What was not measured, or is not known, has no key.

Words: a *record* is what one run of one benchmark was seen to be: where, when, of which commit, and its *tables*, each
as it was printed and as *findings*, a line for each side of it.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.harness import Finding, Machine, Result, Verdict, shown_value
from elastic_ext.records.files import write_whole

__all__ = [
    "FOLDER",
    "CommitError",
    "Record",
    "RecordError",
    "RecordedTable",
    "as_json",
    "commit_of",
    "from_json",
    "is_commit",
    "path_of",
    "read_records",
    "record_of",
    "recorded_table",
    "versions_for",
    "write_record",
]

FOLDER = Path(__file__).resolve().parent / "results"

_HEADING = re.compile(r"\*\*(?P<title>.+?)\*\*(?: \((?P<repeated>.+)\))?")
_CELLS = re.compile(r"(?<!\\)\|")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_PEERS = {"accelerate": "accelerate", "Lightning Fabric": "lightning-fabric", "torchdata": "torchdata"}
"""The packages of peers that have versions of their own, by how a table names them; torch's is always told."""


class CommitError(RuntimeError):
    """No commit can be named for what would be recorded."""


class RecordError(ValueError):
    """A recorded file that does not have the shape of a record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTable:
    """One table of a benchmark: as it was printed, cell by cell, and what the results say of it."""

    title: str
    repeated: str | None
    """How often, in the words of the table: ``9 rounds``; None where its rows tell that, or its title."""
    findings: tuple[Finding, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One run of one benchmark."""

    benchmark: str
    date: str
    """Of the run: year, month, day."""
    commit: str
    commit_is: Literal["measured", "added"]
    """Whether the commit is the tree that was measured, or the one that added these results, just after."""
    command: str
    form: Literal["whole", "short"]
    num_cpus: int
    cpu: str
    """The family of the processor, in plain words."""
    memory: str
    accelerator: str | None
    """The name of the GPU that it ran on."""
    versions: Mapping[str, str]
    """Of Python, torch and the peers, by their names."""
    seconds: float | None
    """How long the whole run took."""
    tables: tuple[RecordedTable, ...]


# --- making one -----------------------------------------------------------------------------------------------------


def recorded_table(result: Result) -> RecordedTable:
    """A benchmark's result as it is recorded."""
    found = _HEADING.fullmatch(result.heading)
    assert found is not None, f"a heading is **title** or **title** (how often), not {result.heading!r}"
    head, _, *lines = result.table_lines()
    return RecordedTable(
        title=found["title"],
        repeated=found["repeated"],
        findings=tuple(result.findings),
        columns=_cells(head),
        rows=tuple(map(_cells, lines)),
        notes=tuple(result.notes),
    )


def _cells(line: str) -> tuple[str, ...]:
    return tuple(each.strip().replace("\\|", "|") for each in _CELLS.split(line.strip())[1:-1])


def versions_for(tables: Sequence[RecordedTable]) -> dict[str, str]:
    """The versions of Python, torch and those peers that the tables name."""
    named = {cell for table in tables for row in table.rows for cell in row}
    packages = [package for name, package in _PEERS.items() if any(name in cell for cell in named)]
    return {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        **{package: metadata.version(package) for package in packages},
    }


def record_of(
    benchmark: str,
    results: Sequence[Result],
    *,
    date: str,
    commit: str,
    command: str,
    form: Literal["whole", "short"],
    machine: Machine,
    seconds: float,
) -> Record:
    """What is recorded of a run that has just ended."""
    tables = tuple(map(recorded_table, results))
    return Record(
        benchmark=benchmark,
        date=date,
        commit=commit,
        commit_is="measured",
        command=command,
        form=form,
        num_cpus=machine.num_cpus,
        cpu=machine.cpu,
        memory=shown_value(machine.memory_bytes, "bytes"),
        accelerator=machine.accelerator,
        versions=versions_for(tables),
        seconds=round(seconds),
        tables=tables,
    )


def commit_of(root: Path) -> str:
    """The commit whose files lie in a checkout; CommitError where git names none, or they differ from it.

    A result is of a tree that others can have: it is recorded after what it measures is committed. Results themselves
    and documents may differ.
    """
    try:
        commit = _git(root, "rev-parse", "HEAD").strip()
        status = ("status", "--porcelain", "--untracked-files=no")
        changed = _git(root, *status, "--", ".", ":!benchmarks/results/*", ":!*.md")
    except (OSError, subprocess.CalledProcessError) as error:
        raise CommitError(f"git names no commit of {root}: {error}; name it: --commit HASH") from error
    if changed:
        files = ", ".join(line[3:] for line in changed.splitlines()[:5])
        raise CommitError(f"these files differ from {commit[:10]}: {files}; commit first, so that the row names a tree")
    return commit


def is_commit(text: str) -> bool:
    """Whether this may be a commit's whole name."""
    return _COMMIT.fullmatch(text) is not None


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout


# --- files ----------------------------------------------------------------------------------------------------------


def path_of(record: Record, folder: Path = FOLDER) -> Path:
    """The file of a record; what ran on a GPU does not replace what ran without one."""
    return folder / f"{record.benchmark}{'.gpu' if record.accelerator else ''}.json"


def write_record(record: Record, folder: Path = FOLDER) -> Path:
    """Put a record in the place of the one before it, whole."""
    folder.mkdir(exist_ok=True)
    path = path_of(record, folder)
    write_whole(path, as_json(record).encode())
    return path


def read_records(folder: Path = FOLDER) -> list[Record]:
    """All records, by benchmark; RecordError where a file has another shape or another record's name."""
    records = []
    for path in sorted(folder.glob("*.json")):
        record = from_json(path.read_text(encoding="utf-8"), path.name)
        if path_of(record, folder) != path:
            raise RecordError(f"{path.name} has a record of {record.benchmark}; its name is {path_of(record).name}")
        records.append(record)
    return records


def as_json(record: Record) -> str:
    """The text of a record's file: keys in the order of the classes above, one line for each row of a table."""
    values = {
        name: [_table_as_dict(table) for table in record.tables] if name == "tables" else value
        for name, value in _present(record).items()
    }
    return _in_lines(values) + "\n"


def _table_as_dict(table: RecordedTable) -> dict[str, Any]:
    return {**_present(table), "findings": [_present(each) for each in table.findings]}


def _present(value: Any) -> dict[str, Any]:
    """The fields that are known, in their order; the unit of an interval only where there is one."""
    fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if fields.get("aa_interval") is None:
        fields.pop("aa_unit", None)
    return {name: each for name, each in fields.items() if each is not None}


def _in_lines(value: Any, indent: int = 0, *, are_sentences: bool = False) -> str:
    """JSON in which a row of a table is a line, and so a line of a diff; sentences have a line each."""
    inner, outer = " " * (indent + 1), " " * indent
    if isinstance(value, Mapping) and value:
        texts = (_in_lines(each, indent + 1, are_sentences=key == "notes") for key, each in value.items())
        items = (f"{inner}{json.dumps(key)}: {text}" for key, text in zip(value, texts, strict=True))
        return "{\n" + ",\n".join(items) + f"\n{outer}}}"
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    if is_list and (are_sentences or any(isinstance(each, (Mapping, list, tuple)) for each in value)):
        return "[\n" + ",\n".join(f"{inner}{_in_lines(each, indent + 1)}" for each in value) + f"\n{outer}]"
    return json.dumps(value, ensure_ascii=False)


def from_json(text: str, name: str) -> Record:
    """The record in a file's text; RecordError names the file where it has another shape."""
    try:
        values = json.loads(text)
        tables = tuple(
            RecordedTable(
                **{
                    "repeated": None,
                    **table,
                    "findings": tuple(_finding(each) for each in table["findings"]),
                    "columns": tuple(table["columns"]),
                    "rows": tuple(map(tuple, table["rows"])),
                    "notes": tuple(table["notes"]),
                }
            )
            for table in values["tables"]
        )
        record = Record(**{"accelerator": None, "seconds": None, **values, "tables": tables})
    except (TypeError, KeyError, ValueError) as error:
        raise RecordError(f"{name} is no record: {error!r}; write it: python -m benchmarks NAME --record") from error
    problem = _problem(record)
    if problem is not None:
        raise RecordError(f"{name}: {problem}")
    return record


def _finding(values: Mapping[str, Any]) -> Finding:
    if "aa_interval" not in values:
        return Finding(**values)
    low, high = values["aa_interval"]
    return Finding(**{**values, "aa_interval": (float(low), float(high))})


def _problem(record: Record) -> str | None:
    """What is wrong with a record that has all keys, if anything is."""
    if not is_commit(record.commit):
        return f"commit is {record.commit!r}; allowed: the forty digits of one"
    if _DATE.fullmatch(record.date) is None:
        return f"date is {record.date!r}; allowed: year, month and day, as 2026-01-31"
    if not record.tables or "torch" not in record.versions:
        return "it has no tables, or does not tell the version of torch"
    if record.commit_is not in ("measured", "added") or record.form not in ("whole", "short"):
        return f"commit_is is {record.commit_is!r} and form {record.form!r}; allowed: measured, added; whole, short"
    for table in record.tables:
        strange = {each.verdict for each in table.findings} - set(get_args(Verdict))
        if strange:
            return f"{table.title!r} has the verdicts {sorted(strange)}; allowed: {', '.join(get_args(Verdict))}"
        if not table.findings:
            return f"{table.title!r} has no findings"
        if any(len(row) != len(table.columns) for row in table.rows):
            return f"a row of {table.title!r} has not {len(table.columns)} cells, one for each column"
    return None
