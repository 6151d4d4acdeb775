"""Steps whose gradients or losses are not finite: told of, left out, or taken back, on all ranks alike."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from elastic_ext import CheckpointInterval, StepError, TornStepError
from elastic_ext.training.gradients.finite import NotFinite, num_not_finite
from elastic_ext.training.remarks import next_look
from tests.support.faults import PlantedFault
from tests.support.ranks import RankPool
from tests.support.sharded import WAYS, values_of
from tests.support.training import ResumableSlices, Slices, bits_of, make_data, make_model, trainer_of

BATCH, NUM_STEPS = 8, 6
NAN, INF = math.nan, math.inf

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- what is pure ----


def test_the_first_steps_are_looked_at_then_a_quarter_of_each_doubling_apart_and_then_one_of_1024() -> None:
    looked_at = [0]
    while looked_at[-1] < 10_000:
        looked_at.append(next_look(looked_at[-1]))
    assert all(next_look(step) == next(look for look in looked_at if look > step) for step in range(2000))
    assert looked_at[:16] == [*range(8), 8, 10, 12, 14, 16, 20, 24, 28]
    assert all(b - a <= max(a / 4, 1) for a, b in itertools.pairwise(looked_at))
    assert looked_at[-3:] == [8192, 9216, 10240]


@pytest.mark.parametrize(
    ("values", "dtype", "number"),
    [
        ([[1.0, 2.0], [3.0]], torch.float32, 0),
        ([[1.0, NAN], [3.0]], torch.float32, 1),
        ([[1.0, INF], [-INF, NAN], [0.0]], torch.float64, 2),
        ([[3e38, 3e38], [1.0]], torch.float32, 0),  # whose norm is not finite
        ([[6e4] * 8], torch.float16, 0),
        ([[6e4] * 8, [NAN]], torch.float16, 1),
        ([[1.0, 2.0]], torch.bfloat16, 0),
        ([[INF]], torch.complex64, 1),
        ([[1, 2]], torch.int64, 0),
        ([[], [NAN]], torch.float32, 1),
        ([], torch.float32, 0),
    ],
)
def test_gradients_that_are_not_finite_are_counted(values: list[list[float]], dtype: torch.dtype, number: int) -> None:
    assert num_not_finite([torch.tensor(each, dtype=dtype) for each in values]) == number


def test_gradients_of_several_types_and_sparse_ones_are_counted_together() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([[NAN, 1.0]]), (4, 2), check_invariants=True)
    assert num_not_finite([torch.ones(2), torch.ones(2, dtype=torch.bfloat16), sparse]) == 1


def test_a_finding_names_what_was_seen() -> None:
    assert not NotFinite() and not NotFinite(num_parameters=4)
    assert str(NotFinite(num_gradients=1, num_parameters=4)) == "the gradients of 1 of 4 parameters were not finite"
    assert str(NotFinite(losses=((2, NAN), (3, INF)), norm=NAN)) == (
        "the loss of micro-step 2 was nan, and of 1 more and the norm of the gradients was nan"
    )
    assert str(NotFinite(is_elsewhere=True)) == "gradients on another rank were not finite"


# ---- on one rank ----


class Moody(nn.Module):
    """A classifier whose steps draw random numbers and move a buffer."""

    def __init__(self) -> None:
        super().__init__()
        made = make_model()
        self.first, self.second, self.norm = made[0], made[2], nn.BatchNorm1d(16).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.dropout(torch.tanh(self.norm(self.first(inputs))), 0.3))  # type: ignore[no-any-return]


Poison = Callable[[int, torch.Tensor], torch.Tensor]  # given the micro-step's number since training began, and its loss


def at(*places: int, value: float = NAN) -> Poison:
    return lambda number, loss: loss * value if number in places else loss


class Run:
    """A loop whose losses may be poisoned."""

    def __init__(
        self,
        folder: Path,
        poison: Poison = lambda number, loss: loss,
        *,
        model: nn.Module | None = None,
        micro_batch: int = BATCH,
        clips: bool = False,
        by_trainer: bool = False,
        source: Any = None,
        rank: int = 0,
        **options: Any,
    ) -> None:
        self.folder = folder
        self.model = make_model() if model is None else model
        self.poison, self.clips, self.by_trainer = poison, clips, by_trainer
        self.source = source or Slices(make_data(48), micro_batch, is_endless=True)
        given = {"global_batch_size": BATCH, **options}
        self.trainer = trainer_of(folder, self.model, self.source, rank=rank, **given)
        raw = AdamW(self.model.parameters(), lr=0.05)
        self.optimizer, self.scheduler = self.trainer.prepare(raw, ExponentialLR(raw, 0.9))
        self.rank = rank
        self.num_taken = 0
        self._loop = self.micro_steps()

    def micro_steps(self) -> Iterator[None]:
        """One micro-step after another."""
        for inputs, targets in self.source:
            with self.trainer.step():
                loss = nn.functional.cross_entropy(self.model(inputs), targets)
                loss = self.poison(self.num_taken, loss)
                self.num_taken += 1
                if self.by_trainer:
                    self.trainer.backward(loss)
                else:
                    loss.backward()  # type: ignore[no-untyped-call]
                if self.clips:
                    self.trainer.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            yield

    def take(self, num_steps: int) -> Run:
        """Pass so many boundaries."""
        boundaries = 0
        for _ in self._loop:
            boundaries += self.trainer.sync_gradients
            if boundaries == num_steps:
                break
        return self

    @property
    def counts(self) -> tuple[float, float]:
        counts = self.trainer._counts
        return counts.measured["num_not_finite"], counts.measured["num_skipped"]

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = (self.folder / str(self.rank) / f"events-{self.rank}.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == "not-finite"]

    @property
    def metrics(self) -> dict[str, Any]:
        text = (self.folder / str(self.rank) / f"metrics-{self.rank}.json").read_text()
        return json.loads(text)["measures"]  # type: ignore[no-any-return]

    @property
    def bits(self) -> list[Any]:
        return bits_of(self.model, self.optimizer.state_dict(), self.scheduler.state_dict())


def said_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "elastic_ext.training.gradients.finite"]


@pytest.mark.parametrize("when", ["warn", "skip", "stop"])
def test_a_training_whose_gradients_are_finite_is_the_same_to_the_bit(
    tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("it", "plain"):
        (tmp_path / name).mkdir()
    run = Run(tmp_path / "it", when_not_finite=when, clips=True, by_trainer=True)
    with run.trainer:
        run.take(NUM_STEPS)
    plain = make_model()
    optimizer = AdamW(plain.parameters(), lr=0.05)
    scheduler = ExponentialLR(optimizer, 0.9)
    data = make_data(48)
    for step in range(NUM_STEPS):
        picked = slice(step * BATCH, (step + 1) * BATCH)
        nn.functional.cross_entropy(plain(data[0][picked]), data[1][picked]).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert bits_of(run.model) == bits_of(plain)
    assert run.counts == (0, 0) and run.events == [] and said_in(caplog) == []
    assert (run.metrics["num_not_finite"], run.metrics["num_skipped"]) == (0, 0)


@pytest.mark.parametrize("batch", [BATCH, None])
def test_by_default_a_loss_that_is_not_a_number_commits_and_is_said_once_and_counted(
    tmp_path: Path, batch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, at(1), global_batch_size=batch)
    with run.trainer:
        run.take(4)
        assert run.trainer.global_step == 4
    assert run.counts == (3, 0), "of the four steps that were looked at"
    (said,) = said_in(caplog)
    assert said.startswith("the gradients of 4 of 4 parameters were not finite in the step after step 1")
    assert "when_not_finite" in said and "trainer.rewind()" in said
    (event,) = run.events
    assert event["text"] == said and event["step"] == 1
    assert (run.metrics["num_not_finite"], run.metrics["num_skipped"]) == (3, 0)


def test_behind_the_first_steps_it_is_found_in_the_next_that_is_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, at(17))
    with run.trainer:
        run.take(20)
        assert run.counts == (0, 0)
        run.take(1)
    assert run.counts == (1, 0) and "after step 20" in said_in(caplog)[0]


def test_a_norm_that_clipping_has_come_to_is_found_in_every_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, at(17), clips=True)
    with run.trainer:
        run.take(20)
    assert run.counts == (3, 0)
    assert said_in(caplog)[0].startswith("the norm of the gradients was nan in the step after step 17")


def test_what_is_told_of_clipped_gradients_is_what_they_were_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A norm that is infinite makes zeros of what was finite, one that is no number makes none of everything."""
    model = make_model()
    run = Run(tmp_path, model=model, clips=True)
    model[2].bias.register_hook(lambda gradient: gradient * NAN)  # type: ignore[operator]
    with run.trainer:
        run.take(1)
    assert said_in(caplog)[0].startswith("the gradients of 1 of 4 parameters were not finite")


