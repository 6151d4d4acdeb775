"""The numbers in README, some of the recorded claims in words for a newcomer; ``make results`` puts them in.

Every number comes from a record in benchmarks/results/. What is chosen here is which lines a newcomer sees, and how the
work and the peer are called.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Finding
from benchmarks.recording import Record

__all__ = ["README", "Line", "lines_shown", "table_of", "with_numbers"]

README = Path(__file__).resolve().parent.parent / "README.md"

_BEGIN = "<!-- numbers: made by make results -->"
_END = "<!-- end of numbers -->"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of README's table: which recorded claim it shows, and in which words."""

    what: str
    peer: str
    benchmark: str
    table: str
    """How the title of the record's table begins."""
    claim: str
    """How the claim begins."""


LINES = (
    Line(
        what="training stands still for a checkpoint, 2 ranks, 473 MiB",
        peer="`dcp.save`",
        benchmark="checkpoint_save",
        table="Blocked by a save, 2 ranks, 236.5 MiB",
        claim="ShardCheckpointer, in the background takes",
    ),
    Line(
        what="the same, beside the fastest way of torch",
        peer="`async_save` with a stager that is kept",
        benchmark="checkpoint_save",
        table="Blocked by a save, ours over others round by round, 2 ranks, 236.5 MiB",
        claim="ours over async_save, stager kept",
    ),
    Line(
        what="2 ranks' checkpoint loaded by 2",
        peer="`torch.distributed.checkpoint`",
        benchmark="checkpoint_load",
        table="Load, 2 to 2 ranks",
        claim="ShardCheckpointer takes",
    ),
    Line(
        what="another sharding: `full_shard` to `no_shard`, 4 ranks",
        peer="save, restart and load",
        benchmark="reshard",
        table="A change of plan",
        claim="full_shard to no_shard: live takes",
    ),
    Line(
        what="no step while a node joins (`--members=live`)",
        peer="`torchrun`",
        benchmark="members",
        table="A node joins two, DDP: live over others",
        claim="live over torchrun",
    ),
    Line(
        what="the same, beside replicas that agree in each step and lose samples",
        peer="torchft",
        benchmark="members",
        table="A node joins two, DDP: live over others",
        claim="live over torchft",
    ),
    Line(
        what="no step after a worker was killed",
        peer="`torchrun`",
        benchmark="launcher",
        table="No step: a worker is killed",
        claim="elastic-run takes",
    ),
    Line(
        what="to the next batch, resumed at 8 of 10 million samples, 2 workers",
        peer="torchdata's `StatefulDataLoader`",
        benchmark="loader_resume",
        table="From a state at 0.8 of 10,000,000 samples to the next batch, 2 workers",
        claim="ElasticDataLoader takes",
    ),
    Line(
        what="the longest wait while loader workers change, 4 to 6",
        peer="a new `DataLoader`",
        benchmark="loader_switch",
        table="The longest wait for a batch: 4 to 6 workers",
        claim="live: workers takes at most 0.05",
    ),
    Line(
        what="a micro-step of a tiny model, one rank (CPU time)",
        peer="the loop by hand",
        benchmark="trainer_steps",
        table="A micro-step, CPU time of the training thread: one rank, A = 1",
        claim="ElasticTrainer takes",
    ),
)
"""What README shows, in this order."""


def lines_shown(records: Sequence[Record]) -> list[tuple[Line, Record, Finding]]:
    """Each line with the one recorded claim that it names."""
    shown = []
    for line in LINES:
        found = [
            (line, record, finding)
            for record in records
            if record.benchmark == line.benchmark and record.accelerator is None
            for table in record.tables
            if table.title.startswith(line.table)
            for finding in table.findings
            if finding.claim.startswith(line.claim)
        ]
        assert len(found) == 1, f"{line} names {len(found)} recorded claims"
        shown += found
    return shown


def table_of(records: Sequence[Record]) -> str:
    """The table, and the sentence below it that counts which of all recorded claims held."""
    rows = [
        f"| {line.what} | {_values(finding)} | {line.peer} | {_ratio(finding)} | {_bound(finding)} | "
        f"{_VERDICTS[finding.verdict]} | {record.date} |"
        for line, record, finding in lines_shown(records)
    ]
    verdicts = Counter(finding.verdict for record in records for table in record.tables for finding in table.findings)
    claimed = verdicts["pass"] + verdicts["fail"] + verdicts["inconclusive"]
    words = (
        f"Of all {claimed} claims that were measured, {verdicts['pass']} held, {verdicts['fail']} were missed, and for "
        f"{verdicts['inconclusive']} the machine was too noisy to tell."
    )
    head = [
        "| what takes so long | elastic_ext | peer | which peer | ratio | our claim | the claim is | measured |",
        "|---|---:|---:|---|---:|---|---|---|",
    ]
    return "\n".join([*head, *rows, "", words])


def _values(finding: Finding) -> str:
    """What both sides took; nothing where the ratio alone was recorded."""
    return " | " if finding.ratio is None else f"{finding.value} | {finding.peer_value}"


def _ratio(finding: Finding) -> str:
    ratio = float(finding.value.removeprefix("p50 ")) if finding.ratio is None else finding.ratio
    return f"{ratio:.2f}" if ratio >= 0.01 else f"{ratio:.1g}"


def _bound(finding: Finding) -> str:
    """What was claimed."""
    (bound,) = re.findall(r"at most [\d.]+(?: times| µs more)?", finding.claim)
    return str(bound)


_VERDICTS = {"pass": "held", "fail": "**missed**", "inconclusive": "too noisy to tell", "none claimed": "none"}


def with_numbers(page: str, records: Sequence[Record]) -> str:
    """README's text with the numbers of these records between its two marks."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert begin and end, f"README has {_BEGIN} and {_END}, once each, around its numbers"
    return f"{before}{_BEGIN}\n\n{table_of(records)}\n\n{_END}{after}"
