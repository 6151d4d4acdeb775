"""What a master knows, as Prometheus reads it: its text format, version 0.0.4. Pure.

Names and units are those of Prometheus's conventions: seconds, bytes and ratios; ``_total`` is what only grows. What
changes with every job (texts, reasons) is no label, and there are at most so many series, however large a job is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from google.protobuf.message import Message

from elastic_ext.profile.phases import Phase
from elastic_ext.records.text import on_one_line

from .wire import master_pb2

__all__ = ["CONTENT_TYPE", "MOST_RANKS", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_RANKS = 1024
"""Of more ranks there are no series of each, but for those of the first so many."""
_MOST_NODES = 4096
_MOST_LABEL = 120
_MOST_COUNTERS = 64
_PREFIX = "elastic_ext"
_PHASES = tuple(phase.label for phase in Phase)
_NODE_STATES = ("live", "late", "lost", "left")
_PRESENT = ("live", "late")
_TUNER_MODES = ("off", "advise", "auto")
_TUNER_RATES: Mapping[str, str] = {
    "best": "The best that the tuner has measured so far.",
    "predicted": "What the tuner's last decision was to bring,",
    "measured": "... and has brought, once that is known.",
}
_COUNTERS: Mapping[str, str] = {
    "joins": "Agents that have joined.",
    "beats": "Beats of nodes that were answered.",
    "pushes": "Configs that were sent to nodes as they came.",
    "generated": "Versions of the config that the tuner has written.",
    "unacknowledged": "Streams of configs that were ended as their node did not hold what it was sent.",
    "events": "Events, by the number of the last one.",
}

Labels = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """One metric, with all of its series."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: Iterable[tuple[Labels, float]]


def exposition(
    status: master_pb2.JobStatus,
    counts: Mapping[str, int] | None = None,
    refusals: Mapping[str, int] | None = None,
    *,
    num_ranks: int | None = None,
    most_ranks: int = MOST_RANKS,
) -> str:
    """The whole page. ``counts`` is what the master has done since it started, ``refusals`` what not, by reason; they
    are called as the master's own code calls them, in small letters.

    Of a job of more than ``most_ranks`` the status may come without workers, with ``num_ranks`` in their place.
    """
    families = [
        *_of_master(status, counts or {}, refusals or {}),
        *_of_job(status),
        *_of_nodes(status.nodes[:_MOST_NODES]),
        *_of_ranks(status.nodes, num_ranks, most_ranks),
    ]
    return "".join(line for family in families for line in _lines(family))


# ---- what there is ----


def _of_master(
    status: master_pb2.JobStatus, counts: Mapping[str, int], refusals: Mapping[str, int]
) -> Iterator[_Family]:
    about = {"job": status.job, "job_id": status.job_id, "version": status.library}
    yield _one("master_info", "What this master is.", 1, about)
    yield _one("master_start_time_seconds", "When it started, since 1970.", status.time - status.up_seconds)
    yield _one("master_uptime_seconds", "How long it has been up.", status.up_seconds)
    yield _one("master_epoch", "Which process this is of those that have been this job's master.", status.epoch)
    for name, number in list(counts.items())[:_MOST_COUNTERS]:
        text = _COUNTERS.get(name, f"What the master calls {name}.")
        yield _Family(name=f"master_{name}_total", kind="counter", help=text, samples=[({}, number)])
    yield _Family(
        name="master_refusals_total",
        kind="counter",
        help="Calls that were refused, by reason.",
        samples=[({"reason": reason}, number) for reason, number in list(refusals.items())[:_MOST_COUNTERS]],
    )


def _of_job(status: master_pb2.JobStatus) -> Iterator[_Family]:
    config, progress = status.config, status.progress
    states = [each.state for each in status.nodes]
    yield _Family(
        name="nodes",
        kind="gauge",
        help="Nodes of the job, by whether they are heard of.",
        samples=[({"state": state}, states.count(state)) for state in _NODE_STATES],
    )
    yield _one("config_version", "The newest version of the config.", config.version)
    yield _one("config_nodes", "Nodes that should hold it.", config.num_nodes)
    yield _one("config_nodes_holding", "Nodes whose file has it.", config.num_holding)
    yield _one("membership_version", "Which membership of nodes the job is in.", status.membership.version)
    yield _one("membership_nodes", "Nodes in it.", len(status.membership.nodes))
    yield _one("troubles", "What there is to complain of.", len(status.troubles))
    yield _one("recommendations", "What a person should do.", len(status.recommendations))
    rates = ("steps_per_second", "samples_per_second", "tokens_per_second")
    yield _optional("step", "Steps that have committed since training began.", progress, "step")
    for name in rates:
        yield _optional(name, f"{name.partition('_')[0].capitalize()} of all ranks together, of late.", progress, name)
    shares = [({"phase": phase}, progress.shares[phase]) for phase in _PHASES if phase in progress.shares]
    yield _Family(name="phase_ratio", kind="gauge", help="Where the time of ranks goes, of late.", samples=shares)
    if status.verdict.kind:
        kind = {"kind": status.verdict.kind}
        yield _one("verdict", "What holds training up, as a label.", 1, kind)
    yield _optional("verdict_ratio", "Which part of the time that takes.", status.verdict, "share")
    yield from _of_tuner(status.tuning)


