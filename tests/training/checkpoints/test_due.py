"""A checkpoint that is due at a boundary has what the loop does after the step, and nothing of what comes next."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, lr_scheduler

from elastic_ext import CheckpointInterval
from elastic_ext.errors import CheckpointError
from tests.support.file_operations import FileOperations
from tests.support.ranks import RankPool
from tests.support.saving import Small
from tests.support.sharded import WAYS, Way, values_of
from tests.support.thinning import the_first
from tests.support.training import ResumableSlices, bits_of, make_data, trainer_of

BATCH = 12
EPOCH_STEPS = 4
HALF, WHOLE = 6, 10


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 5)).double()


def train(folder: Path, storage: Path, until: int, *, way: Way | None = None, seed: int = 0, **arguments: Any) -> Any:
    """Train with all that a loop may do after a step: clip weights, average them, step the schedule, count."""
    folder.mkdir(exist_ok=True)
    plain = net(seed)
    model = plain if way is None else way.wrap(plain)
    average = {name: torch.zeros_like(part) for name, part in model.named_parameters()}
    seen = torch.zeros(1, dtype=torch.int64)
    inner = AdamW(model.parameters(), lr=0.01)
    loader = ResumableSlices(make_data(BATCH * EPOCH_STEPS), 3)
    trainer = trainer_of(
        folder,
        model,
        loader,
        global_batch_size=BATCH,
        shared_storage_path=storage,
        checkpoint_interval=CheckpointInterval(steps=3),
        **arguments,
    )
    trainer.register_state("average", {name.replace(".", "/"): tensor for name, tensor in average.items()})
    trainer.register_state("seen", seen)
    started_at = None
    with trainer:
        optimizer, scheduler = trainer.prepare(inner, lr_scheduler.LambdaLR(inner, lambda step: 0.9**step))
        while trainer.global_step < until:
            with trainer.epoch(trainer.start_epoch if started_at is None else None):
                started_at = trainer.global_step if started_at is None else started_at
                for inputs, targets in loader:
                    with trainer.step():
                        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
                    if not trainer.sync_gradients:
                        continue
                    with torch.no_grad():
                        for name, part in model.named_parameters():
                            part.clamp_(-0.2, 0.2)
                            average[name].lerp_(part.detach(), 0.1)
                    seen += 1
                    scheduler.step()
                    if trainer.global_step == until:
                        trainer.request_stop()
                        break
    values = [*values_of(model), *average.values(), *plain.buffers(), seen]
    return started_at, bits_of(values, inner.state_dict()["param_groups"])


def go_on_as_if_nothing_had_happened(rank: int, folder: Path, way: str, in_background: bool) -> None:
    options: dict[str, Any] = {"way": None if way == "plain" else WAYS[way], "rank": rank}
    options["save_in_background"] = in_background
    torch.manual_seed(3)
    _, whole = train(folder / "whole", folder / "other", WHOLE, **options)
    torch.manual_seed(3)
    train(folder / "a", folder / "storage", HALF, **options)
    started_at, resumed = train(folder / "b", folder / "storage", WHOLE, seed=5, **options)
    assert started_at == HALF
    assert resumed == whole


@pytest.mark.parametrize("in_background", [True, False])
def test_what_a_loop_does_after_a_step_is_in_its_checkpoint(tmp_path: Path, in_background: bool) -> None:
    go_on_as_if_nothing_had_happened(0, tmp_path, "plain", in_background)


@pytest.mark.parametrize("way", the_first(["fully_shard", "ddp"]))
def test_the_same_on_ranks(ranks: RankPool, tmp_path: Path, way: str) -> None:
    ranks.run(2, go_on_as_if_nothing_had_happened, tmp_path, way, True)


def test_it_is_begun_before_the_next_step_or_at_the_end_of_an_epoch_or_by_hand_or_at_the_end(tmp_path: Path) -> None:
    small = Small(tmp_path, save_in_background=False)
    with small.trainer:
        with small.trainer.epoch(0):
            small.take(2)
            assert small.saved == []
            small.take()
            assert small.saved == ["step_2"]
            small.take()
        assert small.saved == ["step_2", "step_4"]
        small.take(2)
        small.trainer.reset()
        assert small.saved == ["step_2", "step_4", "step_6"]
        small.take(2)
        assert small.trainer.save_checkpoint().name == "step_8"
        assert small.saved[-1] == "step_8"
        small.take(2)
        assert "step_10" not in small.saved
    assert "step_10" in small.saved


@pytest.mark.parametrize("way", ["the block is left", "close() is called"])
@pytest.mark.parametrize("interval", [CheckpointInterval(steps=2), CheckpointInterval(epochs=2)])
def test_a_training_that_ends_well_has_a_checkpoint_of_its_last_step(
    tmp_path: Path, way: str, interval: CheckpointInterval
) -> None:
    small = Small(tmp_path, checkpoint_interval=interval)
    with small.trainer if way == "the block is left" else nullcontext(), small.trainer.epoch(0):
        small.take(3)
    if way == "close() is called":
        small.trainer.close()
    assert "step_3" in small.saved
    again = Small(tmp_path, checkpoint_interval=interval)
    with again.trainer:
        assert again.trainer.global_step == 3
    assert again.saved == small.saved, "a run that takes no step saves nothing"


@pytest.mark.parametrize("fails", [True, False])
def test_a_training_that_fails_or_saves_none_by_itself_has_no_checkpoint_of_its_last_step(
    tmp_path: Path, fails: bool
) -> None:
    small = Small(tmp_path, checkpoint_interval=CheckpointInterval(steps=2) if fails else CheckpointInterval())
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), small.trainer:
        small.take(3)
        if fails:
            raise ZeroDivisionError
    assert small.saved == (["step_2"] if fails else [])


def test_a_save_that_cannot_be_begun_takes_no_samples_along(tmp_path: Path) -> None:
    loader = ResumableSlices(make_data(BATCH * 3), 3)
    model, handed_out = net(0), []
    trainer = trainer_of(
        tmp_path,
        model,
        loader,
        global_batch_size=3,
        shared_storage_path=tmp_path / "storage",
        checkpoint_interval=CheckpointInterval(steps=2),
        save_in_background=False,
    )
    with trainer:
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        with trainer.epoch(0):
            operations = FileOperations(tmp_path / "storage", "full", 0, like="os.mkdir")
            for inputs, targets in loader:
                try:
                    with trainer.step():
                        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
                        handed_out.append(inputs.clone())
                except CheckpointError:
                    operations.end()
    everything = torch.cat(handed_out)
    assert torch.equal(everything, make_data(BATCH * 3)[0][: len(everything)])
    assert len(everything) == BATCH * 3


def test_an_exception_after_a_step_leaves_no_checkpoint_that_may_be_half_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path)
    small.take(2)
    with pytest.raises(ZeroDivisionError), small.trainer:
        raise ZeroDivisionError
    assert small.saved == []
    assert "training ended before the loop was done with the step" in caplog.text


@pytest.mark.parametrize("has_epochs", [True, False])
def test_where_epochs_say_what_is_saved_steps_of_no_epoch_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_epochs: bool
) -> None:
    small = Small(tmp_path, checkpoint_interval=CheckpointInterval(epochs=1))
    with small.trainer:
        for epoch in range(2):
            small.trainer.reset()
            with small.trainer.epoch(epoch) if has_epochs else nullcontext():
                small.take(2)
    told = [record for record in caplog.records if "outside of `with trainer.epoch():`" in record.getMessage()]
    assert [record.levelname for record in told] == ([] if has_epochs else ["WARNING"])
    assert small.saved == (["epoch_1", "epoch_2"] if has_epochs else ["step_4"])
