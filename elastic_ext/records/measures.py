"""The table of metrics, and Measures, the values that a rank has measured.

A metric is one row: what it is, how it is added up over steps and over ranks, who is told of it, and in which words.
All code that writes, sends, shows or documents metrics goes by the rows. To add a metric, give ``Measures`` a field
with a row, and have the code that measures it put the value into ``Counts.measured`` of its training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from .text import counted, size_in_words

__all__ = [
    "METRICS",
    "Measures",
    "Metric",
    "MetricUnit",
    "OverSteps",
    "metric_table",
    "parts_of",
    "shown_in_words",
    "words_of",
]

OverSteps = Literal["last", "total"]
"""``last``: the newest value of a metric counts. ``total``: a metric is added up from 0 on, since the run began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricUnit:
    """The unit that metrics are counted in, and how a number of it reads."""

    name: str
    most: float
    """A larger number is taken for broken, and left out."""
    in_words: Callable[[float], str]
    is_whole: bool = False


def _rate(name: str, most: float) -> MetricUnit:
    return MetricUnit(name=name, most=most, in_words=lambda value: f"{value:.3g} {name}")


_BYTES = MetricUnit(name="bytes", most=2**60, in_words=lambda value: size_in_words(int(value)), is_whole=True)
_STEPS = MetricUnit(name="steps", most=2**53, in_words=lambda value: counted(int(value), "step"), is_whole=True)
_SECONDS = MetricUnit(name="seconds", most=1e9, in_words=lambda value: f"{value:.3g} s")
_TIME = MetricUnit(name="seconds since 1970", most=1e11, in_words=lambda value: f"{value:.0f}")
_NUMBER = MetricUnit(name="number", most=2**53, in_words=lambda value: f"{value:g}", is_whole=True)
_LEAST_SPEED = 1e-6  # in steps per second
_REAL = MetricUnit(name="number", most=1e18, in_words=lambda value: f"{value:.4g}")


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table of metrics; Prometheus and the documentation print its sentence."""

    meaning: str
    unit: MetricUnit | None = None
    """None where the value is no number: no reader shows such a metric by its row alone."""
    over_steps: OverSteps = "last"
    over_ranks: Literal["apart", "most", "middle"] = "apart"
    """``apart``: every rank has its own value. ``most``: so it is, and the value of a job is that of the rank that has
    the most. ``middle``: the value of a job is that of the rank in the middle, and Prometheus has this one alone."""
    is_told: bool = True
    """Whether a node's status and the master hear of the metric; else it stays in the rank's file."""
    prometheus: str = ""
    """The name in Prometheus without ``elastic_ext_``, ``rank_`` and ``_total``, and the name in a report's JSON; empty
    where neither has the metric."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels in Prometheus that tell the metric from others of the same name."""
    help: str = ""
    """The sentence for Prometheus, where it is another one than ``meaning``."""
    words: str = ""
    """The words that follow a number and its unit."""
    in_status: bool = False
    """Whether ``elastic-ext status`` shows the metric in the row of each rank."""
    on_page: bool = False
    """Whether the report page shows the metric, where it is not 0."""
    part_of: str = ""
    """The name of another metric, if this one counts a part of that: it is shown in the words of that one."""
    trouble: str = ""
    """What is wrong where a rank has more of the metric than its parts are; empty where that is no trouble."""

    @property
    def full_name(self) -> str:
        """The name in Prometheus that follows ``elastic_ext_``."""
        whose = "" if self.over_ranks == "middle" else "rank_"
        return f"{whose}{self.prometheus}{'_total' if self.over_steps == 'total' else ''}"