def _of_tuner(tuning: master_pb2.TuningStatus) -> Iterator[_Family]:
    if not tuning.mode:  # a master without one
        return
    modes = [({"mode": mode}, mode == tuning.mode) for mode in _TUNER_MODES]
    yield _Family(name="tuner_mode", kind="gauge", help="What the tuner may do, as a label.", samples=modes)
    yield _Family(
        name="tuner_decisions_total",
        kind="counter",
        help="What the tuner has decided.",
        samples=[({}, tuning.num_decisions)],
    )
    for name, text in _TUNER_RATES.items():
        yield _optional(f"tuner_{name}_samples_per_second", text, tuning, name)


def _of_nodes(nodes: Sequence[master_pb2.NodeStatus]) -> Iterator[_Family]:
    labels = [{"node": each.node.node_id, "host": each.node.host} for each in nodes]

    def family(name: str, text: str, values: Iterable[float]) -> _Family:
        return _Family(name=f"node_{name}", kind="gauge", help=text, samples=zip(labels, values, strict=True))

    yield family("up", "Whether the node is heard of.", (each.state in _PRESENT for each in nodes))
    yield family("silence_seconds", "How long ago it was heard of.", (each.seen_seconds for each in nodes))
    yield family("config_version", "Which version its file has.", (each.config_version for each in nodes))
    yield family("troubles", "What it has to complain of.", (len(each.troubles) for each in nodes))


def _of_ranks(nodes: Iterable[master_pb2.NodeStatus], num_ranks: int | None, most_ranks: int) -> Iterator[_Family]:
    ranks = [(each.node.node_id, worker) for each in nodes if each.state in _PRESENT for worker in each.workers]
    ranks.sort(key=lambda each: (each[1].rank, each[0]))
    told = ranks[:most_ranks]
    labels = [{"rank": str(worker.rank), "node": node_id} for node_id, worker in told]
    workers = [worker for _, worker in told]
    num_ranks = len(ranks) if num_ranks is None else num_ranks
    yield _one("ranks", "Ranks that nodes tell of.", num_ranks)
    yield _one("ranks_left_out", "Ranks of which there are no series, as there are very many.", num_ranks - len(told))
    running = zip(labels, (worker.state == "running" for worker in workers), strict=True)
    yield _Family(name="rank_running", kind="gauge", help="Whether its process runs.", samples=running)
    for name, text, amount, scale in _RANK_GAUGES:
        values = [
            (label, value * scale)
            for label, worker in zip(labels, workers, strict=True)
            if (value := _known(worker, amount)) is not None
        ]
        yield _Family(name=f"rank_{name}", kind="gauge", help=text, samples=values)
    for name, text, amount in _RANK_COUNTERS:
        counted = [
            (label, value)
            for label, worker in zip(labels, workers, strict=True)
            if (value := _known(worker, amount)) is not None
        ]
        yield _Family(name=f"rank_{name}_total", kind="counter", help=text, samples=counted)
    durations = [
        ({**label, "quantile": quantile}, value)
        for label, worker in zip(labels, workers, strict=True)
        for quantile, amount in (("0.5", "step_seconds"), ("0.9", "slow_step_seconds"))
        if (value := _known(worker, amount)) is not None
    ]
    text = "What the last steps took, half of them and nine tenths no longer."
    yield _Family(name="rank_step_duration_seconds", kind="gauge", help=text, samples=durations)


_RANK_GAUGES: tuple[tuple[str, str, str, float], ...] = (
    ("step", "Steps that have committed.", "step", 1),
    ("memory_bytes", "What its process holds of the machine's memory.", "memory_bytes", 1),
    ("accelerator_memory_bytes", "What its tensors hold on its accelerator.", "accelerator_bytes", 1),
    ("cpu_ratio", "Processors that it keeps busy.", "cpu_percent", 0.01),
    ("accelerator_busy_ratio", "How busy its accelerator is.", "gpu_percent", 0.01),
    ("config_version", "Which version is in force.", "config_version", 1),
)

_RANK_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("steps_not_finite", "Steps with gradients or a loss that were not finite.", "num_not_finite"),
    ("steps_skipped", "Those of them that were left out.", "num_skipped"),
)


# ---- as text ----


def _one(name: str, text: str, value: float, labels: Labels | None = None) -> _Family:
    return _Family(name=name, kind="gauge", help=text, samples=[(labels or {}, value)])


def _optional(name: str, text: str, message: Message, field: str) -> _Family:
    value = _known(message, field)
    return _Family(name=name, kind="gauge", help=text, samples=[] if value is None else [({}, value)])


def _known(message: Message, field: str) -> float | None:
    """What an optional field holds."""
    return float(getattr(message, field)) if message.HasField(field) else None


def _lines(family: _Family) -> Iterator[str]:
    """Nothing of a metric that has no series; of two series that are called the same the first."""
    name = f"{_PREFIX}_{family.name}"
    seen: set[str] = set()
    for labels, value in family.samples:
        series = name + _in_braces(labels)
        if series in seen or not math.isfinite(value):
            continue
        if not seen:
            yield f"# HELP {name} {_escaped(family.help, quotes=False)}\n# TYPE {name} {family.kind}\n"
        seen.add(series)
        yield f"{series} {_number(value)}\n"


def _in_braces(labels: Labels) -> str:
    if not labels:
        return ""
    parts = [f'{name}="{_escaped(on_one_line(value[:_MOST_LABEL]))}"' for name, value in labels.items()]
    return "{" + ",".join(parts) + "}"


def _escaped(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))
