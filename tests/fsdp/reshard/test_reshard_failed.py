"""Trainings in which a change of plan fails: they go on as before it, or all ranks stop and start from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ext import ApplyError, CheckpointInterval, TornStepError
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard import change, rewire
from elastic_ext.fsdp.reshard.exchange import BucketExchange
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, KEPT, WHOLE
from tests.support.retraining import Retraining, differing, stayed
from tests.support.thinning import the_first

LAST = 9


def _with_little_memory(run: Retraining, num_left: int) -> Any:
    """From now on rank 1 can take so much more memory for what is moved, in buckets of one tensor each."""
    run.trainer._training.spread._bucket_bytes = 1
    real, taken = torch.Tensor.new_empty, [0]

    def failing(tensor: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        if run.rank == 1 and tensor.device.type != "meta":
            taken[0] += 1
            if taken[0] > num_left:
                raise torch.OutOfMemoryError("no memory is left")
        return real(tensor, *given, **options)

    return failing


def _without_chance(model: nn.Module) -> nn.Module:
    """A Retraining seeds itself after it has resumed."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _fail(rank: int, folder: Path, old: ParallelPlan, new: ParallelPlan) -> tuple[int, int]:
    """How many steps were kept when it failed, and in the end."""
    losses, state = stayed(rank, folder, old, LAST, wrap=_without_chance)
    kept: dict[str, Any] = {
        "wrap": _without_chance,
        "shared_storage_path": folder / "kept",
        "checkpoint_interval": CheckpointInterval(steps=1),
        "agree_every_steps": 1,
    }
    run = Retraining(rank, folder, old, **kept)
    with pytest.MonkeyPatch().context() as patched:

        def ask(run: Retraining) -> None:
            patched.setattr(torch.Tensor, "new_empty", _with_little_memory(run, 12))
            run.trainer.reshard(new)

        with pytest.raises(ApplyError, match="no memory is left"):
            run.train(LAST, {3: ask})
    for refused in (
        run.trainer.save_checkpoint,
        run.trainer.rewind,
        lambda: run.train(LAST),
    ):
        with pytest.raises(TornStepError, match=r"failed halfway.*start the job again"):
            refused()
    run.trainer.close()
    again = Retraining(rank, folder, old, **kept)
    num_kept = again.trainer.global_step
    with again.trainer:
        again.train(LAST, {num_kept: new})
        assert again.plan == new
        after = again.state()
    assert differing(after, state) == []
    assert again.losses == losses[num_kept:]
    return num_kept, again.trainer.global_step


@pytest.mark.parametrize(("old", "new"), the_first([(WHOLE, FULL), (FULL, KEPT), (FULL, WHOLE)]))
def test_training_ends_and_a_new_start_goes_on_from_the_checkpoint(
    ranks: RankPool, tmp_path: Path, old: ParallelPlan, new: ParallelPlan
) -> None:
    for num_kept, num_steps in ranks.run(2, _fail, tmp_path, old, new):
        assert num_kept in (3, 4)
        assert num_steps == LAST


def _decline(rank: int, folder: Path, old: ParallelPlan, new: ParallelPlan) -> str:
    """There is no memory for the first bucket, and then there is."""
    losses, state = stayed(rank, folder, old, LAST, wrap=_without_chance)
    run = Retraining(rank, folder, old, wrap=_without_chance)
    with pytest.MonkeyPatch().context() as patched, run.trainer:

        def ask(run: Retraining) -> None:
            patched.setattr(torch.Tensor, "new_empty", _with_little_memory(run, 0))
            run.proposals.append(run.trainer.reshard(new))

        def ask_again(run: Retraining) -> None:
            patched.undo()
            assert run.plan == old
            run.proposals.append(run.trainer.reshard(new))

        run.train(LAST, {2: ask, 6: ask_again})
        assert run.plan == new
        assert differing(run.state(), state) == []
    assert run.losses == losses
    declined, done = run.proposals
    assert (declined.outcome, done.outcome) == ("refused", "in force")
    return declined.refusal


@pytest.mark.parametrize(("old", "new"), the_first([(FULL, WHOLE), (WHOLE, FULL), (FULL, KEPT)]))
def test_training_goes_on_where_nothing_was_moved_and_the_change_may_be_asked_for_again(
    ranks: RankPool, tmp_path: Path, old: ParallelPlan, new: ParallelPlan
) -> None:
    for told in ranks.run(2, _decline, tmp_path, old, new):
        assert told.startswith("ranks 0 to 1: ")
        assert told.endswith("nothing has changed, since rank 1 raised torch.OutOfMemoryError: no memory is left")


# --- failures of one rank in between ----------------------------------------------------------------------------------


def _ask_and_fail(patched: pytest.MonkeyPatch, run: Retraining, where: str) -> None:
    """Ask for another plan, and have one rank fail as it is put on."""
    spread = run.trainer._training.spread
    spread._bucket_bytes = 1

    def failing(real: Any, after: int = 0) -> Any:
        num_calls = [0]

        def call(*given: Any, **options: Any) -> Any:
            num_calls[0] += 1
            if run.rank == 1 and num_calls[0] > after:
                raise MemoryError(f"planted in {where}")
            return real(*given, **options)

        return call

    if where == "the fence":
        run.trainer._session.wait_for_staging = failing(run.trainer._session.wait_for_staging)
    elif where == "the mesh":
        spread.mesh_of = failing(spread.mesh_of)
    elif where in ("going back", "the exchange"):
        patched.setattr(change, "BucketExchange", failing(BucketExchange))
        if where == "going back":
            patched.setattr(rewire, "bind", failing(rewire.bind))
    elif where == "taking over":
        patched.setattr(rewire, "bind", failing(rewire.bind, after=4))
    else:
        patched.setattr(torch.Tensor, "contiguous", failing(torch.Tensor.contiguous, after=6))
    run.proposals.append(run.trainer.reshard(KEPT))


def _fail_in_between(rank: int, folder: Path, where: str) -> tuple[str, str]:
    run = Retraining(rank, folder, FULL, wrap=_without_chance)
    with pytest.MonkeyPatch().context() as patched:
        try:
            run.train(5, {2: lambda run: _ask_and_fail(patched, run, where)})
        except ApplyError as error:
            with pytest.raises(TornStepError, match="failed halfway"):
                run.train(5)
            run.trainer.close()
            return "failed", str(error)
    with run.trainer:
        assert run.plan == FULL
        run.train(LAST, {5: KEPT} if where != "the mesh" else {})
    return run.proposals[0].outcome, run.proposals[0].refusal


@pytest.mark.parametrize("where", ["the fence", "the mesh", "the exchange"])
def test_one_ranks_failure_before_anything_moves_is_a_refusal_on_all(
    ranks: RankPool, tmp_path: Path, where: str
) -> None:
    for outcome, told in ranks.run(2, _fail_in_between, tmp_path, where, deadline_seconds=60):
        assert outcome == "refused"
        assert told.endswith(f"nothing has changed, since rank 1 raised MemoryError: planted in {where}")


@pytest.mark.parametrize("where", ["going back", "taking over", "making dense"])
def test_one_ranks_failure_in_between_ends_training_on_all(ranks: RankPool, tmp_path: Path, where: str) -> None:
    for outcome, told in ranks.run(2, _fail_in_between, tmp_path, where, deadline_seconds=60):
        assert outcome == "failed"
        assert f"MemoryError: planted in {where}" in told
