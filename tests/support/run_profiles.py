"""Run directories with profiles, made up: of as many ranks and as long as a test asks for."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

from elastic_ext.profile.windows import window_seconds
from elastic_ext.records.metrics import JobEvent, StepWindow

START = 1_780_000_000.0


def window(
    begin: float,
    seconds: Mapping[str, float],
    *,
    step: int = 0,
    num_steps: int = 0,
    rank: int = 0,
    restart: int = 0,
    version: int = 0,
    world_size: int = 1,
    num_samples: int = 0,
    typical: Mapping[str, float] | None = None,
    memory_bytes: int | None = 1 << 30,
    accelerator_bytes: int | None = None,
) -> StepWindow:
    """One window, as long as its phases together."""
    length = sum(seconds.values())
    return StepWindow(
        begin=begin,
        end=begin + length,
        rank=rank,
        world_size=world_size,
        restart=restart,
        step=step,
        num_steps=num_steps,
        config_version=version,
        config_revision=0,
        seconds=seconds,
        typical=typical or {},
        step_seconds=(length / num_steps,) * 4 if num_steps else (),
        num_samples=num_samples,
        num_detailed=num_steps,
        memory_bytes=memory_bytes,
        accelerator_bytes=accelerator_bytes,
        accelerator_peak_bytes=accelerator_bytes,
    )


def first_window(begin: float, seconds: float, *, step: int = 0, rank: int = 0, restart: int = 0) -> StepWindow:
    """The one that ends as a process's first step begins."""
    return window(begin, {"startup": seconds}, step=step, rank=rank, restart=restart)


def life(
    begin: float,
    end: float,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    restart: int = 0,
    first_step: int = 0,
    step_seconds: float = 0.1,
    slowness: float = 1.0,
    startup_seconds: float = 5.0,
    seed: int = 0,
    changes: Mapping[float, int] | None = None,
) -> Iterator[StepWindow]:
    """The windows of a process that trains from ``begin`` to ``end``; ``changes`` are config versions by their time."""
    chance = random.Random(seed * 1000 + rank)
    begun = min(startup_seconds, (end - begin) / 2)
    yield first_window(begin, begun, step=first_step, rank=rank, restart=restart)
    now, step = begin + begun, first_step
    while now < end - 1e-6:
        length = min(window_seconds(now - begin, 1e9), end - now)
        version = max((each for moment, each in (changes or {}).items() if moment <= now), default=0)
        num_steps = max(round(length / step_seconds), 1)
        busy = min(0.7 * slowness * chance.uniform(0.95, 1.05), 0.93)
        shares = {"data": 0.03, "forward": 0.3 * busy, "backward": 0.6 * busy, "optimizer": 0.1 * busy}
        shares |= {"agreement": 0.01, "other": 0.01}
        if chance.random() < 0.02:
            shares["checkpoint"] = 0.01
        shares["communication"] = 1.0 - sum(shares.values())
        step += num_steps
        yield window(
            now,
            {name: share * length for name, share in shares.items()},
            step=step,
            num_steps=num_steps,
            rank=rank,
            restart=restart,
            version=version,
            world_size=num_ranks,
            num_samples=num_steps * 32 * num_ranks,
            typical={name: share * length / num_steps for name, share in shares.items() if name != "checkpoint"},
            memory_bytes=(6 << 30) + rank * (1 << 20),
            accelerator_bytes=40 << 30,
        )
        now += length


def event(time: float, kind: str, text: str, *, rank: int = 0, step: int = 0, **details: object) -> JobEvent:
    """Something that happened."""
    return JobEvent(time=time, generation=0, rank=rank, step=step, kind=kind, text=text, details=details)


def agent_event(time: float, kind: str, text: str) -> JobEvent:
    """... as an agent tells of it."""
    return event(time, kind, text, rank=-1, step=-1)


def write_windows(folder: Path, rank: int, windows: Iterator[StepWindow] | list[StepWindow]) -> None:
    """Add them to a rank's profile."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"profile-{rank}.jsonl", "a") as file:
        file.writelines(each.to_json() + "\n" for each in windows)


def write_events(folder: Path, name: str, events: list[JobEvent]) -> None:
    """Add them to a file of events."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"events-{name}.jsonl", "a") as file:
        file.writelines(each.to_json() + "\n" for each in events)


def write_job(folder: Path, num_ranks: int, seconds: float, *, slow_rank: int | None = None) -> None:
    """A job with two config changes and, two thirds in, a failure after which it goes on from an earlier step."""
    failed, again = START + seconds * 0.65, START + seconds * 0.68
    step_seconds = max(seconds / 5e6, 0.01)
    changes = {START + seconds * 0.2: 1, START + seconds * 0.45: 2}
    back = round(seconds * 0.6 / step_seconds)
    write_events(
        folder,
        "agent",
        [
            agent_event(START, "started", f"job made: {num_ranks} workers on this node"),
            agent_event(START, "workers-started", "workers started"),
            agent_event(failed + seconds * 0.002, "worker-failed", "rank 1 ended by SIGKILL"),
            agent_event(again, "workers-started", "workers started"),
            agent_event(START + seconds, "succeeded", "all workers of this node have ended well"),
        ],
    )
    for rank in range(num_ranks):
        slowness = 1.25 if rank == slow_rank else 1.0
        startup = min(30.0, seconds / 50)
        given = {"rank": rank, "num_ranks": num_ranks, "step_seconds": step_seconds, "slowness": slowness}
        first = life(START, failed, startup_seconds=startup, changes=changes, **given)  # type: ignore[arg-type]
        then = life(again, START + seconds, restart=1, first_step=back, startup_seconds=startup,
                    changes={again: 2}, seed=1, **given)  # type: ignore[arg-type]  # fmt: skip
        write_windows(folder, rank, first)
        write_windows(folder, rank, then)
        events = [event(START + startup, "training-began", "training begins", rank=rank)]
        for moment, version in changes.items():
            text = f"version {version} in force from step 9: dataloader.batch_size {version} -> {version + 1}"
            events.append(event(moment, "config-applied", text, rank=rank, step=9, version=version, revision=0))
        events.append(event(again, "training-began", "training goes on", rank=rank, step=back))
        write_events(folder, str(rank), events)
    (folder / "agent.json").write_text(json.dumps({"job": "made"}))
