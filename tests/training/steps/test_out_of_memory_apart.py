"""Guarded steps of every kind: their gradients are those that DDP would have made, and other failures are as ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from elastic_ext import ElasticError, StepError, TornStepError
from tests.support.faults import PlantedFault
from tests.support.loops import seen_by
from tests.support.ranks import RankPool
from tests.support.resharding import FULL, WHOLE
from tests.support.shortage import Short, Shortage
from tests.support.training import Slices, bits_of, make_data, make_model, trainer_of

Loop = Callable[[Any, Any, Any, torch.Tensor, torch.Tensor], None]


# --- what a function may do -------------------------------------------------------------------------------------------


def plain(trainer: Any, model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def counted(trainer: Any, model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    keep = targets > 0
    loss = nn.functional.cross_entropy(model(inputs)[keep], targets[keep], reduction="sum")
    trainer.backward(loss, num_items=keep.sum())
    optimizer.step()
    optimizer.zero_grad()


def exact(trainer: Any, model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    norm = sum(part.square().sum() for part in model.parameters())
    trainer.backward(nn.functional.cross_entropy(model(inputs), targets) + 1e-2 * norm)
    trainer.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def two_passes(trainer: Any, model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    (0.5 * model(-inputs).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def penalised(trainer: Any, model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    trainer.backward(nn.functional.cross_entropy(outputs, targets) + slope.square().sum() / len(inputs))
    optimizer.step()
    optimizer.zero_grad()


def looking(trainer: Any, model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Whoever looks at gradients where a step ends sees those of all ranks."""
    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    if trainer.sync_gradients:
        own = torch.cat([part.grad.flatten() for part in model.parameters()])
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        assert all(torch.equal(own, other) for other in every)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def trained(
    rank: int,
    folder: Path,
    guard: str,
    model: Any,
    loop: Loop = plain,
    *,
    num_steps: int = 4,
    make: Callable[[Any], torch.optim.Optimizer] = lambda parameters: SGD(parameters, lr=0.1),
    is_guarded: bool | None = None,
    **given: Any,
) -> list[Any]:
    """What comes of so many steps, bit for bit; looks whether those of ``"always"``, and no others, were guarded."""
    loader = Slices(make_data(96, next(model.parameters()).dtype), 4, is_endless=True)
    (folder / guard).mkdir(exist_ok=True)
    trainer = trainer_of(folder / guard, model, loader, rank=rank, guard=guard, **given)
    optimizer = trainer.prepare(make(model.parameters()))
    were_guarded = set()

    def looked_at(*batch: torch.Tensor) -> None:
        were_guarded.add(trainer._training.state.is_guarded)
        loop(trainer, model, optimizer, *batch)

    with trainer:
        for batch in loader:
            trainer.run(looked_at, *batch)
            if trainer.global_step == num_steps:
                break
    if guard != "auto":
        assert were_guarded == {guard == "always" if is_guarded is None else is_guarded}
    return bits_of(model, optimizer.state_dict())


def run_both(rank: int, folder: Path, loop: Loop, num_micro_steps: int, options: dict[str, Any]) -> None:
    results = []
    for guard in ("always", "never"):
        torch.manual_seed(0)
        model = DistributedDataParallel(make_model(), **options)
        batch = 4 * num_micro_steps * dist.get_world_size()
        make: Any = lambda parameters: AdamW(parameters, lr=1e-2)  # noqa: E731 what is stepped with
        results.append(trained(rank, folder, guard, model, loop, num_steps=6, make=make, global_batch_size=batch))
    assert results[0] == results[1]


@pytest.mark.parametrize("num_micro_steps", [1, 3])
@pytest.mark.parametrize(
    "loop", [plain, counted, exact, two_passes, penalised, looking], ids=lambda each: each.__name__
)
def test_two_ranks_come_to_the_same_bits_guarded_or_not(
    ranks: RankPool, tmp_path: Path, loop: Loop, num_micro_steps: int
) -> None:
    ranks.run(2, run_both, tmp_path, loop, num_micro_steps, {})