def test_a_loss_whose_gradients_are_finite_all_the_same_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, lambda number, loss: loss + INF if number == 3 else loss, by_trainer=True, micro_batch=4)
    with run.trainer:
        run.take(4)
    assert run.counts == (1, 0)
    assert said_in(caplog)[0].startswith("the loss of micro-step 2 was inf in the step after step 1")


def test_a_loop_that_leaves_its_optimizer_out_by_itself_has_seen_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, at(1))
    with run.trainer:
        for number, (inputs, targets) in enumerate(run.source):
            with run.trainer.step():
                run.poison(number, nn.functional.cross_entropy(run.model(inputs), targets)).backward()  # type: ignore[no-untyped-call]
                if run.trainer.clip_grad_norm_(run.model.parameters(), 1.0).isfinite():
                    run.optimizer.step()
                run.optimizer.zero_grad()
            if number == 4:
                break
        assert run.trainer.global_step == 4
    assert run.counts == (0, 0) and said_in(caplog) == []


# ---- left out ----


def by_hand(poisoned: Sequence[int], num_steps: int) -> tuple[nn.Module, Any]:
    """Plain torch, which leaves whole batches out."""
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=0.05)
    scheduler = ExponentialLR(optimizer, 0.9)
    data = make_data(48)
    for step in range(num_steps):
        if step in poisoned:
            continue
        picked = [index % 48 for index in range(step * BATCH, (step + 1) * BATCH)]
        nn.functional.cross_entropy(model(data[0][picked]), data[1][picked]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, scheduler


@pytest.mark.parametrize("batch", [BATCH, None])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_step_that_is_left_out_never_happened_but_for_its_samples(
    tmp_path: Path, batch: int | None, clips: bool, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, at(2, 4, value=value), global_batch_size=batch, when_not_finite="skip", by_trainer=clips)
    with run.trainer:
        run.take(3)
        assert run.trainer.global_step == 2 and all(part.grad is None for part in run.model.parameters())
        run.take(5)
        assert run.num_taken == 8
    model, scheduler = by_hand((2, 4), 8)
    assert bits_of(run.model) == bits_of(model)
    assert run.scheduler.last_epoch == scheduler.last_epoch == run.trainer.global_step == 6
    assert run.source.committed == [index % 48 for index in range(8 * BATCH)]
    assert run.counts == (2, 2)
    (said,) = said_in(caplog)
    assert "in the step after step 2, which was left out" in said
    assert (run.metrics["num_not_finite"], run.metrics["num_skipped"]) == (2, 2)
    assert len(run.events) == 1


def test_one_micro_batch_of_several_leaves_the_whole_step_out(tmp_path: Path) -> None:
    run = Run(tmp_path, at(5), micro_batch=4, when_not_finite="skip")
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    other = Run(other_folder, micro_batch=4)
    with run.trainer, other.trainer:
        run.take(2)
        other.take(2)
        assert bits_of(run.model) == bits_of(other.model)
        run.take(1)
    assert bits_of(run.model) == bits_of(other.model) and run.trainer.global_step == 2


@pytest.mark.parametrize("rollback", ["full", "gradients"])
def test_buffers_and_random_states_are_put_back_where_a_full_rollback_keeps_them(tmp_path: Path, rollback: str) -> None:
    run = Run(tmp_path, at(2), model=Moody().double(), when_not_finite="skip", rollback=rollback)
    with run.trainer:
        run.take(2)
        before = bits_of(run.model), torch.get_rng_state()
        run.take(1)
        after = bits_of(run.model), torch.get_rng_state()
        assert run.trainer.global_step == 2
    assert (before[0] == after[0]) is (rollback == "full")
    assert torch.equal(before[1], after[1]) is (rollback == "full")


def test_where_nothing_but_skipping_happens_it_is_said_once_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, lambda number, loss: loss * NAN if number > 1 else loss, when_not_finite="skip")
    with run.trainer:
        run.take(2 + 99)
        assert len(said_in(caplog)) == 1
        run.take(30)
    first, second = said_in(caplog)
    assert "was left out" in first and second.startswith("100 steps in a row were left out after step 2")
    assert run.counts == (129, 129) and len(run.events) == 2


