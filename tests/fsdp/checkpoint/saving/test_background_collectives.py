"""Threads that save call no collective: those of a run, and of whatever saves beside it, are its own thread's."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed import _functional_collectives as functional
from torch.optim import AdamW

from elastic_ext.fsdp import ShardCheckpointer
from elastic_ext.fsdp.checkpoint.saving import background
from tests.support.file_operations import Gate
from tests.support.overlapping import MICRO_BATCH, WRAPS, Net, learn, saving_trainer
from tests.support.ranks import RankPool
from tests.support.saving import checkpointer_of, end_saves, fill, make_state
from tests.support.training import make_data

OWN_THREAD = "MainThread"
JOIN_SECONDS = 30.0
COLLECTIVE = re.compile(
    "_?(all_?(reduce|gather|to_?all)|gather|scatter|broadcast|(monitored_)?barrier|reduce|i?send|i?recv|batch_i)|"
    "(new|split|shrink|destroy)_"
)
SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class Collectives:
    """Those that are called in this process, from Python: by torch.distributed's functions, by groups' own, as ops."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str]] = []
        """Of each, the name of the thread and its own."""
        backend = dist.ProcessGroupGloo.__base__
        for kind in (dist, dist.distributed_c10d, functional, dist.ProcessGroup, backend):
            for name, found in list(vars(kind).items()):
                if callable(found) and not isinstance(found, type) and COLLECTIVE.match(name):
                    monkeypatch.setattr(kind, name, self._watched(found, name))
        for op in (OpOverload, OpOverloadPacket):
            monkeypatch.setattr(op, "__call__", self._watched_op(op.__call__))

    def _note(self, name: str) -> None:
        self.seen.append((threading.current_thread().name, name))

    def _watched(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self._note(name)
            return call(*arguments, **options)

        return watched

    def _watched_op(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(op: Any, *arguments: Any, **options: Any) -> Any:
            words = str(op)
            if words.startswith(tuple(f"{space}." for space in SPACES)):
                self._note(words)
            return call(op, *arguments, **options)

        return watched


class Writers:
    """Which threads of this process make files of tensors in a folder, in a process that ends with its tests."""

    def __init__(self, folder: Path) -> None:
        self.names: list[str] = []
        self._folder = os.path.realpath(folder)
        self._is_on = True
        sys.addaudithook(self._hear)

    def end(self) -> None:
        self._is_on = False

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on or event != "open" or not isinstance(arguments[0], (str, bytes)):
            return
        path, flags = os.fsdecode(arguments[0]), arguments[2]
        if flags & os.O_CREAT and re.search(r"(model_param|optim_param|extra)", os.path.basename(path)):
            self.names.append(threading.current_thread().name)


def on_another_thread(act: Callable[[], object], name: str) -> None:
    thread = threading.Thread(target=act, name=name)
    thread.start()
    thread.join(JOIN_SECONDS)
    assert not thread.is_alive()


def call_each_kind() -> None:
    everybody = dist.group.WORLD
    assert everybody is not None
    dist.all_reduce(torch.ones(1))
    functional.all_reduce(torch.ones(1), "sum", everybody).add(1)
    everybody.allreduce([torch.ones(1)]).wait()


def collectives_of_trainer(rank: int, folder: Path, way: str, overlaps: bool) -> tuple[list[str], set[str], set[str]]:
    """The checkpoints, who called collectives while all was saved, and who wrote."""
    model = WRAPS[way](Net(0, is_sharded=way == "fully_shard"))
    inner = AdamW(model.parameters(), lr=0.01)
    trainer = saving_trainer(folder, model, rank=rank, overlap_saving=overlaps, keep_last=2)
    batch = make_data(MICRO_BATCH, torch.float32)
    with pytest.MonkeyPatch.context() as monkeypatch, trainer:
        optimizer = trainer.prepare(inner)
        collectives, writers = Collectives(monkeypatch), Writers(folder)

        def take(num_steps: int) -> None:
            for _ in range(num_steps):
                with trainer.step():
                    learn(model, optimizer, batch)

        gate = Gate(folder / "storage", like="os.mkdir") if rank == 0 else None
        take(2)
        num_before = len(collectives.seen)
        take(2)
        if gate is not None:
            gate.wait_until_reached()  # and no rank has saved it
            gate.open()
        assert len(collectives.seen) > num_before
        take(5)  # later ones remove what is older
        end_saves()
        saving = trainer._training.saving
        saving._copy()  # as at the end of an epoch, and then a signal comes
        on_another_thread(lambda: saving._write_newest(JOIN_SECONDS), "signals")
        end_saves()
        writers.end()
        threads = {thread for thread, _ in collectives.seen}
    saved = sorted(path.parent.name for path in (folder / "storage").glob("fsdp_checkpoint/*/*/COMMIT"))
    return saved, threads, set(writers.names)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("way", ["ddp", "fully_shard"])
def test_while_a_trainer_saves_all_collectives_are_called_by_its_own_thread(
    ranks: RankPool, tmp_path: Path, way: str, overlaps: bool
) -> None:
    for saved, callers, writers in ranks.run(2, collectives_of_trainer, tmp_path, way, overlaps):
        assert saved[-1] == "step_9"
        assert callers == {OWN_THREAD}
        assert writers == {background.THREAD_NAME}


def collectives_of_script(rank: int, storage: Path) -> tuple[set[str], set[str]]:
    model, optimizer = make_state()
    with pytest.MonkeyPatch.context() as monkeypatch:
        collectives, writers = Collectives(monkeypatch), Writers(storage)
        checkpointer: ShardCheckpointer
        with checkpointer_of(storage, in_background=True) as checkpointer:
            for step in (1, 2, 3):
                fill(model, optimizer, step)
                checkpointer.save(step, model, optimizer)
                checkpointer.is_saving()
            checkpointer.wait()
        writers.end()
        return {thread for thread, _ in collectives.seen}, set(writers.names)


def test_while_a_script_saves_all_collectives_are_called_by_its_own_thread(ranks: RankPool, tmp_path: Path) -> None:
    for callers, writers in ranks.run(2, collectives_of_script, tmp_path):
        assert callers == {OWN_THREAD}
        assert writers == {background.THREAD_NAME}


def collectives_of_another_thread(_: int) -> list[tuple[str, str]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        collectives = Collectives(monkeypatch)
        on_another_thread(call_each_kind, "another")
        return collectives.seen


def test_a_collective_that_another_thread_calls_is_seen(ranks: RankPool) -> None:
    for seen in ranks.run(2, collectives_of_another_thread):
        assert {thread for thread, _ in seen} == {"another"}
        assert {"all_reduce", "allreduce", "_c10d_functional.all_reduce"} <= {name for _, name in seen}