def _row(metric: Metric, default: object = None) -> Any:
    """A dataclass field of Measures, with the metric's row in its metadata."""
    return field(default=default, metadata={"metric": metric})


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """The values that a rank has measured since its record before; None for one that is not known."""

    steps_per_second: float | None = _row(
        Metric(
            "Boundaries that training has passed, per second since the record before.",
            _rate("steps/s", 1e9),
            over_ranks="middle",
            prometheus="steps_per_second",
            help="Steps per second of all ranks together, in the last seconds.",
            in_status=True,
        )
    )
    samples_per_second: float | None = _row(
        Metric(
            "Samples of all ranks together; null where the loader does not say how many it gives.",
            _rate("samples/s", 1e12),
            over_ranks="middle",
            prometheus="samples_per_second",
            help="Samples per second of all ranks together, in the last seconds.",
        )
    )
    memory_bytes: int | None = _row(
        Metric("The machine's memory that the rank's process holds.", _BYTES, prometheus="memory_bytes", in_status=True)
    )
    accelerator_bytes: int | None = _row(
        Metric(
            "The accelerator's memory that the rank's tensors hold.",
            _BYTES,
            prometheus="accelerator_memory_bytes",
            words="on its accelerator",
            in_status=True,
        )
    )
    accelerator_peak_bytes: int | None = _row(
        Metric(
            "The most accelerator memory that the rank's tensors held, since torch's peak counters were reset.",
            _BYTES,
            is_told=False,
        )
    )
    shares: Mapping[str, float] = field(
        default_factory=dict,
        metadata={"metric": Metric("Where the rank's time went of late, by phase; empty where not known.")},
    )
    step_seconds: float | None = _row(
        Metric(
            "The median duration of the last steps.",
            _SECONDS,
            prometheus="step_duration_seconds",
            labels={"quantile": "0.5"},
            help="The duration of the last steps: the median and the 90th percentile.",
        )
    )
    slow_step_seconds: float | None = _row(
        Metric(
            "The 90th percentile of the durations of the last steps.",
            _SECONDS,
            prometheus="step_duration_seconds",
            labels={"quantile": "0.9"},
        )
    )
    tokens_per_second: float | None = _row(
        Metric(
            "Tokens of all ranks together; null where the model is given none.",
            _rate("tokens/s", 1e15),
            over_ranks="middle",
            prometheus="tokens_per_second",
            help="Tokens per second of all ranks together, in the last seconds.",
        )
    )
    num_workers: int | None = _row(
        Metric("Workers of the rank's dataloader; 0 where the rank loads samples itself.", _NUMBER, is_told=False)
    )
    num_processors: int | None = _row(
        Metric(
            "Processors of the machine that the rank may use, with all others there that may use them.",
            _NUMBER,
            is_told=False,
        )
    )
    num_micro_steps: int | None = _row(Metric("Micro-steps of a step.", _NUMBER, is_told=False))
    global_batch_size: int | None = _row(
        Metric("Samples of a full step, over all ranks; null where that is not known.", _NUMBER, is_told=False)
    )
    micro_batch_size: int | None = _row(
        Metric(
            "The most samples that the rank takes at once in a full step; null where that is not known.",
            _NUMBER,
            is_told=False,
        )
    )
    learning_rate: float | None = _row(
        Metric(
            "The learning rate in use, of the first parameter group: with its schedule, and as the config changed it.",
            _REAL,
            is_told=False,
        )
    )
    num_replicas: int | None = _row(
        Metric("Replicas of the model, each of which takes samples of its own.", _NUMBER, is_told=False)
    )
    epoch: int | None = _row(Metric("The epoch that the loop is in; null outside of `trainer.epoch()`.", _NUMBER))
    num_epoch_steps_left: int | None = _row(
        Metric("Steps that are left of the epoch; null where its length is not known.", _STEPS)
    )
    checkpoint_step: int | None = _row(
        Metric("The step of the newest checkpoint that the run has saved or gone on from.", _NUMBER)
    )
    checkpoint_time: float | None = _row(
        Metric("When the save of that checkpoint began; rank 0 alone knows it of one just saved.", _TIME)
    )
    waits_in_passes: bool = _row(
        Metric("Whether passes wait for parameters of other ranks.", is_told=False), default=False
    )
    logged: Mapping[str, float] = field(
        default_factory=dict,
        metadata={
            "metric": Metric(
                "The numbers that the script gives to `trainer.log()`, by name: each the rank's mean over the steps "
                "since the record before, or its last one.",
                help="The numbers that the script gives to trainer.log(), by name: the mean over ranks.",
            )
        },
    )
    num_not_finite: int | None = _row(
        Metric(
            "Steps with gradients or a loss that were not finite.",
            _STEPS,
            over_steps="total",
            over_ranks="most",
            prometheus="steps_not_finite",
            words="not finite",
            in_status=True,
            on_page=True,
            trouble="parameters may not be finite any more: look at its events",
        )
    )
    num_skipped: int | None = _row(
        Metric(
            "Steps that were left out since they were not finite.",
            _STEPS,
            over_steps="total",
            over_ranks="most",
            prometheus="steps_skipped",
            help="Steps that were left out since their gradients or loss were not finite.",
            words="left out",
            on_page=True,
            part_of="num_not_finite",
        )
    )

    def at_rate(self, steps_per_second: float | None) -> Measures:
        """These measures with all rates at the steps per second that an agent has counted, where it has.

        Samples and tokens of a step are those of the metrics, so that the rates fit one another.
        """
        if steps_per_second is None:
            return self
        known = self.steps_per_second
        rates: dict[str, Any] = {"steps_per_second": steps_per_second}
        if known is not None and known >= _LEAST_SPEED:
            for name in ("samples_per_second", "tokens_per_second"):
                rate = getattr(self, name)
                if rate is not None and math.isfinite(rate / known * steps_per_second):
                    rates[name] = rate / known * steps_per_second
        return replace(self, **rates)

    def told(self) -> dict[str, Any]:
        """The values that a node's status and the master hear of, by name."""
        return {name: getattr(self, name) for name, metric in METRICS.items() if metric.is_told}


METRICS: Mapping[str, Metric] = {each.name: each.metadata["metric"] for each in fields(Measures)}
"""The rows of all metrics, by the name that a metric has in files, on the wire and in JSON."""


def parts_of(name: str) -> list[str]:
    """The metrics that count a part of the metric ``name``."""
    return [part for part, metric in METRICS.items() if metric.part_of == name]


def words_of(name: str, values: Mapping[str, Any]) -> str:
    """The metric ``name`` in words, such as ``3 steps not finite, 2 left out``; empty where it is not known, and for a
    total of 0."""
    metric, value = METRICS[name], values.get(name)
    if metric.unit is None or value is None or (metric.over_steps == "total" and not value):
        return ""
    words = f"{metric.unit.in_words(value)} {metric.words}".rstrip()
    return words + "".join(f", {values[part]} {METRICS[part].words}" for part in parts_of(name) if values.get(part))


def shown_in_words(values: Mapping[str, Any], over_steps: OverSteps) -> list[str]:
    """The cells of a rank's row in a status, for the metrics that are added up so over steps."""
    return [
        words_of(name, values)
        for name, metric in METRICS.items()
        if metric.in_status and metric.over_steps == over_steps
    ]


def metric_table() -> str:
    """The table of metrics as Markdown, for the documents."""
    rows = ["| metric | counted in | holds | in Prometheus |", "|---|---|---|---|"]
    for name, metric in METRICS.items():
        unit = "" if metric.unit is None else metric.unit.name
        since = ", since the run began" if metric.over_steps == "total" else ""
        prometheus = f"`elastic_ext_{metric.full_name}`" if metric.prometheus else ""
        rows.append(f"| `measures.{name}` | {unit}{since} | {metric.meaning} | {prometheus} |")
    return "\n".join(rows) + "\n"