def test_gradients_that_a_closure_gives_are_looked_at_too(tmp_path: Path) -> None:
    run = Run(tmp_path, when_not_finite="skip")
    losses = []
    with run.trainer:
        before: list[Any] = []
        for number, (inputs, targets) in enumerate(run.source):

            def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets, number: int = number) -> Any:
                run.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(run.model(inputs), targets) * (NAN if number == 1 else 1.0)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            before.append(bits_of(run.model))
            with run.trainer.step():
                losses.append(run.optimizer.step(closure))
            if number == 2:
                break
        assert run.trainer.global_step == 2
    assert before[1] == before[2] and losses[1].isnan()


def two_optimizers(folder: Path, when: str) -> tuple[Any, Any, list[Any], Slices]:
    model = make_model()
    source = Slices(make_data(48), BATCH, is_endless=True)
    trainer = trainer_of(folder, model, source, global_batch_size=BATCH, when_not_finite=when)
    optimizers = trainer.prepare([SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)])
    return trainer, model, optimizers, source


def test_what_only_the_second_optimizer_would_use_keeps_the_first_from_its_step(tmp_path: Path) -> None:
    trainer, model, optimizers, source = two_optimizers(tmp_path, "skip")
    with trainer:
        for number, (inputs, targets) in enumerate(source):
            before = bits_of(model)
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                if number == 1:
                    model[2].bias.grad[0] = NAN
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert (bits_of(model) == before) is (number == 1)
            if number == 2:
                break
        assert trainer.global_step == 2 and trainer._counts.measured["num_skipped"] == 1