@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
def test_options_of_ddp_make_no_difference(ranks: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    ranks.run(2, run_both, tmp_path, plain, 2, options)


class Branches(nn.Module):
    """Which branch is taken is each rank's own affair."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 5).double()
        self.branches = nn.ModuleList(nn.Linear(5, 5).double() for _ in range(3))
        self.chosen = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.branches[self.chosen](self.trunk(inputs))  # type: ignore[no-any-return]


def take_branches(rank: int, folder: Path) -> None:
    results = []
    for guard in ("always", "never"):
        torch.manual_seed(0)
        branches = Branches()
        branches.chosen = rank
        model = DistributedDataParallel(branches, find_unused_parameters=True)
        results.append(trained(rank, folder, guard, model))
        assert branches.branches[2].weight.grad is None
    assert results[0] == results[1]


def test_parameters_without_a_gradient_on_some_ranks_have_the_mean(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, take_branches, tmp_path)


def change_branches(rank: int, folder: Path, guard: str) -> list[Any]:
    """After guarded steps, and after one that is rolled back, another branch is taken than they took."""
    torch.manual_seed(0)
    branches = Branches()
    model = DistributedDataParallel(branches, find_unused_parameters=True)
    loader = Slices(make_data(96), 4, is_endless=True)
    (folder / guard).mkdir(exist_ok=True)
    trainer = trainer_of(folder / guard, model, loader, rank=rank, guard=guard, global_batch_size=16)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1, momentum=0.9))
    fails = guard == "never"
    with trainer:
        for batch in loader:
            branches.chosen = trainer.global_step // 3 % 2
            if fails and trainer.global_step == 4:
                branches.chosen, fails = 2, False
                trainer.run(plain, trainer, model, optimizer, *batch)
                trainer.rollback()
                continue
            trainer.run(plain, trainer, model, optimizer, *batch)
            if trainer.global_step == 7:
                break
    return bits_of(model, optimizer.state_dict())


def test_which_parameters_a_step_uses_is_its_own_affair(ranks: RankPool, tmp_path: Path) -> None:
    one, *others = [
        bits for guard in ("auto", "always", "never") for bits in ranks.run(2, change_branches, tmp_path, guard)
    ]
    assert others == [one] * 5


class Parts(nn.Module):
    """The first part is one over all ranks, and each rank has the second one for itself."""

    def __init__(self, alone: dist.ProcessGroup) -> None:
        super().__init__()
        self.common = DistributedDataParallel(nn.Linear(6, 8).double())
        self.own = DistributedDataParallel(nn.Linear(8, 5).double(), process_group=alone)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.own(torch.tanh(self.common(inputs)))  # type: ignore[no-any-return]


def part_over_others(rank: int, folder: Path) -> torch.Tensor:
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    results = []
    for guard in ("always", "never"):
        torch.manual_seed(0)
        model = Parts(groups[rank])
        with seen_by() as seen:
            results.append(trained(rank, folder, guard, model, num_steps=3, is_guarded=False))
        assert ("parts of the model are averaged over different ranks" in str(seen.log)) is (guard == "always")
    assert results[0] == results[1]
    return model.own.module.weight.detach()  # type: ignore[no-any-return]


def test_parts_over_other_ranks_are_left_to_ddp(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(2, part_over_others, tmp_path)
    assert not torch.equal(one, other)


def leave_out(rank: int, folder: Path, what: str) -> None:
    """One rank makes no pass, or calls nothing at all, in one micro-step that ends a step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model())
    loader = Slices(make_data(96), 4, is_endless=True)
    trainer = trainer_of(folder, model, loader, rank=rank, guard="always")
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))

    def loop(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        if rank == 1 and trainer.global_step == 2 and not left:
            left.append(True)
            if what == "the pass":
                model(inputs)
            return
        plain(trainer, model, optimizer, inputs, targets)

    left: list[bool] = []
    with trainer:
        for batch in loader:
            trainer.run(loop, *batch)
            if len(loader.sizes) == 5:
                break


@pytest.mark.parametrize("what", ["the pass", "everything"])
def test_a_rank_that_leaves_a_pass_out_is_an_error_on_all(ranks: RankPool, tmp_path: Path, what: str) -> None:
    outcomes = ranks.run_outcomes(2, leave_out, tmp_path, what)
    for outcome in outcomes:
        assert outcome.error is not None
        assert outcome.error.type_name == "RanksDisagreeError"
        assert "ranks differ in steps, backward passes: rank 0: 3 steps" in outcome.error.message


def scaled(rank: int, folder: Path, guard: str) -> list[Any]:
    """A scaler's infinities are found on all ranks alike."""
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model(torch.float32))
    loader = Slices(make_data(96, torch.float32), 4, is_endless=True)
    (folder / guard).mkdir(exist_ok=True)
    trainer = trainer_of(folder / guard, model, loader, rank=rank, guard=guard)
    inner = SGD(model.parameters(), lr=0.1)
    optimizer, scaler = trainer.prepare(
        inner, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    )

    def loop(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        factor = torch.inf if rank == 1 and len(loader.sizes) == 2 else 1.0
        scaler.scale(nn.functional.cross_entropy(model(inputs), targets) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with trainer:
        for batch in loader:
            trainer.run(loop, *batch)
            if len(loader.sizes) == 6:
                break
    assert trainer.global_step == 5
    return bits_of(model, scaler.state_dict())


def test_a_scaler_leaves_out_the_same_steps(ranks: RankPool, tmp_path: Path) -> None:
    one, *others = [bits for guard in ("always", "never") for bits in ranks.run(2, scaled, tmp_path, guard)]
    assert others == [one] * 3


# --- what ends training -----------------------------------------------------------------------------------------------


def crash(rank: int, folder: Path, how: str) -> None:
    """Memory runs out on rank 1 where others wait for it within the model."""
    phase = "backward done" if how == "shared" else "in backward"
    shortage = Shortage(phase=phase, at=(4 if how == "unguarded" else 1, 0)) if rank == 1 else Shortage()
    wrap = fully_shard if how == "sharded" else None
    run = Short(rank, folder, batch_size=4, has_moods=how == "unguarded", shortage=shortage, wrap=wrap)
    with run.trainer:
        run.train(8)


@pytest.mark.parametrize("how", ["unguarded", "shared", "sharded"])
def test_elsewhere_all_ranks_raise_at_once(ranks: RankPool, tmp_path: Path, how: str) -> None:
    began = time.monotonic()
    first, second = ranks.run_outcomes(2, crash, tmp_path, how)
    assert time.monotonic() - began < 50  # timeouts are a minute, and more
    assert first.error is not None
    assert second.error is not None
    assert "OutOfMemoryError: CUDA out of memory. (planted)" in second.error.traceback
    assert "so training ends here, to go on from a checkpoint" in second.error.traceback
    assert any(word in first.error.traceback for word in ("Connection closed", "Connection reset", "PeerLostError"))


def second_optimizer(rank: int, folder: Path) -> None:
    """Memory runs out after one of two optimizers has stepped: there is no way back."""
    torch.manual_seed(0)
    inner = make_model()
    model = DistributedDataParallel(inner)
    loader = Slices(make_data(96), 4, is_endless=True)
    trainer = trainer_of(folder, model, loader, rank=rank)
    first, second = trainer.prepare([SGD(inner[0].parameters(), lr=0.1), SGD(inner[2].parameters(), lr=0.1)])

    def loop(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        first.step()
        if rank == 1:
            raise torch.OutOfMemoryError("planted")
        second.step()

    with trainer:
        for batch in loader:
            trainer.run(loop, *batch)


def test_after_an_optimizer_has_stepped_there_is_no_way_back(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run_outcomes(2, second_optimizer, tmp_path)
    assert second.error is not None
    assert second.error.type_name == TornStepError.__name__
    assert first.error is not None
    assert "lost a peer" in first.error.traceback


def other_failure(rank: int, folder: Path) -> list[int]:
    """Of the user's, before gradients were shared, on one rank alone: it takes the step again, and the others wait."""
    run = Short(rank, folder, batch_size=4, guard="always")
    fails = [rank == 1]

    def loop(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        run.model(inputs)
        if fails[0] and run.trainer.global_step == 1:
            fails[0] = False
            raise PlantedFault("of the user's")
        return run.micro_step(inputs, targets)

    with run.trainer:
        while run.trainer.global_step < 4:
            try:
                for batch in run.loader:
                    run.trainer.run(loop, *batch)
                    if run.trainer.global_step == 4:
                        break
            except PlantedFault:
                assert rank == 1
    return run.loader.committed


def test_other_failures_before_gradients_are_shared_are_a_ranks_own(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(2, other_failure, tmp_path)
    assert len(one) == len(other) == 16
    assert not set(one) & set(other)


def mixed_forms(rank: int, folder: Path) -> None:
    run = Short(rank, folder, batch_size=4, num_micro_steps=2)
    batches = iter(run.loader)
    with run.trainer:
        run.trainer.run(run.micro_step, *next(batches))
        with pytest.raises(StepError, match=r"trainer\.run\(\) began"), run.trainer.step():
            pass
        run.trainer.rollback()
        run.train(2)


def test_a_step_is_taken_in_one_form(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, mixed_forms, tmp_path)


def not_guarded(rank: int, folder: Path, why: str) -> list[str]:
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model(torch.float32), static_graph=why == "static graph")
    if why == "hook":
        model.register_comm_hook(None, fp16_compress_hook)
    with seen_by() as seen:
        trained(rank, folder, "always", model, num_steps=5, is_guarded=False)
    return [line for line in seen.log if "cannot be taken again" in line]


@pytest.mark.parametrize(("why", "words"), [("static graph", "a static graph"), ("hook", "a communication hook")])
def test_what_averages_otherwise_is_left_to_ddp_and_said_once(
    ranks: RankPool, tmp_path: Path, why: str, words: str
) -> None:
    for told in ranks.run(2, not_guarded, tmp_path, why):
        assert len(told) == 1
        assert words in told[0]


# --- what guarded steps leave as it was -------------------------------------------------------------------------------


class Mean(nn.Module):
    """Keeps a mean of what it was given, and goes by it."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs - self.mean)
        self.mean.lerp_(inputs.detach().mean(0), 0.5)
        return outputs


def keep_buffers(rank: int, folder: Path, options: dict[str, Any]) -> list[str]:
    """Buffers are given to all as often as DDP does, in the steps after guarded ones too."""
    results, told = [], []
    for guard in ("auto", "never"):
        torch.manual_seed(0)
        model = DistributedDataParallel(Mean())
        batch = 4 * 2 * dist.get_world_size()
        with seen_by() as seen:
            results.append(trained(rank, folder, guard, model, num_steps=6, global_batch_size=batch, **options))
        told += [line for line in seen.log if "cannot be taken again" in line]
    assert results[0] == results[1]
    return told


@pytest.mark.parametrize("options", [{}, {"sync_every_micro_step": True}, {"rollback": "full"}], ids=str)
def test_buffers_are_given_to_all_as_often_as_ever(ranks: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    for told in ranks.run(2, keep_buffers, tmp_path, options):
        assert len(told) == ("sync_every_micro_step" in options)


class Own(nn.Module):
    """Parameters that DDP is told to leave alone, by the names that it goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.other = nn.Parameter(torch.zeros(5, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) * self.scale + self.other  # type: ignore[no-any-return]


def ignore_some(rank: int, folder: Path) -> list[float]:
    results = []
    for guard in ("always", "never"):
        torch.manual_seed(0)
        own: Any = Own()
        names = [".scale", "other", "inner.2.bias"]  # of a root's own DDP knows the first form alone
        wrapper: Any = DistributedDataParallel
        wrapper._set_params_and_buffers_to_ignore_for_model(own, names)
        results.append(trained(rank, folder, guard, DistributedDataParallel(own), num_steps=3))
    assert results[0] == results[1]
    return [float(part.sum().item()) for part in (own.scale, own.other, own.inner[2].bias)]


def test_what_ddp_ignores_is_left_to_each_rank(ranks: RankPool, tmp_path: Path) -> None:
    (scale, other, bias), another = ranks.run(2, ignore_some, tmp_path)
    assert other == another[1]
    assert (scale, bias) != (another[0], another[2])


def catch_within(rank: int, folder: Path, guard: str) -> Any:
    """A pass that fails is caught within the function, and another one made."""
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model(), find_unused_parameters=True)
    loader = Slices(make_data(96), 4, is_endless=True)
    trainer = trainer_of(folder, model, loader, rank=rank, guard=guard)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))

    def fail(gradient: torch.Tensor) -> None:
        raise PlantedFault("of the user's")

    def loop(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        outputs = model(inputs)
        kept = outputs * 1.0
        kept.register_hook(lambda gradient: gradient * 0)
        hidden = outputs.clone()
        hidden.register_hook(fail)
        with pytest.raises(PlantedFault):
            (hidden.sum() + outputs.sum()).backward()
        optimizer.inner.zero_grad()
        plain_loss = nn.functional.cross_entropy(model(inputs), targets)
        plain_loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.inner.zero_grad()

    with trainer:
        for batch in loader:
            trainer.run(loop, *batch)
            if trainer.global_step == 3:
                break
    return bits_of(model)


def test_a_pass_that_is_caught_does_not_keep_the_next_one_from_being_shared(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(2, catch_within, tmp_path, "always")
    assert one == other


def let_go(rank: int, folder: Path) -> None:
    """After the last guarded step nothing of them is held."""
    run = Short(rank, folder, batch_size=4)
    average = {"mean": torch.zeros(1000, dtype=torch.float64)}
    run.trainer.register_state("own", average)
    with run.trainer:
        run.train(3)
        steps = run.trainer._session.steps
        assert steps._guarding._averaging is None
        assert steps._kept._copies == []
        run.train(5)


def test_guarded_steps_leave_nothing_behind(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, let_go, tmp_path)


def reshard_while_guarded(rank: int, folder: Path) -> tuple[str, str]:
    """What guarded steps hold of parameters does not stand against another plan."""
    run = Short(rank, folder, batch_size=4, wrap=lambda model: model, guard="always", plan=WHOLE, has_moods=False)
    with run.trainer:
        run.train(2)
        proposal = run.trainer.reshard(FULL)
        run.train(5)
        back = run.trainer.reshard(WHOLE)
        run.train(8)
    return proposal.refusal, back.refusal


def test_a_model_is_spread_otherwise_between_guarded_steps(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, reshard_while_guarded, tmp_path) == [("", "")] * 2


def freeze_by_turns(rank: int, folder: Path, when: str) -> bool:
    """A part that is frozen as a step begins, and learns in it all the same: as in half of a GAN."""
    results = []
    for guard in ("auto", "never"):
        torch.manual_seed(0)
        inner: Any = make_model()
        if when == "before the trainer":
            inner[0].requires_grad_(False)
        model = DistributedDataParallel(inner)
        inner[0].requires_grad_(True)
        loader = Slices(make_data(96), 4, is_endless=True)
        (folder / guard).mkdir(exist_ok=True)
        trainer = trainer_of(folder / guard, model, loader, rank=rank, guard=guard)
        optimizer = trainer.prepare(SGD(inner.parameters() if when == "between" else inner[2].parameters(), lr=0.1))

        def loop(*batch: torch.Tensor, inner: Any = inner, given: Any = (trainer, model, optimizer)) -> None:
            inner[0].requires_grad_(True)
            plain(*given, *batch)
            if when == "between":
                inner[0].requires_grad_(False)

        with seen_by() as seen, trainer:
            for batch in loader:
                trainer.run(loop, *batch)
                if trainer.global_step == 5:
                    break
        results.append(bits_of(model))
        assert ("DDP was made with 2 parameters that had requires_grad, and 4 had it" in str(seen.log)) is (
            when == "before the trainer" and guard == "auto"
        )
    return results[0] == results[1]


@pytest.mark.parametrize("when", ["between", "before the trainer"])
def test_what_is_frozen_for_a_while_is_averaged_as_ddp_does(ranks: RankPool, tmp_path: Path, when: str) -> None:
    assert all(ranks.run(2, freeze_by_turns, tmp_path, when))


def without_memory_for_gradients(rank: int, folder: Path) -> list[str]:
    """Memory for gradients that only other ranks have is found out before they are shared."""
    torch.manual_seed(0)
    branches = Branches()
    branches.chosen = rank
    model = DistributedDataParallel(branches, find_unused_parameters=True)
    loader = Slices(make_data(96), 4, is_endless=True)
    trainer = trainer_of(folder, model, loader, rank=rank)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    real, fails = torch.zeros_like, [rank == 1]

    def zeros(*given: Any, **options: Any) -> torch.Tensor:
        if fails[0] and trainer.global_step == 1:
            fails[0] = False
            raise torch.OutOfMemoryError("planted")
        return real(*given, **options)

    with pytest.MonkeyPatch().context() as patched, seen_by() as seen, trainer:
        patched.setattr(torch, "zeros_like", zeros)
        for batch in loader:
            trainer.run(plain, trainer, model, optimizer, *batch)
            if trainer.global_step == 3:
                break
    assert not fails[0]
    assert trainer.config.dataloader.batch_size == 2
    return [line for line in seen.log if line.startswith("WARNING")]


def test_memory_for_shared_gradients_is_asked_for_before(ranks: RankPool, tmp_path: Path) -> None:
    told, _ = ranks.run(2, without_memory_for_gradients, tmp_path)
    assert told == [
        "WARNING memory ran out on rank 1 before gradients were shared after step 1: the step is taken again in "
        "micro-batches of 2 instead of 4 samples"
    ]


def large_tail(rank: int, folder: Path) -> list[tuple[int, ...]]:
    """An epoch's tail that takes more at once than any step before it is guarded too, once."""
    shortage = Shortage(limit=20) if rank == 0 else Shortage()
    loader = Slices(make_data(318), 31)
    run = Short(rank, folder, batch_size=31, global_batch_size=64, loader=loader, shortage=shortage, has_moods=False)
    with run.trainer:
        for epoch in range(2):
            with run.trainer.epoch(epoch):
                for batch in loader:
                    run.trainer.run(run.micro_step, *batch)
    assert shortage.num_times == (rank == 0)
    return loader.sizes


def test_a_tail_that_takes_more_at_once_is_guarded(ranks: RankPool, tmp_path: Path) -> None:
    for sizes in ranks.run(2, large_tail, tmp_path):
        assert sizes[:5] == [(16, 16)] * 4 + [(10, 10, 11)]
        assert max(map(max, sizes)) == 16


def plain_loop_after(rank: int, folder: Path) -> None:
    """DDP gives out buffers as ever once the trainer is gone, also in the middle of a step."""
    results = []
    for guard in ("auto", None):
        torch.manual_seed(0)
        model = DistributedDataParallel(Mean())
        loader = Slices(make_data(96), 4, is_endless=True)
        batches = iter(loader) if guard else None
        if guard:
            trainer = trainer_of(folder, model, loader, rank=rank, guard=guard, global_batch_size=16)
            optimizer = trainer.prepare(SGD(model.parameters(), lr=0.0))
            with trainer:
                assert batches is not None
                trainer.run(plain, trainer, model, optimizer, *next(batches))
        with torch.no_grad():
            model.module.mean.fill_(float(rank) + 1)
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        results.append(bits_of(model.module.mean))
    assert results[0] == results[1]


def test_ddp_is_left_as_it_was(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, plain_loop_after, tmp_path)


class Tied(nn.Module):
    """Two layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.out = (nn.Linear(6, size).double() for size in (6, 6, 5))
        self.other.weight = self.one.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.other(torch.tanh(self.one(inputs)))))  # type: ignore[no-any-return]


def tied(rank: int, folder: Path) -> None:
    results = []
    for guard in ("always", "never"):
        torch.manual_seed(0)
        results.append(trained(rank, folder, guard, DistributedDataParallel(Tied())))
    assert results[0] == results[1]


def test_tied_weights_are_guarded_as_others(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, tied, tmp_path)


def thaw(rank: int, folder: Path, guard: str, *, runs_out: bool) -> list[Any]:
    """A parameter is thawed between two steps, and DDP beneath the model is made anew for it."""
    shortage = Shortage(phase="forward done", at=(3, 1)) if rank == 1 and runs_out else Shortage()
    given: dict[str, Any] = {"wrap": frozen_at_first, "plan": WHOLE, "guard": guard, "has_moods": False}
    run = Short(rank, folder, batch_size=4, num_micro_steps=3, shortage=shortage, **given)
    with run.trainer:
        run.train(3)
        run.model.first.weight.requires_grad_(True)
        run.train(6)
        assert shortage.num_times == (rank == 1 and runs_out)
        assert run.trainer.config.dataloader.batch_size == (2 if runs_out else 4)
        return bits_of(run.model)


def frozen_at_first(model: Any) -> Any:
    model.first.weight.requires_grad_(False)
    return model


def thaw_both_ways(rank: int, folder: Path) -> None:
    (folder / "runs out").mkdir(exist_ok=True)
    guarded, unguarded = (thaw(rank, folder / guard, guard, runs_out=False) for guard in ("always", "never"))
    assert guarded == unguarded
    thaw(rank, folder / "runs out", "always", runs_out=True)


def test_guarded_steps_go_on_when_parameters_are_thawed(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, thaw_both_ways, tmp_path, deadline_seconds=60)


def thaw_alone(rank: int, folder: Path) -> None:
    run = Short(rank, folder, batch_size=4, wrap=frozen_at_first, plan=WHOLE, guard="always", has_moods=False)
    with run.trainer:
        run.train(2)
        run.model.first.weight.requires_grad_(rank == 1)
        run.train(4)


def test_a_parameter_that_one_rank_alone_thaws_is_an_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    for outcome in ranks.run_outcomes(2, thaw_alone, tmp_path):
        assert outcome.error is not None
        assert outcome.error.type_name == StepError.__name__
        assert "gradients of different parameters (3 on rank 0, 4 on rank 1)" in outcome.error.message


def other_options(rank: int, folder: Path, one: dict[str, Any], other: dict[str, Any]) -> str:
    with pytest.raises(ElasticError) as raised:
        Short(rank, folder, batch_size=4, **(other if rank else one))
    return str(raised.value)


@pytest.mark.parametrize(
    ("one", "other"), [({"guard": "never"}, {"guard": "always"}), ({}, {"sync_every_micro_step": True})], ids=str
)
def test_ranks_that_guard_otherwise_are_told_so_at_the_start(
    ranks: RankPool, tmp_path: Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    for told in ranks.run(2, other_options, tmp_path, one, other):
        assert next(iter(other)) in told
        assert "ranks start with different values" in told
