"""What tests of the loader load, and what they ask of it: importable by workers that are not forked."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import get_worker_info

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.data.loader import ElasticDataLoader
from tests.support.pools import Both, Held, Samples, hang_for_ever, held, open_gate, worker_pids

__all__ = [
    "Numbers",
    "OpenGate",
    "SizedSamples",
    "changed",
    "collate_by_hand",
    "indices_in",
    "loader_of",
    "main_that_is_interrupted",
    "main_that_is_killed",
    "settled",
    "worker_pids",
]


class Numbers:
    """Each sample is its own index, and who made it: a worker's pid, 0 for this process."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return index, 0 if get_worker_info() is None else os.getpid()


@dataclass
class SizedSamples(Samples):
    """Samples that are their indices, but for some that do something first."""

    size: int = 10

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True)
class OpenGate:
    """What a sample does for another that waits at a gate, in another worker."""

    gate: Path

    def __call__(self) -> None:
        open_gate(self.gate)


def collate_by_hand(samples: list[tuple[int, int]]) -> list[torch.Tensor]:
    return [torch.tensor(part) for part in zip(*samples, strict=True)]


def loader_of(size: int, batch_size: int = 4, **arguments: Any) -> ElasticDataLoader:
    return ElasticDataLoader(Numbers(size), batch_size, **arguments)


def indices_in(batches: Any) -> list[int]:
    """The samples of batches of Numbers, in order."""
    return [int(index) for indices, _ in batches for index in indices]


def changed(loader: ElasticDataLoader, **values: Any) -> None:
    """Have a config with these values come into force."""
    old = ElasticConfig.from_values({})
    new = ElasticConfig.from_values({f"dataloader.{name}": value for name, value in values.items()})
    assert loader.check(new) is None
    loader.apply(old, new)


# --- what is left ---------------------------------------------------------------------------------------------------


def settled() -> Held:
    """What this process has open once what nobody refers to is gone."""
    gc.collect()
    return held()


# --- processes of their own -----------------------------------------------------------------------------------------


_KEPT: list[Any] = []  # loops that are there at the interpreter's end


def main_that_is_interrupted() -> None:
    """Waits for a Ctrl-C in the body of a loop, says what that leaves, and waits for the next between two batches."""
    _KEPT.append(iter(loader_of(100, num_workers=1)))
    next(_KEPT[0])
    before = settled()
    with contextlib.suppress(KeyboardInterrupt):
        _hang_in_a_loop()
    after = settled()
    print(json.dumps([str(before), str(after)]), flush=True)
    main_that_is_killed("fork")


def main_that_is_killed(start_method: str) -> None:
    """Two workers say who they are; one then says that it hangs, and the other has nothing to do."""
    dataset = SizedSamples({0: Both(_say_that_it_hangs, hang_for_ever)}, 5)
    loader = ElasticDataLoader(
        dataset, None, num_workers=2, multiprocessing_context=start_method, worker_init_fn=_say_who_it_is
    )
    next(iter(loader))


def _hang_in_a_loop() -> None:
    for _ in loader_of(100, num_workers=2, worker_init_fn=_say_who_it_is):
        _say_that_it_hangs()
        hang_for_ever()


def _say_who_it_is(worker_id: int) -> None:
    os.write(1, f"{os.getpid()}\n".encode())


def _say_that_it_hangs() -> None:
    os.write(1, b"hangs\n")