@pytest.mark.parametrize("when", ["skip", "stop"])
def test_gradients_that_come_after_another_optimizer_has_stepped_keep_their_own_from_its_step(
    tmp_path: Path, when: str
) -> None:
    """As in a GAN: the first has stepped by then, so that the step cannot be taken back any more."""
    trainer, model, optimizers, source = two_optimizers(tmp_path, when)

    def train() -> None:
        for inputs, targets in source:
            with trainer.step():
                for each, optimizer in zip((model[0], model[2]), optimizers, strict=True):
                    each.requires_grad_(True)
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    loss = loss * (NAN if each is model[2] else 1.0)
                    loss.backward(inputs=list(each.parameters()))  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
            break

    before = bits_of(model[2])
    if when == "stop":
        with pytest.raises(TornStepError):
            train()
    else:
        train()
    assert bits_of(model[2]) == before and trainer.global_step == 0
    assert trainer._counts.measured["num_not_finite"] == 1
    trainer.close()


# ---- stopped ----


def test_a_step_that_stops_training_is_taken_back_and_its_samples_come_again(tmp_path: Path) -> None:
    model = Moody().double()
    run = Run(tmp_path, model=model, micro_batch=4, when_not_finite="stop", rollback="full")
    text, is_known = "", False
    with run.trainer:
        before: Any = None
        for number, (inputs, targets) in enumerate(run.source):
            if number % 2 == 0:
                before = run.bits, torch.get_rng_state()
            caught: StepError | None = None
            try:
                with run.trainer.step():
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    run.trainer.backward(loss * (NAN if number == 5 else 1.0))
                    run.optimizer.step()
                    run.scheduler.step()
                    run.optimizer.zero_grad()
            except StepError as error:
                caught = error
            if caught is not None:
                assert not isinstance(caught, TornStepError)
                text, is_known = str(caught), torch.equal(torch.get_rng_state(), before[1])
                assert run.bits == before[0] and run.trainer.global_step == 2
                assert run.source.committed == list(range(2 * BATCH))
            if number == 7:
                break
    assert text.startswith("the loss of micro-step 2 was nan and the gradients of ") and is_known
    assert "in the step after step 2; the step was taken back" in text and "resume from a checkpoint" in text
    assert run.counts == (1, 0) and run.events[0]["text"] == text
    assert run.source.committed == list(range(3 * BATCH)), "the same samples came again"


