"""Small saves as rank 0 makes them, whole folders of them, and what must hold of a job's folder whatever has happened.

Run as a module, it kills the scenario that it is given at its calls in turn; a process of its own, since it forks.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from elastic_ext.errors import CheckpointError
from elastic_ext.fsdp.checkpoint.folder.commit import COMMIT, Chain, Commit, chain_after, read_commit
from elastic_ext.fsdp.checkpoint.folder.job_folder import JobFolder
from elastic_ext.fsdp.checkpoint.folder.listing import ListedCheckpoint, is_name
from elastic_ext.fsdp.checkpoint.format.reader import ShardReader
from elastic_ext.fsdp.checkpoint.format.writer import TensorToWrite, write_shard
from elastic_ext.records.files import NewFiles, write_new
from tests.support.syscalls import every_kill

__all__ = ["SCENARIOS", "Run", "assert_loads", "assert_tidy", "killed_everywhere", "runs"]

SHARD = "model_param.00000-00001.safetensors"
META = b'{"tensors": {}}'


class Run:
    """One life of a job: it claims the folder, goes on from what it is given, and saves."""

    def __init__(self, path: Path, run_id: str, *, patience_seconds: float = 0.0) -> None:
        self.id = run_id
        self.folder = JobFolder(path)
        self.claim = self.folder.claim(run_id, patience_seconds=patience_seconds)
        self.chain: Chain = chain_after(None, run_id=run_id)
        self._num_saves = 0

    def go_on(self, found: ListedCheckpoint | None) -> Run:
        self.chain = chain_after(None if found is None else found.commit, run_id=self.id)
        return self

    def save(self, name: str, *, step: int | None = None, epoch: int = 0) -> ListedCheckpoint:
        """Save under a name; its number is the global step unless that is given. All calls of one save are here."""
        self._num_saves += 1
        generation = f"{self.id}-{self._num_saves}"
        path = self.folder.begin(name, generation, self.chain)
        try:
            return self._write(path, generation, int(name.partition("_")[2]) if step is None else step, epoch)
        except (OSError, CheckpointError):
            self.folder.discard(name)
            raise

    def _write(self, path: Path, generation: str, step: int, epoch: int) -> ListedCheckpoint:
        name = path.name
        tensor = memoryview(generation.encode() * 100)
        with NewFiles() as new:
            checksum = self.folder.put_meta(name, "model_meta.json", META)
            state = self.folder.put_state(new, name, "trainer_state.json", generation.encode())
            pieces = [TensorToWrite("tensor", "U8", (len(tensor),), tensor)]
            shard = write_shard(new, path / SHARD, pieces, generation=generation)
            new.sync()
            new.put_in_place()
        commit = Commit(
            generation=generation,
            lineage=self.chain,
            global_step=step,
            epoch=epoch,
            num_ranks=1,
            metas={"model_meta.json": checksum},
            states={"trainer_state.json": state},
            shards={SHARD: shard},
            saved_at=f"2026-11-20T19:30:{self._num_saves:02}+00:00",
        )
        return self.folder.commit(name, commit)

    def end(self) -> None:
        self.claim.release()


def runs(path: Path, history: Mapping[str, tuple[str | None, list[str]]]) -> None:
    """Live through ``history``: each run by its id, the name of what it goes on from, and the names that it saves."""
    for run_id, (parent, names) in history.items():
        run = Run(path, run_id)
        run.go_on(run.folder.found(parent) if parent else None)
        for name in names:
            run.save(name)
        run.end()


def assert_loads(found: ListedCheckpoint) -> None:
    """Every file of a checkpoint is there and is what was saved with it."""
    commit = found.commit
    assert found.read_meta("model_meta.json") == META
    assert found.read_state("trainer_state.json") == commit.generation.encode()
    with ShardReader(found.path / SHARD, summary=commit.shards[SHARD], generation=commit.generation) as reader:
        assert reader.read("tensor") == commit.generation.encode() * 100


def assert_tidy(path: Path) -> None:
    """Nothing lies in a job's folder but checkpoints, those that were renamed, and what belongs to the job."""
    for name in os.listdir(path):
        if name in ("RUN.json", "RUN.lock", "meta"):
            continue
        assert is_name(name.partition(".")[0]), f"{name} was left in {path}"
        assert (path / name / COMMIT).exists()
    named = {checksum for folder in path.iterdir() for checksum in _metas_of(folder)}
    kept = {file.stem for file in path.glob("meta/*.json")}
    assert kept <= named, f"{kept - named} were left in {path}"
    left = [file for _, _, files in os.walk(path) for file in files if file.endswith(".tmp")]
    assert not left, f"{left} were left in {path}"


