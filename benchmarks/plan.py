"""What the benchmarks are for: in which part of the results each stands, what it takes, and what of it needs a GPU.

Minutes are those of a quiet machine with two processors. A record tells what its own run took.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["PARTS", "SHORT_SHARE", "Part", "Planned", "in_words", "on_gpu", "planned"]

SHORT_SHARE = 0.25
"""Of its usual time, what a benchmark is given with ``--short``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One benchmark."""

    name: str
    title: str
    minutes: float
    short_minutes: float
    gpu_order: int | None = None
    """When it runs among those that need a GPU, which are in the order of what they prove; None: none of it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Benchmarks that answer one question."""

    title: str
    question: str
    benchmarks: tuple[Planned, ...]


PARTS = (
    Part(
        title="A step",
        question="What does it cost to train with ElasticTrainer while nothing changes, over the same loop by hand?",
        benchmarks=(
            Planned(name="trainer_steps", title="A micro-step, alone and with DDP", minutes=5.4, short_minutes=1.8),
            Planned(name="trainer_sharded", title="A micro-step with fully_shard", minutes=3.1, short_minutes=1.4),
            Planned(name="agreement", title="Agreement at step boundaries", minutes=3.5, short_minutes=1.5),
            Planned(name="profile", title="The profile of steps", minutes=4.5, short_minutes=2.1),
            Planned(name="pulse", title="The pulse that tells a launcher of a rank", minutes=1.7, short_minutes=0.4),
            Planned(name="imports", title="The import of the library", minutes=2.0, short_minutes=0.9),
        ),
    ),
    Part(
        title="Changes",
        question="How soon is a change in force, and what does a change of the parallel plan cost beside a restart?",
        benchmarks=(
            Planned(name="config_latency", title="From a config file to its processes", minutes=1.0, short_minutes=0.3),
            Planned(name="master_config", title="From the master to training", minutes=1.0, short_minutes=0.4),
            Planned(name="reshard", title="Changes of the parallel plan", minutes=14.5, short_minutes=5.9),
        ),
    ),
    Part(
        title="Checkpoints",
        question="How long does a save hold training up, when is it on disk, and how long does a load take?",
        benchmarks=(
            Planned(name="checkpoint_save", title="Saving beside training", minutes=6.0, short_minutes=5.5),
            Planned(name="checkpoint_load", title="Loading, and saving in the loop", minutes=3.6, short_minutes=2.8),
            Planned(
                name="trainer_save", title="ElasticTrainer's own saves", minutes=3.4, short_minutes=1.5, gpu_order=1
            ),
            Planned(name="held_copies", title="Copies kept for signals", minutes=4.0, short_minutes=1.4),
        ),
    ),
    Part(
        title="Memory",
        question="What does it cost that a step survives running out of memory, and is a step's need told truly?",
        benchmarks=(
            Planned(name="guard", title="Steps that can be taken again", minutes=4.2, short_minutes=2.6),
            Planned(
                name="model_memory", title="Memory told ahead of a step", minutes=6.0, short_minutes=0.9, gpu_order=2
            ),
        ),
    ),
    Part(
        title="Data",
        question="Is the loader as fast as torch's, how long does a change hold it up, and how long does a resume?",
        benchmarks=(
            Planned(name="loader_speed", title="Batches a second", minutes=2.5, short_minutes=1.4),
            Planned(name="loader_first", title="The first batch", minutes=1.0, short_minutes=0.3),
            Planned(name="loader_switch", title="Changing workers and batch size", minutes=2.0, short_minutes=0.7),
            Planned(name="loader_resume", title="Resuming in the middle of an epoch", minutes=5.0, short_minutes=1.4),
        ),
    ),
    Part(
        title="Launcher and master",
        question="How long is training interrupted when a process or a node comes or goes, and how many nodes can one "
        "master serve?",
        benchmarks=(
            Planned(name="launcher", title="elastic-run beside torchrun", minutes=13.0, short_minutes=5.4),
            Planned(name="members", title="Members that come and go, or are lost", minutes=20.0, short_minutes=6.6),
            Planned(name="master_load", title="A master under load", minutes=5.0, short_minutes=4.3),
            Planned(name="master_flood", title="A master flooded by strangers", minutes=7.0, short_minutes=0.9),
        ),
    ),
    Part(
        title="Tuning",
        question="Is it found out what holds a job up, and does a job that tunes itself come near the best config?",
        benchmarks=(
            Planned(name="verdicts", title="What holds training up", minutes=4.0, short_minutes=1.2),
            Planned(name="change_detector", title="Changes of pace", minutes=1.0, short_minutes=1.0),
            Planned(name="tuning_search", title="Ways to tune, on simulated jobs", minutes=6.0, short_minutes=1.1),
            Planned(name="tuning_live", title="Real jobs that tune themselves", minutes=26.0, short_minutes=3.6),
        ),
    ),
)


def planned() -> Iterator[Planned]:
    """All benchmarks, part by part."""
    for part in PARTS:
        yield from part.benchmarks


def on_gpu() -> list[str]:
    """The names of those that have something which needs a GPU, in their order."""
    ordered = sorted((each.gpu_order, each.name) for each in planned() if each.gpu_order is not None)
    return [name for _, name in ordered]


def in_words(names: Sequence[str], *, is_short: bool) -> str:
    """What so many benchmarks take, each and together."""
    taken = {each.name: each.short_minutes if is_short else each.minutes for each in planned()}
    lines = [f"{name}: about {taken[name]:g} min" for name in names if name in taken]
    total = sum(taken.get(name, 0.0) for name in names)
    return "".join(f"{line}\n" for line in [*lines, f"together: about {total:.0f} min"])