def test_a_run_that_was_stopped_resumes_with_the_same_samples(tmp_path: Path) -> None:
    def made(poison: Poison) -> Run:
        source = ResumableSlices(make_data(48), BATCH, is_endless=True)
        kept: dict[str, Any] = {
            "shared_storage_path": tmp_path / "kept",
            "checkpoint_interval": CheckpointInterval(steps=1),
        }
        return Run(tmp_path, poison, source=source, when_not_finite="stop", **kept)

    first = made(at(3))
    with pytest.raises(StepError), first.trainer:
        first.take(6)
    second = made(at())
    with second.trainer:
        assert second.trainer.global_step == 3
        second.take(2)
    assert second.source.committed == list(range(3 * BATCH, 5 * BATCH))


# ---- with a scaler ----


def scaled(folder: Path, when: str, num_steps: int, poison: Poison) -> tuple[Any, list[float]]:
    model = make_model(torch.float32)
    source = Slices(make_data(48, torch.float32), BATCH, is_endless=True)
    trainer = trainer_of(folder, model, source, global_batch_size=BATCH, when_not_finite=when)
    optimizer, scaler = trainer.prepare(SGD(model.parameters(), lr=0.1), None, torch.amp.GradScaler("cpu"))
    scales = []
    with trainer:
        for number, (inputs, targets) in enumerate(source):
            with trainer.step():
                loss = poison(number, nn.functional.cross_entropy(model(inputs), targets))
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                trainer.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            scales.append(scaler.get_scale())
            if number + 1 == num_steps:
                break
    return trainer, scales