def _metas_of(folder: Path) -> Collection[str]:
    try:
        return read_commit(folder).metas.values()
    except CheckpointError:
        return []


# ---- scenarios: what is there before, what is done, and which checkpoint may be the newest afterwards ----


def _first(path: Path) -> Run:
    return Run(path, "a")


def _second(path: Path) -> Run:
    runs(path, {"a": (None, ["step_1"])})
    return _resumed(path, "b", "step_1")


def _fork(path: Path) -> Run:
    """Steps 2 and 3 turned out to be of no use, so that training goes on from step 1, and takes the name step_2."""
    runs(path, {"a": (None, ["step_1", "step_2"]), "b": ("step_2", ["step_3"])})
    (path / "step_4").mkdir()
    (path / "step_4" / COMMIT).write_bytes(b"not a commit")
    return _resumed(path, "c", "step_1")


def _leftovers(path: Path) -> Run:
    """A save was killed before, in the folder whose name is now wanted; a removal too."""
    runs(path, {"a": (None, ["step_1"])})
    for name in ("step_2", ".garbage-0123456789abcdef-step_9"):
        (path / name).mkdir()
        (path / name / ".model_param.0123456789abcdef.tmp").write_bytes(b"half")
    (path / ".RUN.json.0123456789abcdef.tmp").write_bytes(b"half")
    (path / "step_1" / ".COMMIT.0123456789abcdef.tmp").write_bytes(b"half")
    return _resumed(path, "b", "step_1")


def _resumed(path: Path, run_id: str, parent: str) -> Run:
    run = Run(path, run_id)
    run.go_on(run.folder.found(parent))
    return run


def _ended(path: Path) -> Run:
    run = _leftovers(path)
    run.end()
    return run


def _save(run: Run) -> None:
    run.save("step_2")


def _prune_and_save(run: Run) -> None:
    run.folder.prune_garbage()
    run.save("step_2")


def _discard(run: Run) -> None:
    path = run.folder.begin("step_2", "g", run.chain)
    write_new(path / SHARD, b"half")
    run.folder.discard("step_2")


def _claim_again(run: Run) -> None:
    Run(run.folder.path, "again").end()


SCENARIOS: dict[str, tuple[Callable[[Path], Run], Callable[[Run], None], list[str | None]]] = {
    # before the first and after each that may be the newest, in the order in which they become it
    "the first save": (_first, _save, [None, "a-1"]),
    "a save after another": (_second, _save, ["a-1", "b-1"]),
    "a fork": (_fork, _save, ["b-1", "c-1"]),
    "garbage": (_leftovers, _prune_and_save, ["a-1", "b-1"]),
    "a save that is given up": (_second, _discard, ["a-1"]),
    "a claim": (_ended, _claim_again, ["a-1"]),
}


def killed_everywhere(scenario: str, folder: Path, stride: int) -> dict[str | None, int]:
    """Kill a scenario at its calls, ``stride`` apart; how often each checkpoint (by generation) was the newest then."""
    before, act, expected = SCENARIOS[scenario]
    lives: list[Run] = []
    seen: list[str | None] = []

    def prepare() -> Callable[[], None]:
        lives.append(before(Path(tempfile.mkdtemp(dir=folder))))
        return functools.partial(act, lives[-1])

    def check(number: int) -> None:
        lives[-1].end()
        seen.append(recovered(lives[-1].folder.path))

    every_kill(prepare, check, stride=stride)
    order = [expected.index(one) for one in seen]
    assert order == sorted(order), f"{scenario}: the newest checkpoint went back and forth: {seen}"
    assert seen[0] == expected[0] and seen[-1] == expected[-1]
    return {one: seen.count(one) for one in expected}


def recovered(path: Path) -> str | None:
    """Which checkpoint is the newest in a folder where a run was killed; after it a new run saves, and all is tidy."""
    run = Run(path, "later")
    newest = run.folder.latest()
    for found in run.folder.checkpoints():
        assert_loads(found)
    run.folder.prune_garbage()
    assert_tidy(path)
    run.go_on(newest).save("step_9")
    latest = run.folder.latest(run.chain)
    assert latest is not None and latest == run.folder.latest() and latest.commit.run_id == "later"
    assert_loads(latest)
    assert not run.folder.listing().unreadable and not run.folder.listing().unfinished
    run.end()
    return None if newest is None else newest.commit.generation


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[2]) as kept:
        for generation, count in killed_everywhere(sys.argv[1], Path(kept), int(sys.argv[3])).items():
            print(generation, count)
