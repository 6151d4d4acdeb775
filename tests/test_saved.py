"""What an earlier commit has saved, in tests/saved: a checkpoint is loaded for what it was, and the same state is saved
to the same bytes; a config and its history are read and go on. Only names that users see stand here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic_ext import ConfigError, ConfigWatcher, ElasticConfig
from tests.saved.job import JOB, NUM_STEPS, Training
from tests.support.ranks import RankPool

SAVED = Path(__file__).resolve().parent / "saved"
EXPECTED: dict[str, Any] = json.loads((SAVED / "expected.json").read_text())
CHECKPOINT = next((SAVED / "storage" / "fsdp_checkpoint").glob(f"{JOB}_*")) / f"step_{NUM_STEPS}"
NEXT = {
    2: ([[7, 23], [29, 0]], EXPECTED["random"]),
    1: ([[7, 23, 29, 0]], [0.8720703842642787, 0.8694199355011916, 0.5715038180351257]),
}
"""By the number of ranks: what each trains on next, and what is drawn next; of another number each draws anew."""
ANOTHER = ("generation", "id", "saved_at")  # with each save


# --- the checkpoint -------------------------------------------------------------------------------------------------


def go_on(rank: int, folder: Path) -> tuple[dict[str, Any], list[int]]:
    """What one rank finds in the saved checkpoint, and the samples of the step that comes next."""
    training = Training(folder, folder / f"run-{rank}", start=8.0)
    with training.trainer:
        found = training.facts()
        training.step_until(NUM_STEPS + 1)
    return found, training.samples


@pytest.mark.parametrize("num_ranks", [2, 1])
def test_a_saved_checkpoint_is_loaded_for_what_it_was(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    shutil.copytree(SAVED / "storage", tmp_path / "storage")
    found = ranks.run(num_ranks, go_on, tmp_path, process_group=num_ranks > 1)
    samples, drawn = NEXT[num_ranks]
    for facts, _ in found:
        assert {**facts, "config": {}, "random": []} == {**EXPECTED, "config": {}, "random": []}
        for key in ("global_batch_size", "dataloader", "optimizer"):  # its version counts from the script's here
            assert facts["config"][key] == EXPECTED["config"][key]
    assert found[0][0]["random"] == drawn
    assert [each for _, each in found] == samples


def save_again(rank: int, folder: Path) -> dict[str, Any]:
    training = Training(folder, folder / "run")
    with training.trainer:
        training.step_until(NUM_STEPS)
    return training.facts()


def without_ids(commit: Any) -> Any:
    """The same without what is another with each save, on each machine, and what vouches for that."""
    if isinstance(commit, Mapping):
        kept = {key: without_ids(value) for key, value in commit.items() if key not in {*ANOTHER, "checksum"}}
        return {**kept, "versions": sorted(kept["versions"])} if "versions" in kept else kept
    return [without_ids(each) for each in commit] if isinstance(commit, list) else commit


def test_the_same_state_is_saved_to_the_same_bytes(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(SAVED / "run" / "config.json", tmp_path / "run")
    assert ranks.run(2, save_again, tmp_path) == [EXPECTED] * 2
    (again,) = (tmp_path / "storage" / "fsdp_checkpoint").glob(f"{JOB}_*/step_{NUM_STEPS}")
    files = sorted(path.name for path in CHECKPOINT.iterdir())
    assert sorted(path.name for path in again.iterdir()) == files
    was, now = (json.loads((folder / "COMMIT").read_text()) for folder in (CHECKPOINT, again))
    assert without_ids(now) == without_ids(was) and list(now) == list(was)
    for file in sorted({*files} - {"COMMIT"}):
        data = (again / file).read_bytes().replace(now["generation"].encode(), was["generation"].encode())
        assert data == (CHECKPOINT / file).read_bytes(), file


def test_a_jobs_folder_has_the_files_that_it_had(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save_again, tmp_path)

    def files_in(storage: Path) -> set[str]:
        found = (path.relative_to(storage).as_posix() for path in storage.rglob("*") if path.is_file())
        changing = re.compile(r"_\d{8}-\d{6}|(?<=meta/)\w{32}")  # a date, and names made of what is in a file
        return {changing.sub("*", name) for name in found if not name.endswith(".lock")}

    assert files_in(tmp_path / "storage") == files_in(SAVED / "storage")
    (was,), (now,) = (list(folder.rglob("RUN.json")) for folder in (SAVED, tmp_path))
    assert list(json.loads(now.read_text())) == list(json.loads(was.read_text()))


# --- the config -----------------------------------------------------------------------------------------------------

ALL_KEYS: Mapping[str, object] = {
    "global_batch_size": 64,
    "dataloader.batch_size": 4,
    "dataloader.num_workers": 2,
    "dataloader.prefetch_factor": 3,
    "dataloader.pin_memory": False,
    "optimizer.learning_rate": 0.25,
    "optimizer.weight_decay": 0.5,
    "parallelism.strategy": "hybrid_shard",
    "parallelism.shard_degree": 4,
    "parallelism.unit": "whole",
    "parallelism.activation_checkpoint": 0.5,
    "parallelism.prefetch": 1,
    "communication.bucket_cap_mb": "torch",
    "checkpoint.steps": 100,
    "checkpoint.now": True,
    "tuning.mode": "advise",
    "tuning.knobs": {"dataloader.num_workers": (0, 8)},
    "tuning.headroom": 0.125,
    "tuning.memory_bytes": 1073741824,
    "tuning.probe_steps": 5,
    "tuning.probe_budget": 0.25,
    "tuning.goal": 1000.0,
    "user.größe": ("a", None, True, 1.5),
}


def test_a_config_of_every_key_is_written_and_digested_as_it_was() -> None:
    config = ElasticConfig.from_values({**ALL_KEYS}, version=7, reason="all of them")
    written = (SAVED / "config.json").read_text(encoding="utf-8")
    assert config.to_json() == written
    assert ElasticConfig.parse(written.encode()) == config and config.values() == ALL_KEYS
    assert config.digest == "3623d77bf15408bbc9f0adde40ff09c59010a171f4387c405a11a0cd8521a6ee"
    assert ElasticConfig(version=1).values() == {}, "no key has a default but what the script starts with"


def test_the_table_of_keys_is_what_it_was() -> None:
    """On the page; and what a value of no key's range is answered with is what stands in the table."""
    table = (SAVED / "keys.md").read_text(encoding="utf-8")
    page = (SAVED.parent.parent / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert f"\n{table}\n" in page
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
    assert {cells[0].strip("`") for cells in rows} >= ALL_KEYS.keys() - {"user.größe"}
    for key, allowed, _ in rows:
        path = key.strip("`").replace("<name>", "a")
        wrong: object = {} if path == "user.a" else []
        for name in reversed(path.split(".")):
            wrong = {name: wrong}
        with pytest.raises(ConfigError) as refused:
            ElasticConfig.parse(json.dumps({"version": 1} | wrong).encode())  # type: ignore[operator]
        assert [each.allowed for each in refused.value.refusals] == [allowed]


def test_a_config_in_a_run_directory_is_watched_as_it_stands() -> None:
    with ConfigWatcher(SAVED / "run" / "config.json", use_events=False) as watcher:
        assert watcher.newest is not None and watcher.newest.label == "version 4"
        assert watcher.newest.values() == {"optimizer.learning_rate": 0.25, "user.note": "one"}