@pytest.mark.parametrize("when", ["warn", "skip", "stop"])
def test_infinities_that_a_scaler_leaves_out_are_its_business(
    tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, scales = scaled(tmp_path, when, 12, at(*range(1, 9), value=INF))
    assert trainer.global_step == 4 and scales[-1] == 2.0**8
    assert trainer._counts.measured["num_not_finite"] == 0 and said_in(caplog) == []


@pytest.mark.parametrize("when", ["warn", "skip"])
def test_what_no_scale_makes_finite_is_told_and_counted(
    tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, _ = scaled(tmp_path, when, 40, lambda number, loss: loss * NAN if number > 1 else loss)
    (said,) = said_in(caplog)
    assert said == (
        "the scaler has left out 33 steps in a row for gradients that are not finite at any scale, after step 2: "
        "training does not go on; where parameters are not finite no further step mends that: call trainer.rewind() "
        "for an earlier checkpoint, or start again with a lower learning rate; this warning is logged once, the metric "
        "num_not_finite counts on"
    )
    assert trainer.global_step == 2 and trainer._counts.measured["num_not_finite"] == 38 - 32


def test_what_no_scale_makes_finite_stops_training_where_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"the scaler has left out 33 steps in a row .* a lower learning rate$"):
        scaled(tmp_path, "stop", 40, lambda number, loss: loss * NAN if number > 1 else loss)


# ---- on several ranks ----


def on_a_rank(
    rank: int, folder: str, way: str, when: str, where: str, clips: bool
) -> tuple[int, tuple[int, int], list[str], bool, list[str], str, list[Any]]:
    """What a rank has come to where one rank's loss, or its part of a gradient, is not finite in the third step."""
    torch.set_num_threads(1)
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("elastic_ext.training.gradients.finite").addHandler(Lines())
    model: Any = WAYS[way].wrap(make_model(torch.float32))  # of others FSDP1 tells no norm
    source = Slices(make_data(48, torch.float32), BATCH // WAYS[way].degree()[0], is_endless=True)
    trainer = trainer_of(Path(folder), model, source, rank=rank, global_batch_size=BATCH, when_not_finite=when)
    optimizer = trainer.prepare(AdamW(model.parameters(), lr=0.05))
    error, before = "", values_of(model)
    try:
        for number, (inputs, targets) in enumerate(source):
            before = values_of(model)
            is_bad = number == 2 and rank == (0 if way == "tensor" and where == "loss" else 1)
            with trainer.step():
                loss = nn.functional.cross_entropy(model(inputs), targets)
                (loss * (NAN if is_bad and where == "loss" else 1.0)).backward()  # type: ignore[no-untyped-call]
                if is_bad and where == "gradient":
                    gradients = (part.grad for part in model.parameters() if part.grad is not None)
                    held = next(each for each in gradients if each.numel())
                    (held.to_local() if isinstance(held, DTensor) else held).view(-1)[0] = NAN
                if clips:
                    trainer.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            if number == 2:
                break
        is_same = bits_of(values_of(model)) == bits_of(before)
        trainer.close()
    except StepError as caught:
        error, is_same = str(caught), bits_of(values_of(model)) == bits_of(before)
    counts = trainer._counts
    events = (Path(folder) / str(rank) / f"events-{rank}.jsonl").read_text().splitlines()
    told = [event["text"] for event in map(json.loads, events) if event["kind"] == "not-finite"]
    numbers = counts.measured["num_not_finite"], counts.measured["num_skipped"]
    return counts.global_step, numbers, lines, is_same, told, error, bits_of(values_of(model))


SHARDED = ("fully_shard", "tensor", "FSDP1")


@pytest.mark.parametrize(
    ("way", "where"), [("ddp", "loss"), *((way, where) for way in SHARDED for where in ("loss", "gradient"))]
)
@pytest.mark.parametrize("clips", [False, True])
def test_ranks_leave_the_same_step_out(ranks: RankPool, tmp_path: Path, way: str, where: str, clips: bool) -> None:
    first, second = ranks.run(2, on_a_rank, str(tmp_path), way, "skip", where, clips)
    for global_step, counts, _, is_same, told, error, _ in (first, second):
        assert (global_step, counts, is_same, len(told), error) == (2, (1, 1), True, 1, "")
    assert len(first[2]) == 1 and second[2] == []


@pytest.mark.parametrize(("way", "where"), [("ddp", "loss"), ("fully_shard", "gradient"), ("FSDP1", "gradient")])
def test_ranks_stop_in_the_same_step_and_nothing_has_changed(
    ranks: RankPool, tmp_path: Path, way: str, where: str
) -> None:
    first, second = ranks.run(2, on_a_rank, str(tmp_path), way, "stop", where, False)
    for global_step, counts, _, is_same, told, error, _ in (first, second):
        assert (global_step, counts, is_same, told) == (2, (1, 0), True, [error])
        assert "in the step after step 2; the step was taken back" in error
    elsewhere = "another rank" in first[5]
    assert elsewhere is (where == "gradient")


def test_by_default_ranks_of_ddp_say_once_what_they_all_see(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, on_a_rank, str(tmp_path), "ddp", "warn", "loss", False)
    assert first[0] == second[0] == 3 and first[1] == second[1] == (1, 0)
    assert len(first[2]) == 1 and second[2] == [] and first[4] == second[4] == first[2]


def test_by_default_a_rank_says_by_itself_what_it_alone_has_of_a_sharded_model(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, on_a_rank, str(tmp_path), "fully_shard", "warn", "gradient", False)
    assert first[0] == second[0] == 3 and (first[1], second[1]) == ((0, 0), (1, 0))
    assert first[2] == [] and len(second[2]) == 1


def given_differently(rank: int, folder: str) -> str:
    model: Any = WAYS["ddp"].wrap(make_model())
    when = ("warn", "skip")[rank]
    source = Slices(make_data(48), BATCH // 2)
    trainer = trainer_of(Path(folder), model, source, rank=rank, global_batch_size=BATCH, when_not_finite=when)
    try:
        trainer.prepare(SGD(model.parameters(), lr=0.1))
    except Exception as error:
        return str(error)
    return ""


def test_ranks_that_were_given_different_values_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(2, given_differently, str(tmp_path)):
        assert "when_not_finite" in said


def failing_alone(rank: int, folder: str) -> str:
    """Rank 1 fails between its passes and its optimizer, where the other waits to hear of its gradients."""
    model: Any = WAYS["fully_shard"].wrap(make_model())
    source = Slices(make_data(48), BATCH // 2, is_endless=True)
    trainer = trainer_of(Path(folder), model, source, rank=rank, global_batch_size=BATCH, when_not_finite="stop")
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    with trainer:
        for number, (inputs, targets) in enumerate(source):
            with trainer.step():
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                if number == 1 and rank == 1:
                    raise PlantedFault("between")
                optimizer.step()
                optimizer.zero_grad()
    return ""


def test_a_rank_that_fails_before_its_optimizer_does_not_hang_the_others(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks.run_outcomes(2, failing_alone, str(tmp_path), deadline_seconds=60.0)
    assert not any(outcome.hung for outcome in outcomes) and not any(outcome.ok for outcome in outcomes)
    assert outcomes[1].error is not None and "between" in outcomes[1].error.message


def guarded(rank: int, folder: str) -> tuple[int, tuple[int, int], list[Any]]:
    model: Any = WAYS["ddp"].wrap(make_model())
    source = Slices(make_data(48), BATCH // 2, is_endless=True)
    options = {"when_not_finite": "skip", "guard": "always"}
    trainer = trainer_of(Path(folder), model, source, rank=rank, global_batch_size=BATCH, **options)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    number = 0

    def take(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        (loss * (NAN if number == 1 and rank == 1 else 1.0)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    with trainer:
        for number, (inputs, targets) in enumerate(source):
            trainer.run(take, inputs, targets)
            if number == 3:
                break
    counts = trainer._counts
    return (
        counts.global_step,
        (counts.measured["num_not_finite"], counts.measured["num_skipped"]),
        bits_of(values_of(model)),
    )


def test_steps_that_are_functions_and_guarded_are_left_out_alike(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, guarded, str(tmp_path))
    assert first == second and first[:2] == (3, (1, 1))


def test_what_may_not_be_given_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="when_not_finite"):
        trainer_of(tmp_path, make_model(), when_not_finite="ignore")
