"""What trainer.rewind() went back to is what the next run goes on from, once something was saved."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any, Literal

import pytest

from elastic_ext.fsdp.checkpoint.folder.listing import Listing
from elastic_ext.fsdp.checkpoint.saving.rescue import complete
from tests.support.ranks import RankPool
from tests.support.sharded import values_of
from tests.support.thinning import the_first
from tests.support.training import bits_of
from tests.training.checkpoints.test_rewind import BACK, BATCH, SPIKE, Run

How = Literal["by hand", "close", "signal", "memory"]


def counting(run: Run) -> list[str]:
    """The checkpoints that a run which is started now may go on from, oldest first."""
    (folder,) = (run.storage / "fsdp_checkpoint").glob("[!.]*")
    return [found.name for found in Listing.counting(folder).found]


def saved_rank(rank: int, folder: Path, way: str, how: How, skips: bool) -> None:
    given: dict[str, Any] = {"way": way, "rank": rank, "save_on_signals": how in ("signal", "memory")}
    if how == "by hand":
        given["save_in_background"] = False
    passes_over = {BACK: lambda run: run.loader.pass_over((SPIKE - BACK) * BATCH)}
    whole = Run(folder, "whole", way=way, rank=rank, shared_storage_path=None)
    with whole.trainer, whole.trainer.epoch():
        whole.train(at=passes_over if skips else None)
        expected = bits_of(values_of(whole.model), whole.ema)
    run = Run(folder, "run", **given)
    try:
        with run.trainer, run.trainer.epoch():
            run.train(SPIKE)
            assert run.trainer.rewind(BACK, skip_samples=skips).name == f"step_{BACK}"
            if how == "by hand":
                assert run.trainer.save_checkpoint() == run.trainer.save_checkpoint()
            elif how == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            elif how == "memory":
                step, written = run.trainer._training.saving._write_newest(60.0)
                assert step == BACK and f"step_{BACK} is what there is to go on from" in written
            run.trainer._prepared.should_stop = True  # the epoch is not over
    except SystemExit:
        assert how == "signal"
    assert counting(run) == ["step_2", "step_4", f"step_{BACK}"]
    again = Run(folder, "run", **given)
    with again.trainer, again.trainer.epoch():
        assert again.trainer.global_step == BACK
        again.train()
        assert again.losses == [seen for seen in whole.losses if seen[0] >= BACK]
        assert bits_of(values_of(again.model), again.ema) == expected


@pytest.mark.parametrize(
    ("how", "skips"),
    the_first(
        [("by hand", True), ("close", False), ("signal", True), ("memory", True), ("by hand", False), ("close", True)],
        3,
    ),
)
def test_what_was_gone_back_to_is_gone_on_from(tmp_path: Path, how: How, skips: bool) -> None:
    saved_rank(0, tmp_path, "plain", how, skips)


@pytest.mark.parametrize("how", the_first(["close", "by hand", "memory"]))
def test_ranks_go_on_from_there(ranks: RankPool, tmp_path: Path, how: How) -> None:
    ranks.run(2, saved_rank, tmp_path, "ddp", how, True)


def test_a_run_that_died_before_it_saved_is_as_if_it_had_not_gone_back(tmp_path: Path) -> None:
    run = Run(tmp_path, "run")

    def die(run: Run) -> None:
        run.trainer.rewind(BACK, skip_samples=True)
        raise KeyError

    with pytest.raises(KeyError), run.trainer, run.trainer.epoch():
        run.train(at={SPIKE: die})
    assert counting(run) == ["step_2", "step_4", "step_6", "step_8"]


def test_an_agent_completes_what_a_run_that_died_had_gone_back_to(
    tmp_path: Path, ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, kept = ram / "shelf", ram / "kept"  # a disk may be too full to stage anything there
    shelf.mkdir()
    monkeypatch.setenv("ELASTIC_EXT_STAGING_DIR", str(shelf))
    run = Run(tmp_path, "run", save_on_signals=True)

    def die(run: Run) -> None:
        run.trainer.rewind(BACK, skip_samples=True)
        shutil.copytree(shelf, kept)  # a process that is killed leaves it as it is
        raise KeyError

    with pytest.raises(KeyError), run.trainer, run.trainer.epoch():
        run.train(at={SPIKE: die})
    (outcome,) = complete(kept)
    assert outcome.path is not None and outcome.path.name == f"step_{BACK}"
    assert counting(run) == ["step_2", "step_4", "step_6"]
    (outcome,) = complete(kept)
    assert outcome.path is None and "step_6 exists" in outcome.why


def test_a_save_that_fails_leaves_what_it_was_to_replace(tmp_path: Path) -> None:
    run = Run(tmp_path, "run", save_in_background=False)
    with run.trainer, run.trainer.epoch():
        run.train(SPIKE)
        run.trainer.rewind(BACK, skip_samples=True)
        checkpoints = run.trainer._training.checkpoints
        folder, draft = checkpoints.job._begin(checkpoints._request(f"step_{BACK}", checkpoints.moment()))
        folder.begin(f"step_{BACK}", "one", draft.lineage, replaces=True)
        aside = [name for name in run.saved if "abandoned" in name]
        assert [name.partition(".")[0] for name in aside] == [f"step_{BACK}"]
        assert sorted(counting(run)) == sorted(["step_2", "step_4", *aside, "step_8"]), "until it is committed"
        folder.discard(f"step_{BACK}")
        assert counting(run) == ["step_2", "step_4", "step_6", "step_8"]
        assert run.trainer.rewind(BACK).name == f"step_{BACK}"
        run.train(BACK + 1)
