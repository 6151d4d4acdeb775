"""The numbers that a script gives to trainer.log(): what counts, how it is averaged, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import ElasticError, StepProfile
from elastic_ext.records.logged import MOST_NAMES, as_json, fitting, logged_in_words, mean_logged
from elastic_ext.records.metrics import RankMetrics
from elastic_ext.records.text import Progress
from elastic_ext.training.logged import LoggedNumbers
from tests.support.ranks import RankPool
from tests.support.training import Slices, make_data, make_model, shared, trainer_of

NAN, INF = math.nan, math.inf


# ---- added up ----


def test_a_number_is_the_mean_over_steps_that_committed_weighed_by_samples() -> None:
    numbers = LoggedNumbers()
    numbers.add({"loss": 1.0, "acc": torch.tensor([0.5])}, 1)
    numbers.add({"loss": torch.tensor(3.0, requires_grad=True)}, 3)
    numbers.count()
    numbers.add({"loss": 1000.0}, 4)
    numbers.drop()
    numbers.add({"loss": 5}, 4)
    numbers.count()
    assert numbers.take_window() == {"loss": ((1 + 9 + 20) / 8, 8), "acc": (0.5, 1)}
    assert numbers.take_window() == {}, "that of the next window begins anew"


def test_metrics_keep_the_last_mean_of_a_number_and_windows_do_not_take_it_from_them() -> None:
    numbers = LoggedNumbers()
    for loss in (1.0, 2.0):
        numbers.add({"loss": loss}, 1)
        numbers.count()
        assert numbers.take_window() == {"loss": (loss, 1)}
    numbers.add({"val_loss": 7.0}, 1)
    numbers.count()
    assert numbers.newest() == {"loss": 1.5, "val_loss": 7.0}
    numbers.add({"val_loss": NAN}, 1)
    numbers.count()
    found = numbers.newest()
    assert found["loss"] == 1.5 and math.isnan(found["val_loss"])


@given(st.lists(st.tuples(st.sampled_from(["add", "count", "drop", "window"]), st.integers(0, 9)), max_size=40))
def test_whenever_windows_end_each_number_that_counts_is_told_once(moves: list[tuple[str, int]]) -> None:
    numbers = LoggedNumbers()
    under_way, of_window, of_all = list[int](), list[int](), list[int]()
    for move, value in [*moves, ("count", 0), ("window", 0)]:
        if move == "add":
            numbers.add({"n": float(value)}, 1)
            under_way.append(value)
        elif move == "window":
            told = [] if under_way else of_window  # else with the window in which the step ends
            taken = numbers.take_window()
            assert taken.keys() == ({"n"} if told else set())
            assert taken.get("n") == (pytest.approx((fmean(told), len(told))) if told else None)
            of_window = of_window if under_way else []
        else:
            getattr(numbers, move)()
            counted = under_way if move == "count" else []
            of_window, of_all, under_way = of_window + counted, of_all + counted, []
    assert numbers.newest() == pytest.approx({"n": fmean(of_all)} if of_all else {})


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the names of operations on tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.has_non_blocking = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        self.has_non_blocking |= bool((kwargs or {}).get("non_blocking"))
        return func(*args, **(kwargs or {}))


def test_a_tensor_is_added_up_on_its_device_and_read_with_the_window_alone() -> None:
    numbers, loss = LoggedNumbers(), torch.tensor(2.0)
    numbers.add({"loss": loss}, 1)
    with Operations() as seen:
        for _ in range(3):
            numbers.add({"loss": loss, "acc": loss > 1}, 1)
            numbers.count()
    assert not [name for name in seen.names if "_local_scalar_dense" in name], "which waits for a device"
    with Operations() as seen:
        assert numbers.take_window() == {"loss": (2.0, 4), "acc": (1.0, 3)}
        assert numbers.newest() == {"loss": 2.0, "acc": 1.0}
    assert seen.names == ["aten.stack.default"], "all are read in one copy, for both"


def test_sums_go_to_the_device_of_the_newest_tensor_and_no_copy_is_left_under_way() -> None:
    numbers = LoggedNumbers()
    numbers.add({"loss": torch.tensor(2.0)}, 1)
    with Operations() as seen:
        numbers.add({"loss": torch.tensor(2.0, device="meta")}, 1)
    assert numbers.under_way["loss"][0].device.type == "meta"  # type: ignore[union-attr]
    assert "aten._to_copy.default" in seen.names and not seen.has_non_blocking


def test_sums_of_a_broken_device_are_left_out_with_one_warning_and_others_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    numbers = LoggedNumbers()
    for loss in (1.0, 2.0):
        numbers.add({"loss": torch.tensor(1.0, device="meta"), "acc": torch.tensor(loss), "lr": loss}, 1)
        numbers.count()
        assert numbers.take_window() == {"acc": (loss, 1), "lr": (loss, 1)}
    (message,) = caplog.messages
    assert message.startswith("numbers of trainer.log() cannot be read from their device, and are left out: ")


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_to_add_numbers_and_sums_follow_tensors_to_another_device() -> None:
    numbers, loss = LoggedNumbers(), torch.tensor(2.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            numbers.add({"loss": loss, "acc": loss > 1}, 1)
            numbers.count()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(100):
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        numbers.add({"loss": torch.tensor(2.0)}, 1)
        numbers.add({"loss": loss * 1}, 1)
    numbers.count()
    with Operations() as seen:
        assert numbers.take_window() == {"loss": (2.0, 1), "acc": (1.0, 1)}
    assert seen.names.count("aten.stack.default") == 1


def test_a_tensor_counts_as_it_was_when_it_was_logged() -> None:
    numbers, loss = LoggedNumbers(), torch.tensor(2.0)
    for _ in range(2):
        numbers.add({"loss": loss}, 1)
        loss.fill_(100.0)
        numbers.count()
        loss.fill_(4.0)
    assert numbers.take_window() == {"loss": (3.0, 2)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
def test_sums_are_as_exact_as_numbers_whatever_the_dtype(dtype: torch.dtype) -> None:
    numbers = LoggedNumbers()
    for _ in range(3000):
        numbers.add({"n": torch.ones((), dtype=dtype)}, 1)
    numbers.count()
    assert numbers.take_window() == {"n": (1.0, 3000)}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": torch.ones(3)}, r"loss is a tensor of shape \(3,\) and torch.float32; .* such as loss.mean\(\)"),
        ({"loss": torch.ones(0)}, r"loss is a tensor of shape \(0,\)"),
        ({"loss": torch.tensor(1j)}, "torch.complex64; allowed: a real number"),
        ({"loss": "2.5"}, "loss is '2.5'; allowed: a number, or a tensor of one element"),
        ({"loss": None}, "loss is None"),
        ({"loss": [1.0]}, r"loss is \[1.0\]"),
        ({"my loss": 1.0}, "named 'my loss'; allowed: at most 48 letters"),
        ({"": 1.0}, "named ''"),
        ({"n" * 49: 1.0}, "allowed: at most 48 letters"),
        ({"2nd": 1.0}, "of which a letter or _ comes first"),
        ({"samples_per_second": 1.0}, "'samples_per_second', as a metric of this library is; give it another name"),
        ({f"n{n}": 1.0 for n in range(MOST_NAMES + 1)}, f"number {MOST_NAMES + 1} of the names; at most {MOST_NAMES}"),
    ],
)
def test_what_is_no_number_or_no_name_is_refused_with_what_to_give(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoggedNumbers().add(values, 1)


def test_of_a_call_that_is_refused_nothing_is_added_and_no_name_taken() -> None:
    numbers = LoggedNumbers()
    for refused in ({"loss": 1.0, "note": "x"}, {"loss": 1.0, "a b": 1.0}):
        with pytest.raises(ValueError, match=r"'x'; allowed|named 'a b'"):
            numbers.add(refused, 1)
        numbers.count()
        assert numbers.take_window() == {}
    numbers.add({f"n{n}": 1.0 for n in range(MOST_NAMES)}, 1)


def test_numbers_of_other_processes_are_taken_as_far_as_they_can_be() -> None:
    said: dict[str, Any] = {"loss": 2.0, "train/acc": NAN, "a b": 1.0, "text": "x", "flag": True, "big": 10**400}
    assert fitting(said).keys() == {"loss", "train/acc"}
    assert len(fitting({f"n{n}": 1.0 for n in range(1000)})) == MOST_NAMES
    assert mean_logged([({"loss": 1.0, "lr": 0.1}, 1.0), ({"loss": 4.0}, 2.0)]) == {"loss": 3.0, "lr": 0.1}
    assert logged_in_words({"loss": 2.31456, "lr": 3e-5}) == "loss 2.315, lr 3e-05"
    assert as_json({"a": 1.5, "b": NAN, "c": INF, "d": -INF}) == {
        "a": 1.5,
        "b": "NaN",
        "c": "Infinity",
        "d": "-Infinity",
    }


def test_numbers_stand_beside_a_bar_of_progress(capsys: pytest.CaptureFixture[str]) -> None:
    for is_shown in (True, False):
        progress = Progress(is_shown=is_shown)
        progress.begin("epoch 3", 2)
        progress.note("loss 2.31")
        progress.end()
        assert ("loss 2.31" in capsys.readouterr().err) is is_shown


# ---- in a training ----


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.profiles: list[StepProfile] = []

    def write(self, profile: StepProfile) -> None:
        self.profiles.append(profile)

    def close(self) -> None: ...


class Training:
    """A small training that logs the mean index of each micro-batch's samples."""

    def __init__(self, folder: Path, *, num_samples: int = 21, batch: int = 7, rank: int = 0, **given: Any) -> None:
        self.folder, self.model, self.sink = folder / str(rank), make_model(), Kept()
        inputs, targets = make_data(num_samples)
        inputs[:, 0] = torch.arange(num_samples)
        self.source = Slices((inputs, targets), 4)
        model = shared(self.model, 2) if given.pop("is_shared", False) else self.model
        self.trainer = trainer_of(folder, model, self.source, rank=rank, global_batch_size=batch, **given)
        self.trainer.add_sink(self.sink)
        self.optimizer = self.trainer.prepare(SGD(model.parameters(), lr=1e-6))

    def take(self, batch: Any, within: Callable[[], object] = lambda: None) -> None:
        inputs, targets = batch
        with self.trainer.step():
            self.trainer.log(index=inputs[:, 0].mean(), one=1)
            loss = nn.functional.cross_entropy(self.trainer._model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            within()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def written(self) -> dict[str, float]:
        """The numbers in the metrics that the rank has written last."""
        text = (self.folder / "metrics-0.json").read_text()
        return dict(RankMetrics.from_json(text).measures.logged)


def test_micro_steps_of_other_sizes_weigh_by_their_samples(tmp_path: Path) -> None:
    run = Training(tmp_path)
    with run.trainer, run.trainer.epoch(0):
        for batch in run.source:
            run.take(batch)
    assert set(run.source.sizes) == {(3, 4)}
    assert run.written() == {"index": 10.0, "one": 1.0}
    (profile,) = run.sink.profiles
    assert profile.logged == run.written()


def test_a_step_that_is_taken_back_does_not_count(tmp_path: Path) -> None:
    run, fails = Training(tmp_path), iter([False, True])

    def fail() -> None:
        if next(fails, False):
            run.trainer.log(index=-1e9)
            raise RuntimeError("planted")

    with run.trainer, run.trainer.epoch(0):
        while run.trainer.global_step < 3:
            try:
                for batch in run.source:
                    run.take(batch, fail)
            except RuntimeError:
                run.trainer.log(again=1.0)
    assert run.trainer.global_step == 3
    assert run.written() == {"index": 10.0, "one": 1.0, "again": 1.0}


def test_a_step_that_is_left_out_does_not_count(tmp_path: Path) -> None:
    run = Training(tmp_path, when_not_finite="skip")
    with run.trainer, run.trainer.epoch(0):
        for number, batch in enumerate(run.source):
            if number in (0, 1):
                batch = batch[0] * torch.tensor([1.0, INF, 1.0, 1.0, 1.0, 1.0]), batch[1]
            run.take(batch)
    assert run.trainer.global_step == 2
    assert run.written()["index"] == (10.0 + 17.0) / 2


def test_an_epochs_smaller_last_batch_weighs_by_its_samples_without_a_global_batch_too(tmp_path: Path) -> None:
    model, loader = make_model(), DataLoader(TensorDataset(torch.arange(10.0), *make_data(10)), batch_size=4)
    trainer = trainer_of(tmp_path, model, loader)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    with trainer:
        for epoch in range(2):
            with trainer.epoch(epoch):
                for indices, inputs, targets in loader:
                    with trainer.step():
                        trainer.log(index=indices.mean())
                        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
    text = (tmp_path / "0" / "metrics-0.json").read_text()
    assert RankMetrics.from_json(text).measures.logged == {"index": 4.5}
    assert trainer._training.counts.num_samples == 20


def test_micro_steps_that_are_gathered_by_hand_all_count(tmp_path: Path) -> None:
    model, loader = make_model(), DataLoader(TensorDataset(torch.arange(24.0), *make_data(24)), batch_size=4)
    trainer = trainer_of(tmp_path, model, loader)
    optimizer = trainer.prepare(SGD(model.parameters(), lr=0.1))
    with trainer, trainer.epoch(0):
        for number, (indices, inputs, targets) in enumerate(loader):
            with trainer.step(fix_total_batch_size=False):
                trainer.log(index=indices.mean())
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                if number % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
    assert trainer.global_step == 2
    text = (tmp_path / "0" / "metrics-0.json").read_text()
    assert RankMetrics.from_json(text).measures.logged == {"index": 11.5}


def test_between_two_steps_a_number_counts_at_once_and_within_a_step_with_it(tmp_path: Path) -> None:
    run = Training(tmp_path)
    with run.trainer, run.trainer.epoch(0):
        run.trainer.log(before=1.0)
        for batch in run.source:
            run.take(batch)
            run.trainer.log(after=batch[0][:, 0].mean())  # of a step's first micro-step too, and weighed alike
    assert run.written() == {"before": 1.0, "index": 10.0, "one": 1.0, "after": 10.0}


def test_what_is_logged_after_the_last_step_comes_to_metrics_and_sinks(tmp_path: Path) -> None:
    run = Training(tmp_path)
    with run.trainer:
        with run.trainer.epoch(0):
            for batch in run.source:
                run.take(batch)
        run.trainer.log(val_loss=NAN)
    assert math.isnan(run.written()["val_loss"])
    assert math.isnan(run.sink.profiles[-1].logged["val_loss"]) and run.sink.profiles[-1].step == 3


def take_some(run: Training, num_batches: int, *, error: Exception | None = None, **logged: object) -> None:
    """Train on a few batches, with numbers logged after each, and leave the loop, by an error if there is one."""
    with run.trainer:
        for _, batch in zip(range(num_batches), run.source, strict=False):
            run.take(batch)
            run.trainer.log(**logged)
        if error is not None:
            raise error


def test_what_has_committed_is_told_where_training_ends_between_two_micro_steps(tmp_path: Path) -> None:
    for error in (None, RuntimeError("planted")):
        run = Training(tmp_path)
        with nullcontext() if error is None else pytest.raises(RuntimeError, match="planted"):
            take_some(run, 3, error=error)
        assert run.trainer.global_step == 1
        assert run.sink.profiles[-1].logged == {"index": 3.0, "one": 1.0}


def test_a_broken_device_hides_no_error_of_the_loop(tmp_path: Path) -> None:
    run = Training(tmp_path)
    with pytest.raises(RuntimeError, match="planted"):
        take_some(run, 2, error=RuntimeError("planted"), broken=torch.ones((), device="meta"))
    assert run.sink.profiles[-1].logged == {"index": 3.0, "one": 1.0}


def test_with_the_profiler_off_metrics_have_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_EXT_PROFILE", "off")
    run = Training(tmp_path)
    with run.trainer, run.trainer.epoch(0):
        for batch in run.source:
            run.take(batch)
    assert run.written() == {"index": 10.0, "one": 1.0}


def test_before_prepare_and_after_the_end_it_is_said_when_to_log(tmp_path: Path) -> None:
    model = make_model()
    trainer = trainer_of(tmp_path, model, micro_batch_size=4)
    with pytest.raises(ElasticError, match=r"prepare\(\) was not called"):
        trainer.log(loss=1.0)
    trainer.prepare(SGD(model.parameters(), lr=0.1))
    trainer.close()
    with pytest.raises(ElasticError, match=r"training has ended, and trainer.log\(\) was called; call it before"):
        trainer.log(loss=1.0)


def logged_by(rank: int, folder: Path) -> dict[str, float]:
    """What a rank writes that logs the indices of its samples, and its number."""
    run = Training(folder, num_samples=24, batch=8, rank=rank, is_shared=True)
    with run.trainer, run.trainer.epoch(0):
        for batch in run.source:
            run.take(batch)
            run.trainer.log(rank=rank)
            if rank == 1:
                run.trainer.log(own=5.0)
    (file,) = run.folder.glob("metrics-*.json")
    return dict(RankMetrics.from_json(file.read_text()).measures.logged)


def test_each_rank_writes_its_own_mean_and_readers_average_over_ranks(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, logged_by, tmp_path)
    assert (first["rank"], second["rank"]) == (0.0, 1.0) and "own" not in first
    together = mean_logged([(first, 1.0), (second, 1.0)])
    assert together == {"index": 11.5, "one": 1.0, "rank": 0.5, "own": 5.0}
