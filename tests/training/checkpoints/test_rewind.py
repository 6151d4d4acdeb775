"""trainer.rewind(): training goes back to an earlier checkpoint in the same process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import (
    CheckpointInterval,
    ElasticDataLoader,
    ElasticError,
    RanksDisagreeError,
    StepError,
    TornStepError,
)
from elastic_ext.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointFenced,
    CheckpointMismatch,
    CheckpointNotFound,
)
from elastic_ext.records.metrics import JobEvent
from tests.support.faults import PlantedFault
from tests.support.loops import put, rate, seen_by
from tests.support.ranks import RankPool
from tests.support.sharded import WAYS, values_of
from tests.support.thinning import each_once, the_first
from tests.support.training import ResumableSlices, bits_of, make_data, trainer_of

BATCH = 12
EPOCH_STEPS = 20
EVERY = 2
SPIKE = 9
BACK = 6
NUM_STEPS = 10

Batch = tuple[torch.Tensor, torch.Tensor]
Act = Callable[["Run"], object]


class Rewindable(ResumableSlices):
    """Goes back in the loop that is under way."""

    def __init__(self, data: Batch, batch_size: int, **options: bool) -> None:
        super().__init__(data, batch_size, **options)
        self._is_looping = False

    def __iter__(self) -> Iterator[Batch]:
        self._is_looping = True
        try:
            yield from super().__iter__()
        finally:
            self._is_looping = False

    def rewind(self, state: dict[str, int]) -> None:
        if not self._is_looping:
            self.load_state_dict(state)
        self._position = state["position"]
        self._num_cuts += 1

    def pass_over(self, num_samples: int) -> None:
        """By hand what a rewind that skips samples does."""
        self.rewind({"position": self._position + num_samples})


class Fragile(AdamW):
    """AdamW that may fail when it has changed a part of its parameters."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            with torch.no_grad():
                for part in self.param_groups[0]["params"]:
                    part.add_(1.0)
                    self.state[part]["exp_avg"].mul_(3.0)
            raise PlantedFault("in optimizer")
        return super().step(closure)


class Run:
    """One rank's training with all kinds of state, and what was seen in it."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        way: str = "plain",
        rank: int = 0,
        num_epoch_steps: int = EPOCH_STEPS,
        **given: Any,
    ) -> None:
        (folder / name).mkdir(exist_ok=True)
        torch.manual_seed(0)
        layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 5)]
        self.plain = nn.Sequential(*layers).double()
        self.model: Any = self.plain if way == "plain" else WAYS[way].wrap(self.plain)
        self.loader = given.pop("loader", None) or Rewindable(make_data(BATCH * num_epoch_steps), 3)
        self.inner = Fragile(self.model.parameters(), lr=0.01)
        self.inner_schedule = lr_scheduler.OneCycleLR(self.inner, max_lr=0.2, total_steps=60)
        self.inner_scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.ema = torch.zeros((), dtype=torch.float64)
        options = {
            "shared_storage_path": folder / f"storage of {name}",
            "checkpoint_interval": CheckpointInterval(steps=EVERY),
            "global_batch_size": BATCH,
            **given,
        }
        self.storage: Path = options["shared_storage_path"]
        if options["shared_storage_path"] is None:
            options["checkpoint_interval"] = None
        random.seed(7)
        self.trainer = trainer_of(folder / name, self.model, self.loader, rank=rank, **options)
        self.trainer.register_state("ema", self.ema)
        prepared = self.trainer.prepare(self.inner, self.inner_schedule, self.inner_scaler)
        self.optimizer, self.schedule, self.scaler = prepared
        self.when_torn: Act | None = None
        self.went_to = ""
        self.bits_in_time: list[Any] = []
        self.losses: list[tuple[int, float]] = []
        self.rates: list[float] = []
        self.rank = rank

    def micro_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        trainer = self.trainer
        step = trainer.global_step
        with trainer.step():
            loss = nn.functional.cross_entropy(self.model(inputs), targets)
            trainer.backward(self.scaler.scale(loss))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if trainer.sync_gradients:
                self.ema.mul_(0.9).add_(random.random())
            self.schedule.step()
            self.optimizer.zero_grad()
        self.losses.append((step, loss.item()))
        if trainer.global_step > step:
            self.rates.append(self.optimizer.effective_rates[0])

    def train(self, until: int = NUM_STEPS, at: Mapping[int, Act] | None = None) -> None:
        """One loop over the data until a step; ``at`` says what to do, once, after which step."""
        to_do = dict(at or {})
        for inputs, targets in self.loader:
            try:
                self.micro_step(inputs, targets)
            except TornStepError:
                if self.when_torn is None:
                    raise
                self.when_torn(self)
                continue
            step = self.trainer.global_step
            if self.trainer._prepared.steps.is_partial:
                continue
            if step in to_do:
                to_do.pop(step)(self)
                step = self.trainer.global_step
            if step >= until and not to_do:
                break

    @property
    def bits(self) -> list[Any]:
        """All that training has come to."""
        counts = self.trainer.state_dict()
        return bits_of(
            values_of(self.model),
            list(self.plain.buffers()),
            self.inner.state_dict()["param_groups"],
            list(self.inner.state.values()),
            self.inner_schedule.state_dict(),
            self.inner_scaler.state_dict(),
            self.ema,
            [counts[name] for name in ("global_step", "num_steps", "epoch")],
            random.getstate(),
            torch.get_rng_state(),
        )

    @property
    def saved(self) -> dict[str, int]:
        """The folders of checkpoints, with the number of runs that led there."""
        (folder,) = (self.storage / "fsdp_checkpoint").glob("[!.]*")
        commits = sorted(folder.glob("*/COMMIT"))
        return {path.parent.name: len(json.loads(path.read_bytes())["lineage"]) for path in commits}


def back_to(step: int | None = None, **how: Any) -> Act:
    def act(run: Run) -> None:
        run.went_to = run.trainer.rewind(step, **how).name

    return act


# --- as if what came after never was --------------------------------------------------------------------------------


def rewound_rank(rank: int, folder: Path, way: str, step: int | None, skips: bool) -> None:
    back = SPIKE - 1 if step is None else step
    passes_over = {back: lambda run: run.loader.pass_over((SPIKE - back) * BATCH)}
    whole = Run(folder, "whole", way=way, rank=rank, shared_storage_path=None)
    with whole.trainer, whole.trainer.epoch():
        whole.train(at=passes_over if skips else None)
        expected = whole.bits
    run = Run(folder, "run", way=way, rank=rank)
    with run.trainer, run.trainer.epoch():
        run.train(at={SPIKE: back_to(step, skip_samples=skips)})
        assert run.went_to == f"step_{back}"
        assert run.bits == expected
        since = [seen for seen in whole.losses if seen[0] >= back]
        assert run.losses[-len(since) :] == since
        assert run.rates[SPIKE:] == whole.rates[back:]
    assert {name: num_runs for name, num_runs in run.saved.items() if "abandoned" not in name} == {
        "step_2": 1,
        "step_4": 1,
        "step_6": 1,
        "step_8": 2 if back < 8 else 1,
        "step_10": 2,
    }
    left = [name.partition("-")[0] for name in run.saved if "abandoned" in name]
    assert left == ([] if back == 8 else ["step_8.abandoned"])
    again = Run(folder, "run", way=way, rank=rank)
    with again.trainer, again.trainer.epoch():
        assert again.trainer.global_step == NUM_STEPS
        assert bits_of(values_of(again.model)) == bits_of(values_of(run.model))
        again.train(NUM_STEPS + 2)
        assert again.losses[0][0] == NUM_STEPS


@pytest.mark.parametrize(("step", "skips"), each_once([None, BACK], [True, False]))
def test_training_goes_on_bit_for_bit_from_there(tmp_path: Path, step: int | None, skips: bool) -> None:
    rewound_rank(0, tmp_path, "plain", step, skips)


@pytest.mark.parametrize(("way", "skips"), each_once(["ddp", "fully_shard"], [True, False]))
def test_ranks_go_on_bit_for_bit_from_there(ranks: RankPool, tmp_path: Path, way: str, skips: bool) -> None:
    ranks.run(WAYS[way].num_ranks, rewound_rank, tmp_path, way, BACK, skips)


def test_one_goes_back_again_and_further(tmp_path: Path) -> None:
    whole = Run(tmp_path, "whole", shared_storage_path=None)
    with whole.trainer, whole.trainer.epoch():
        whole.train()
        expected = whole.bits
    run = Run(tmp_path, "run")
    with run.trainer, run.trainer.epoch():
        run.train(SPIKE)
        for step in (6, 6, 4):  # with nothing saved in between
            assert run.trainer.rewind(step).name == f"step_{step}"
        run.train(SPIKE)
        assert run.trainer.rewind().name == "step_8"
        with pytest.raises(CheckpointNotFound, match=r"of step 7 .* those of steps 2, 4, 6, 8"):
            run.trainer.rewind(7)
        with pytest.raises(ValueError, match="skip_samples is 'no'; allowed: True, False"):
            run.trainer.rewind(4, skip_samples="no")
        run.train()
        assert run.bits == expected


def test_a_loss_of_a_model_that_was_called_just_before_is_no_part_of_it(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, looking_rank, tmp_path)


def looking_rank(rank: int, folder: Path) -> None:
    """fully_shard keeps what it has gathered for such a pass, which must not be what the next step is taken with."""
    whole = Run(folder, "whole", way="fully_shard", rank=rank, shared_storage_path=None)
    with whole.trainer, whole.trainer.epoch():
        whole.train()
        expected = whole.bits
    run = Run(folder, "run", way="fully_shard", rank=rank)

    def look_and_go_back(run: Run) -> None:
        run.model.eval()
        with torch.no_grad():
            run.model(make_data(4)[0])
        run.model.train()
        run.trainer.rewind(BACK)

    with run.trainer, run.trainer.epoch():
        run.train(at={SPIKE: look_and_go_back})
        assert run.bits == expected


# --- the config stays -----------------------------------------------------------------------------------------------


class Small:
    """A training of one layer by SGD, whose rate is changed."""

    def __init__(self, folder: Path, name: str, make_schedule: Callable[[SGD], Any] | None = None) -> None:
        (folder / name).mkdir(exist_ok=True)
        torch.manual_seed(0)
        self.model = nn.Linear(6, 5).double()
        self.trainer = trainer_of(folder / name, self.model, shared_storage_path=folder / "storage")
        self.inner = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule: Any = None
        if make_schedule is None:
            self.optimizer = self.trainer.prepare(self.inner)
        else:
            self.optimizer, self.schedule = self.trainer.prepare(self.inner, make_schedule(self.inner))
        self.rates: dict[int, float] = {}

    def step(self) -> None:
        """One step, and the rate that it was taken with."""
        self.rates[self.trainer.global_step] = self.optimizer.effective_rates[0]
        with self.trainer.step():
            self.model(make_data(4)[0]).sum().backward()
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            self.optimizer.zero_grad()

    def change(self, rate: float) -> None:
        """Have the config say this rate, and take steps until it does."""
        proposal = self.trainer.propose({"optimizer.learning_rate": rate}, "a test")
        while proposal.outcome == "pending":
            self.step()
        assert proposal.outcome == "in force"


@pytest.mark.parametrize("has_schedule", [False, True])
def test_a_rate_that_was_lowered_stays_lowered(tmp_path: Path, has_schedule: bool) -> None:
    schedule = (lambda inner: lr_scheduler.LambdaLR(inner, lambda step: 0.5**step)) if has_schedule else None
    run = Small(tmp_path, "run", schedule)
    with run.trainer:
        run.step()
        run.trainer.save_checkpoint()
        run.change(0.01)
        in_force = run.trainer.config
        assert run.trainer.rewind(1).name == "step_1"
        assert run.trainer.config == in_force
        run.step()
        assert run.rates[1] == (0.01 * 0.5 if has_schedule else 0.01)
        assert run.rates[0] == 0.1


def test_a_rate_that_came_after_the_checkpoint_in_an_earlier_process_stays(tmp_path: Path) -> None:
    first = Small(tmp_path, "run")
    with first.trainer:
        first.change(0.01)
        saved = first.trainer.save_checkpoint().name
        first.change(0.1)
        newest = first.trainer.save_checkpoint().name
    second = Small(tmp_path, "run")  # its script's rate is that of the newest checkpoint
    with second.trainer:
        assert f"step_{second.trainer.global_step}" == newest
        assert second.trainer.rewind().name == saved
        second.step()
        assert list(second.rates.values()) == [0.1]


def test_what_an_optimizer_had_not_made_yet_is_gone_again(tmp_path: Path) -> None:
    run = Small(tmp_path, "run")
    with run.trainer:
        before = bits_of(run.model)
        run.trainer.save_checkpoint()
        run.step()
        after = bits_of(run.model, list(run.inner.state.values()))
        run.step()
        assert run.trainer.rewind(0).name == "step_0"
        assert bits_of(run.model) == before
        run.step()
        assert bits_of(run.model, list(run.inner.state.values())) == after


def proposing_rank(rank: int, folder: Path, who: int) -> None:
    """One rank has proposed two changes before all go back: they are in force from the first step there."""
    run = Run(folder, "run", way="ddp", rank=rank)

    def propose_and_go_back(run: Run) -> None:
        proposals = []
        if rank == who:
            changes: list[dict[str, object]] = [{"optimizer.weight_decay": 0.5}, {"optimizer.learning_rate": 0.001}]
            proposals = [run.trainer.propose(each, "the loss has jumped") for each in changes]
        run.trainer.rewind(BACK)
        assert run.trainer.config.label == "version 0, revision 2"
        assert all(each.outcome == "in force" for each in proposals)
        run.went_to = str(run.inner.param_groups[0]["weight_decay"])

    with seen_by() as seen, run.trainer, run.trainer.epoch():
        factor = 0.001 / run.trainer.config.optimizer.learning_rate
        run.train(at={SPIKE: propose_and_go_back})
        assert run.went_to == "0.5"
        assert run.rates[SPIKE:] == pytest.approx([each * factor for each in run.rates[BACK:SPIKE]] + run.rates[-1:])
    if rank == 0:
        said = [line for line in seen.log if "version 0, revision" in line and "in force from" in line]
        assert [f"in force from step {BACK}:" in line for line in said] == [True, True]


def test_what_one_rank_proposed_before_all_go_back_is_in_force_from_the_first_step_there(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(2, proposing_rank, tmp_path, 1)


def test_a_proposal_that_is_refused_as_training_goes_back_changes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, "run")
    with run.trainer, run.trainer.epoch():
        run.train(SPIKE)
        proposal = run.trainer.propose({"parallelism.strategy": "full_shard"}, "one rank has no shards")
        assert run.trainer.rewind(BACK).name == f"step_{BACK}"
        assert proposal.outcome == "refused" and proposal.refusal
        assert run.trainer.config.label == "version 0"
        run.train()


def follow_file_rank(rank: int, folder: Path) -> None:
    """Ranks agree, on versions and boundaries too, after they went back; a file that comes then is taken."""
    run = Run(folder, "run", way="ddp", rank=rank)
    files = folder / "run"
    with run.trainer, run.trainer.epoch():
        put(files, rank, rate(1, 0.05), seen_by=run.trainer._prepared.follower)
        run.train(SPIKE)
        assert run.trainer.config.version == 1
        run.trainer.rewind(BACK)
        assert run.trainer.config.version == 1
        put(files, rank, rate(2, 0.02), seen_by=run.trainer._prepared.follower)
        run.train(BACK + 5)
        assert run.trainer.config.version == 2
        assert run.trainer.global_step == BACK + 5


def test_ranks_go_on_following_a_file(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, follow_file_rank, tmp_path)


# --- the data, and epochs -------------------------------------------------------------------------------------------


def plain_loader(num_steps: int = EPOCH_STEPS) -> Any:
    return DataLoader(TensorDataset(*make_data(BATCH * num_steps)), batch_size=4)


@pytest.mark.parametrize("skips", [False, True])
def test_a_plain_dataloader_goes_on_with_its_next_batches_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, skips: bool
) -> None:
    run = Run(tmp_path, "run", loader=plain_loader())
    with run.trainer, run.trainer.epoch():
        run.train(SPIKE + 1, at={7: back_to(skip_samples=skips), SPIKE: back_to(skip_samples=skips)})
        assert run.trainer.num_steps == run.trainer.global_step == SPIKE + 1
        assert run.trainer._batches._num_taken == 3 * (7 + 3 + 2)
    told = [record.message for record in caplog.records if "cannot go back to where" in record.message]
    assert len(told) == (0 if skips else 1)


def test_a_source_that_cannot_go_back_in_a_loop_does_in_the_next_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Run(tmp_path, "whole", shared_storage_path=None)
    with whole.trainer, whole.trainer.epoch():
        whole.train()
        expected = whole.bits
    run = Run(tmp_path, "run", loader=ResumableSlices(make_data(BATCH * EPOCH_STEPS), 3))
    with run.trainer, run.trainer.epoch():
        run.train(SPIKE)
        run.trainer.rewind(BACK)
        run.train()
        assert run.bits == expected
    assert "the samples since the checkpoint come again in the next" in caplog.text


def test_within_an_epoch_one_goes_back_to_that_epoch_alone(tmp_path: Path) -> None:
    """Unless samples are skipped: then the epoch goes on where it is."""
    run = Run(tmp_path, "run", num_epoch_steps=4)
    trainer = run.trainer
    with trainer:
        trainer.save_checkpoint()
        with trainer.epoch():
            run.train(4, at={1: back_to(0), 3: back_to(2)})
            assert trainer.num_steps == 4
        assert trainer.state_dict()["epoch"] == 1
        with trainer.epoch():
            run.train(6)
            before = run.bits
            for step, when in ((4, "before epoch 1 began"), (2, "in epoch 0")):
                with pytest.raises(CheckpointError, match=rf"saved {when}, and this is the middle of epoch 1"):
                    trainer.rewind(step)
            assert run.bits == before
            trainer.rewind(2, skip_samples=True)
            assert (trainer.global_step, trainer.num_steps, trainer.state_dict()["epoch"]) == (2, 0, 1)
            run.train(3)
            assert trainer.num_steps == 1


def test_between_epochs_one_goes_back_to_any(tmp_path: Path) -> None:
    """What comes then is the epoch that the checkpoint is of, from where it was saved."""
    ended: list[Run] = []
    for name in ("whole", "run"):
        each = Run(tmp_path, name, num_epoch_steps=7)
        with each.trainer:
            with each.trainer.epoch():
                each.train(20)
            with each.trainer.epoch():
                each.train(20)
            if name == "run":
                assert each.trainer.rewind(4).name == "step_4"
                assert (each.trainer.start_epoch, each.trainer.num_steps) == (0, 4)
                with each.trainer.epoch() as number:
                    assert number == 0
                    each.train(20)
                with each.trainer.epoch() as number:
                    assert number == 1
                    each.train(20)
            with each.trainer.epoch() as number:
                assert number == 2
                each.train(16)
                each.bits_in_time = each.bits
        ended.append(each)
    whole, run = ended
    assert run.losses[4 * 14 :] == whole.losses[4 * 4 :]
    assert run.bits_in_time == whole.bits_in_time


@pytest.mark.parametrize("loader", [None, plain_loader(2)])
def test_between_epochs_samples_that_are_skipped_stay_behind(tmp_path: Path, loader: Any) -> None:
    """The loop over epochs from the start epoch on begins none again."""
    run = Run(tmp_path, "run", num_epoch_steps=2, loader=loader)
    trainer, begun = run.trainer, []
    with trainer:
        for epoch in (0, 1):
            with trainer.epoch(epoch):
                run.train(100)
        assert trainer.rewind(2, skip_samples=True).name == "step_2"
        for epoch in range(trainer.start_epoch, 3):
            with trainer.epoch(epoch):
                begun.append(epoch)
                run.train(100)
    assert (begun, trainer.global_step) == ([2], 4)


Numbers = list[tuple[int, list[int]]]


def numbered_run(folder: Path, name: str, *, shuffles: bool = True, num_workers: int = 0) -> Run:
    """A run whose epochs have eight steps, of samples that are numbers."""
    data = TensorDataset(torch.arange(32.0)[:, None])
    loader = ElasticDataLoader(data, batch_size=2, shuffle=shuffles, num_workers=num_workers)
    return Run(folder, name, loader=loader, global_batch_size=4, num_epoch_steps=7)


def epoch_taken(run: Run, epoch: int, *, num_steps: int | None = None) -> list[int]:
    """The numbers of the samples that a loop takes in an epoch, which it leaves after so many steps."""
    found: list[int] = []
    trainer = run.trainer
    with trainer.epoch(epoch):
        for batch in run.loader:
            numbers = batch[0]
            with trainer.step():
                loss = run.model(numbers.double().expand(-1, 6)).square().mean()
                trainer.backward(run.scaler.scale(loss))
                run.scaler.step(run.optimizer)
                run.scaler.update()
                run.optimizer.zero_grad()
            found.extend(map(int, numbers.flatten().tolist()))
            if num_steps is not None and len(found) == 4 * num_steps:
                break
    return found


def epochs_taken(
    folder: Path,
    name: str,
    *,
    counts: str = "range",
    back: int | None = None,
    skips: bool = False,
    shuffles: bool = True,
) -> tuple[Numbers, int]:
    """By epoch the numbers of the samples that a loop took, and the steps; after epoch 1 it goes ``back`` to a step."""
    run = numbered_run(folder, name, shuffles=shuffles)
    trainer, found = run.trainer, list[tuple[int, list[int]]]()

    def take(epoch: int) -> None:
        found.append((epoch, epoch_taken(run, epoch)))

    with trainer:
        epoch = trainer.start_epoch
        for number in range(20):
            if epoch == 3:
                break
            take(epoch)
            epoch += 1
            if number == 1 and back is not None:
                trainer.rewind(back, skip_samples=skips)
                epoch = trainer.start_epoch if counts == "start_epoch" else epoch
        return found, trainer.global_step


@pytest.mark.parametrize("num_left_at", [0, 2])  # the end of epoch 0, and the middle of epoch 1
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resumed_loop_that_begins_with_a_later_epoch_has_all_of_it_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_left_at: int, num_workers: int
) -> None:
    whole, _ = epochs_taken(tmp_path, "whole")
    first = numbered_run(tmp_path, "run", num_workers=num_workers)
    with first.trainer:
        epoch_taken(first, 0)
        if num_left_at:
            epoch_taken(first, 1, num_steps=num_left_at)
    second = numbered_run(tmp_path, "run", num_workers=num_workers)
    with second.trainer as trainer:
        assert trainer.start_epoch == 1
        assert epoch_taken(second, 2) == whole[2][1] and trainer.global_step == 16 + num_left_at
        assert epoch_taken(second, 3) and trainer.global_step == 24 + num_left_at
    said = (
        f"training goes on after step {8 + num_left_at}, in epoch 1, and the loop begins with epoch 2: the samples of "
    )
    assert f"{said}epoch 1 that come after step {8 + num_left_at} are left out" in caplog.text


@pytest.mark.parametrize("back", [8, 10])  # the end of epoch 0, and the middle of epoch 1
def test_a_loop_that_counts_on_after_going_back_has_the_epochs_that_it_says_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, back: int
) -> None:
    whole, num_steps = epochs_taken(tmp_path, "whole")
    assert num_steps == 24 and "went back" not in caplog.text
    epochs, num_steps = epochs_taken(tmp_path, "run", back=back)
    assert epochs == whole and num_steps == back + 8
    assert (
        f"went back to step {back}, in epoch 1, and the loop goes on with epoch 2: the samples of epoch 1"
        in caplog.text
    )
    assert f"that come after step {back} are left out, as by skip_samples=True" in caplog.text
    caplog.clear()
    epochs, num_steps = epochs_taken(tmp_path, "skips", back=back, skips=True)
    assert epochs == whole and num_steps == back + 8 and "the loop goes on with" not in caplog.text


@pytest.mark.parametrize("back", [8, 10])
def test_a_loop_that_counts_by_the_start_epoch_leaves_nothing_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, back: int
) -> None:
    whole, _ = epochs_taken(tmp_path, "whole")
    epochs, num_steps = epochs_taken(tmp_path, "run", counts="start_epoch", back=back)
    rest = whole[1][1][4 * (back - 8) :]
    assert epochs == [*whole[:2], (1, rest), whole[2]] and num_steps == 24
    assert "the loop goes on with" not in caplog.text


def test_a_source_of_ones_own_gives_the_rest_under_the_number_that_the_loop_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, "run", num_epoch_steps=7)
    with run.trainer:
        for epoch in range(3):
            with run.trainer.epoch(epoch):
                run.train(100)
            if epoch == 1:
                run.trainer.rewind(10)
        assert run.trainer.num_steps == 4 and run.trainer.global_step == 14
    assert "what comes is the rest of epoch 1, and training ends 1 epoch early" in caplog.text


def test_epochs_are_saved_again_by_their_numbers(tmp_path: Path) -> None:
    run = Run(tmp_path, "run", loader=plain_loader(3), checkpoint_interval=CheckpointInterval(epochs=1))
    with run.trainer:
        for _ in range(3):
            with run.trainer.epoch():
                run.train(100)
        assert run.trainer.rewind(3).name == "epoch_1"
        with run.trainer.epoch() as number:
            assert number == 1
            run.train(100)
    assert sorted(name.partition("-")[0] for name in run.saved) == [
        "epoch_1",
        "epoch_2",
        "epoch_2.abandoned",
        "epoch_3.abandoned",
    ]


def test_a_shuffling_loader_draws_on_where_it_is_if_samples_are_skipped(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(*make_data(BATCH * 3)), batch_size=4, shuffle=True, generator=draw)
    run = Run(tmp_path, "run", loader=loader)
    with run.trainer:
        with run.trainer.epoch():
            run.train(100)
        drawn = draw.get_state()
        run.trainer.save_checkpoint()
        with run.trainer.epoch():
            run.train(100)
        now = draw.get_state()
        run.trainer.rewind(3, skip_samples=True)
        assert torch.equal(draw.get_state(), now) and run.trainer.state_dict()["epoch"] == 2
        run.trainer.rewind(3)
        assert torch.equal(draw.get_state(), drawn) and run.trainer.state_dict()["epoch"] == 1


# --- when something goes wrong --------------------------------------------------------------------------------------


def test_it_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    bare = Run(tmp_path, "bare", shared_storage_path=None)
    with bare.trainer, pytest.raises(ElasticError, match="give it shared_storage_path"):
        bare.trainer.rewind()
    run = Run(tmp_path, "run")
    trainer = run.trainer
    with trainer, trainer.epoch():
        with pytest.raises(CheckpointNotFound, match=r"before step 0 .* none so far"):
            trainer.rewind()
        run.train(3)
        for wrong in (-1, 1.5, True, "2"):
            with pytest.raises(ValueError, match="allowed: an integer from 0"):
                trainer.rewind(wrong)
        with pytest.raises(CheckpointNotFound, match=r"of step 3 to go back to .* those of steps 2"):
            trainer.rewind(3)
        inputs, targets = make_data(3)
        with pytest.raises(StepError, match="in the middle of a step"), trainer.step():
            trainer.rewind()
        run.micro_step(inputs, targets)
        with pytest.raises(StepError, match="in the middle of a step"):
            trainer.rewind()
        trainer.rollback()
        before = run.bits
        assert trainer.rewind().name == "step_2"
        assert run.bits != before
    with pytest.raises(ElasticError, match="training has ended"):
        trainer.rewind()


def test_checkpoints_of_others_are_not_gone_back_to(tmp_path: Path) -> None:
    """Of an earlier run that this one did not go on from."""
    first = Run(tmp_path, "run")
    with first.trainer, first.trainer.epoch():
        first.train(4)
    second = Run(tmp_path, "run", resume="never")
    with second.trainer, second.trainer.epoch():
        second.train(1)
        with pytest.raises(CheckpointNotFound, match="none so far"):
            second.trainer.rewind()
        second.train(3)
        assert second.trainer.rewind().name == "step_2"
        with pytest.raises(CheckpointNotFound, match="of step 4"):
            second.trainer.rewind(4)


def damage(run: Run, step: int, file: str, at: int = -1) -> None:
    (path,) = run.storage.glob(f"fsdp_checkpoint/*/step_{step}/{file}*")
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("file", the_first(["COMMIT", "extra_param", "model_param", "optim_param", "trainer_state"], 2))
def test_a_damaged_one_is_passed_over_unless_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    whole = Run(tmp_path, "whole", shared_storage_path=None)
    with whole.trainer, whole.trainer.epoch():
        whole.train()
        expected = whole.bits
    run = Run(tmp_path, "run")
    with run.trainer, run.trainer.epoch():
        run.train(SPIKE)
        run.trainer._training.checkpoints.job.saver.settle()
        damage(run, 8, file)
        before = run.bits
        with pytest.raises(CheckpointDamaged, match=f"step_8.{file}"):
            run.trainer.rewind(8)
        if run.bits == before and file in ("COMMIT", "trainer_state"):
            run.micro_step(*make_data(3))
            run.trainer.rollback()
        else:
            with pytest.raises(TornStepError, match="going back to a checkpoint failed halfway"):
                run.micro_step(*make_data(3))
            with pytest.raises(TornStepError, match="failed halfway"):
                run.trainer.save_checkpoint()
        assert run.trainer.rewind().name == "step_6"
        assert "step_8" in caplog.text
        run.train()
        assert run.bits == expected


def test_a_strict_run_passes_over_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, "run", resume="strict")
    with run.trainer, run.trainer.epoch():
        run.train(5)
        run.trainer._training.checkpoints.end()
        damage(run, 4, "trainer_state")
        with pytest.raises(CheckpointDamaged):
            run.trainer.rewind()


def test_a_model_that_became_another_is_told_apart_and_left_as_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path, "run")
    with run.trainer, run.trainer.epoch():
        run.train(3)
        run.plain.register_buffer("more", torch.ones(2))
        before = run.bits
        with pytest.raises(CheckpointMismatch, match="more"):
            run.trainer.rewind()
        assert run.bits == before
        del run.plain.more
        run.train(4)


# --- a step that was torn -------------------------------------------------------------------------------------------


def torn_rank(rank: int, folder: Path, way: str, skips: bool, step: int | None = None) -> None:
    back = 8 if step is None else step
    whole = Run(folder, "whole", way=way, rank=rank, shared_storage_path=None)
    with whole.trainer, whole.trainer.epoch():
        passes_over = {back: lambda run: run.loader.pass_over((9 - back) * BATCH)}
        whole.train(at=passes_over if skips else None)
        expected = whole.bits
    run = Run(folder, "run", way=way, rank=rank)

    def break_it(run: Run) -> None:
        run.inner.fails = True
        run.when_torn = back_to(step, skip_samples=skips)

    with run.trainer, run.trainer.epoch():
        run.train(at={8: break_it})
        assert run.went_to == f"step_{back}"
        assert run.bits == expected
    assert run.trainer.global_step == NUM_STEPS


@pytest.mark.parametrize(("step", "skips"), each_once([None, BACK], [False, True]))
def test_a_torn_step_is_mended(tmp_path: Path, step: int | None, skips: bool) -> None:
    torn_rank(0, tmp_path, "plain", skips, step)


@pytest.mark.parametrize("way", the_first(["fully_shard", "ddp"]))
def test_a_step_that_was_torn_on_all_ranks_is_mended(ranks: RankPool, tmp_path: Path, way: str) -> None:
    ranks.run(2, torn_rank, tmp_path, way, True)


def test_a_torn_step_is_not_saved_and_may_leave_its_epoch(tmp_path: Path) -> None:
    run = Run(tmp_path, "run", checkpoint_interval=CheckpointInterval(epochs=1))

    def tear_and_leave_the_epoch() -> None:
        with run.trainer.epoch():
            run.train(2)
            run.trainer.save_checkpoint()
            run.inner.fails = True
            with pytest.raises(TornStepError):
                run.train(4)
            with pytest.raises(TornStepError):
                run.trainer.save_checkpoint()

    with run.trainer:
        with pytest.raises(TornStepError):
            tear_and_leave_the_epoch()
        assert run.trainer.rewind().name == "step_2"
        with run.trainer.epoch() as number:
            assert number == 0
            run.train(4)
    assert list(run.saved) == ["step_2", "step_4"], "the epoch has more steps, and is left there"


def fail(*_: object) -> None:
    raise PlantedFault("in forward")


def stuck_rank(rank: int, folder: Path) -> str:
    """FSDP1 cannot take back a pass, and no checkpoint makes its wrappers whole."""
    plain = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
    model = WAYS["FSDP1"].wrap(plain)
    trainer = trainer_of(folder, model, rank=rank, shared_storage_path=folder / "storage", use_fsdp=True)
    trainer.prepare(SGD(model.parameters(), lr=0.1))
    trainer.save_checkpoint()
    plain[2].register_forward_hook(fail)
    with pytest.raises(TornStepError), trainer.step():
        model(make_data(4, torch.float32)[0])
    with pytest.raises(TornStepError) as caught:
        trainer.rewind()
    trainer.close()
    return str(caught.value)


def test_what_a_checkpoint_cannot_mend_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(2, stuck_rank, tmp_path):
        assert "FSDP1 cannot take back a pass that failed" in told


# --- ranks that differ ----------------------------------------------------------------------------------------------


def step_and_go_back(run: Run) -> None:
    run.train(7)
    run.trainer.rewind()


def tear_and_go_back(run: Run) -> None:
    run.inner.fails = True
    with pytest.raises(TornStepError):
        run.train(7)
    run.inner.fails = False
    run.trainer.rewind()


DIFFERENT: dict[str, tuple[Act, Act]] = {
    "other steps": (back_to(2), back_to(4)),
    "a step and none": (back_to(), back_to(4)),
    "one skips": (back_to(2), back_to(2, skip_samples=True)),
    "one was torn": (step_and_go_back, tear_and_go_back),
    "one ends its epoch": (back_to(2), lambda run: run.trainer._prepared.epochs.end(None)),
}


def different_rank(rank: int, folder: Path, case: str) -> str:
    run = Run(folder, "run", way="ddp", rank=rank, timeout_seconds=20.0)
    with run.trainer, run.trainer.epoch():
        run.train(6)
        before = bits_of(values_of(run.model))
        with pytest.raises(ElasticError) as caught:
            DIFFERENT[case][rank](run)
        if case != "one was torn":
            assert bits_of(values_of(run.model)) == before
        raise caught.value


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_call_it_differently_all_raise(ranks: RankPool, tmp_path: Path, case: str) -> None:
    outcomes = ranks.run_outcomes(2, different_rank, tmp_path, case)
    for outcome in outcomes:
        assert outcome.error is not None
        assert outcome.error.type_name.endswith(RanksDisagreeError.__name__), outcome.error


def told_rank(rank: int, folder: Path) -> str:
    """What leaves the epoch has been told to the other ranks."""
    run = Run(folder, "run", way="ddp", rank=rank)

    def leave_the_epoch() -> None:
        with run.trainer.epoch():
            run.train(3)
            fail()

    with pytest.raises(PlantedFault):
        leave_the_epoch()
    with pytest.raises(ElasticError) as caught:
        run.trainer.rewind()
    return str(caught.value)


def test_after_an_exception_left_the_epoch_ranks_do_not_go_back(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(2, told_rank, tmp_path):
        assert "catch it within `with trainer.epoch():`" in told


# --- while things are under way -------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_under_way_is_awaited(tmp_path: Path, in_background: bool) -> None:
    run = Run(tmp_path, "run", save_in_background=in_background)
    with run.trainer, run.trainer.epoch():
        run.train(8)
        assert run.trainer.rewind().name == "step_6"
        assert "step_8" in run.saved


def test_what_is_to_be_kept_is_counted_in_the_new_line(tmp_path: Path) -> None:
    run = Run(tmp_path, "run", keep_last=2)
    with run.trainer, run.trainer.epoch():
        run.train(9)
        assert run.trainer.rewind(6).name == "step_6"
        run.train(12)
    assert sorted(name for name in run.saved if "abandoned" not in name) == ["step_10", "step_12"]


def test_the_folder_stays_the_jobs_own_and_the_state_is_that_of_the_step(tmp_path: Path) -> None:
    run = Run(tmp_path, "run")
    with run.trainer, run.trainer.epoch():
        run.train(5)
        run.trainer.rewind(2)
        with pytest.raises(CheckpointFenced):
            Run(tmp_path, "run")
        assert run.trainer.state_dict()["config"]["step"] == 2
        assert run.trainer.save_checkpoint().name == "step_2"


def test_one_line_says_where_training_went(tmp_path: Path) -> None:
    run = Run(tmp_path, "run")
    with run.trainer, run.trainer.epoch(), seen_by() as seen:
        run.train(5)
        run.trainer.rewind(2, skip_samples=True)
    (line,) = (line for line in seen.log if "going back from step 5" in line)
    assert line.startswith("INFO") and "step_2" in line and "passing over the samples since" in line
    (file,) = (tmp_path / "run").rglob("events-0.jsonl")
    lines = file.read_text().splitlines()
    (event,) = (event for event in map(JobEvent.from_json, lines) if event.kind == "went-back")
    assert (event.step, event.details["before"], event.details["skip_samples"]) == (2, 5, True)
    assert event.text in line and str(event.details["path"]).endswith("step_2")
