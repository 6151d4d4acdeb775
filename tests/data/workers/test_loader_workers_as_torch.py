"""The public behaviour of torch's DataLoader as its documentation states it, a test per sentence: what its workers do.

Each runs on torch's own loader too, which proves the test. Where ours is another, a test of ours alone says so and why.
"""

from __future__ import annotations

import contextvars
import gc
import itertools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import random
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from pickle import PicklingError
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from elastic_ext.data.loader import ElasticDataLoader
from tests.support import pools
from tests.support.loading import Numbers, OpenGate, SizedSamples, changed, indices_in, loader_of, settled
from tests.support.pools import Raise, WaitAt, gate, however_late, kill_for_good, open_gate, opened

pytestmark = pytest.mark.usefixtures("started_once", "no_process_left")


def as_they_are(samples: Any) -> Any:
    return samples


def os_pid(_: Any) -> list[int]:
    return [os.getpid()]


def meeting(folder: Path, size: int = 2) -> SizedSamples:
    """A dataset whose first sample is made once another worker makes the second."""
    meet = gate(folder / "meet")
    return SizedSamples({0: WaitAt(meet), 1: OpenGate(meet)}, size)


def ended(batches: Any) -> None:
    """Have the workers of a loop end that an exception refers to: torch's as garbage would be waited for."""
    getattr(batches, "_shutdown_workers", gc.collect)()


def seeds_and_numbers(_: Any) -> tuple[Any, ...]:
    """A collate_fn that tells of its worker's random states."""
    info = get_worker_info()
    assert info is not None
    drawn = random.random(), torch.rand(()).item(), float(np.random.rand())
    return info.id, info.seed, torch.initial_seed(), drawn


def base_seed_of(generator: torch.Generator | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


# --- which processes there are --------------------------------------------------------------------------------------


def test_batches_are_made_by_as_many_worker_processes_as_are_asked_for(loader_class: Any) -> None:
    batches = list(loader_class(Numbers(40), batch_size=1, num_workers=2))
    assert indices_in(batches) == list(range(40))
    makers = {int(pid) for _, pids in batches for pid in pids}
    assert len(makers) <= 2 and not makers & {0, os.getpid()}


def test_each_of_the_workers_makes_batches(loader_class: Any, tmp_path: Path) -> None:
    dataset = meeting(tmp_path)
    (one,), (other,) = loader_class(dataset, batch_size=1, num_workers=2, collate_fn=os_pid)
    assert one != other


def test_samples_are_fetched_and_collated_in_the_worker(loader_class: Any) -> None:
    def collate(samples: list[tuple[int, int]]) -> list[int]:
        return [*(pid for _, pid in samples), os.getpid()]

    for batch in loader_class(Numbers(4), batch_size=2, num_workers=1, collate_fn=collate):
        assert len(set(batch)) == 1 and batch[0] not in (0, os.getpid())


def test_the_sampler_is_asked_in_this_process(loader_class: Any) -> None:
    asked: list[int] = []

    class Sampler:
        def __iter__(self) -> Iterator[int]:
            asked.append(os.getpid())
            return iter([3, 1])

        def __len__(self) -> int:
            return 2

    batches = list(loader_class(Numbers(4), batch_size=1, num_workers=1, sampler=Sampler()))
    assert indices_in(batches) == [3, 1] and asked == [os.getpid()]


def test_workers_are_made_for_each_loop_and_end_with_it(loader_class: Any) -> None:
    loader = loader_class(Numbers(8), batch_size=1, num_workers=1)
    before = settled().processes
    pids = []
    for _ in range(2):
        pids.append({int(pid) for _, made in loader for pid in made})
        assert settled().processes == before
    assert not pids[0] & pids[1]


def test_workers_end_when_a_loop_that_is_left_is_collected(loader_class: Any) -> None:
    before = settled().processes
    batches = iter(loader_class(Numbers(1000), batch_size=1, num_workers=2))
    next(batches)
    assert settled().processes > before
    del batches
    assert settled().processes == before


def test_persistent_workers_stay_and_keep_their_datasets(loader_class: Any) -> None:
    loader = loader_class(Calls(), num_workers=1, persistent_workers=True, collate_fn=as_they_are)
    first, second = list(loader), list(loader)
    assert {pid for ((_, pid),) in first} == {pid for ((_, pid),) in second}
    assert [calls for ((calls, _),) in first + second] == [1, 2, 3, 4, 5, 6]


def test_otherwise_each_loop_has_datasets_as_they_are_now(loader_class: Any) -> None:
    dataset = Calls()
    loader = loader_class(dataset, num_workers=1, collate_fn=as_they_are)
    assert [calls for ((calls, _),) in loader] == [1, 2, 3]
    dataset.num_calls = 10
    assert [calls for ((calls, _),) in loader] == [11, 12, 13]
    assert dataset.num_calls == 10


class Calls:
    """Samples that tell how often this copy of the dataset was asked for one, and in which process."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.num_calls += 1
        return self.num_calls, os.getpid()


def test_everything_the_default_collate_makes_comes_through_from_workers(loader_class: Any) -> None:
    samples = [{"tensor": torch.ones(2) * n, "array": np.ones(2) * n, "text": str(n), "pair": (n, 2.5)} for n in (1, 2)]
    (batch,) = loader_class(samples, batch_size=2, num_workers=1)
    assert torch.equal(batch["tensor"], torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    assert torch.equal(batch["array"], torch.tensor([[1.0, 1.0], [2.0, 2.0]], dtype=torch.float64))
    assert batch["text"] == ["1", "2"]
    assert torch.equal(batch["pair"][0], torch.tensor([1, 2])) and batch["pair"][1].dtype == torch.float64


def test_without_batches_workers_are_given_single_samples(loader_class: Any) -> None:
    loader = loader_class(SizedSamples({}, 3), batch_size=None, num_workers=1, collate_fn=str)
    assert list(loader) == ["0", "1", "2"]
    rows = loader_class(torch.arange(6), batch_size=None, sampler=[[0, 1], [4, 5]], num_workers=1)
    assert [row.tolist() for row in rows] == [[0, 1], [4, 5]]


# --- how they are started -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_other_start_methods_are_sent_what_they_need(loader_class: Any, method: str) -> None:
    for context in (method, torch.multiprocessing.get_context(method)):
        loader = loader_class(Numbers(4), batch_size=2, num_workers=1, multiprocessing_context=context)
        assert loader.multiprocessing_context.get_start_method() == method
        assert indices_in(loader) == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:Got pickle error when attempting to start a worker")
def test_what_cannot_be_pickled_is_refused_by_other_start_methods(loader_class: Any) -> None:
    loader = loader_class(
        Numbers(4), num_workers=1, multiprocessing_context="forkserver", worker_init_fn=lambda worker_id: None
    )
    with pytest.raises((AttributeError, TypeError, PicklingError), match="pickle"):
        next(iter(loader))


@pytest.mark.parametrize("method", ["fork", None], ids=["fork", "the system's"])
def test_forked_workers_have_what_cannot_be_pickled(loader_class: Any, method: str | None) -> None:
    if (method or multiprocessing.get_start_method()) != "fork":
        pytest.skip("here the system does not fork")
    lock = threading.Lock()
    loader = loader_class(
        Numbers(2),
        num_workers=1,
        multiprocessing_context=method,
        worker_init_fn=lambda worker_id: lock.acquire(),
        collate_fn=lambda samples: lock.locked(),
    )
    assert list(loader) == [True, True]
    assert not lock.locked()


# --- what they know of themselves -----------------------------------------------------------------------------------


def test_forked_workers_have_what_belongs_to_the_thread_that_loops(loader_class: Any) -> None:
    """As a dataset needs it that runs a model, in a loop that validates."""
    number, local = contextvars.ContextVar("number", default=0), threading.local()

    def seen(_: Any) -> list[Any]:
        of_torch = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        return [*of_torch, number.get(), getattr(local, "value", None)]

    local.value = "of this thread"
    token = number.set(7)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        batches = list(loader_class(Numbers(4), batch_size=2, num_workers=2, collate_fn=seen))
    number.reset(token)
    assert batches == [[False, True, 7, "of this thread"]] * 2


def test_worker_info_tells_a_worker_who_it_is_and_this_process_nothing(loader_class: Any, tmp_path: Path) -> None:
    def tell(samples: Any) -> Any:
        info = get_worker_info()
        assert info is not None
        dataset: Any = info.dataset
        return info.id, info.num_workers, info.seed == torch.initial_seed(), type(dataset), dataset.size

    told = set(loader_class(meeting(tmp_path, 5), num_workers=2, collate_fn=tell))
    assert told == {(0, 2, True, SizedSamples, 5), (1, 2, True, SizedSamples, 5)}
    assert get_worker_info() is None


def test_the_dataset_of_worker_info_is_the_one_that_samples_come_from(loader_class: Any) -> None:
    def double(worker_id: int) -> None:
        info: Any = get_worker_info()
        info.dataset.factor = 2

    class Multiplied(Numbers):
        factor = 1

        def __getitem__(self, index: int) -> Any:
            return index * self.factor

    dataset = Multiplied(3)
    loader = loader_class(dataset, batch_size=None, num_workers=1, worker_init_fn=double)
    assert list(loader) == [0, 2, 4] and dataset.factor == 1


def test_worker_init_fn_is_called_once_in_each_worker_with_its_id_before_any_sample(
    loader_class: Any, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"

    def note(word: str) -> None:
        with notes.open("a") as file:
            file.write(f"{os.getpid()} {word}\n")

    class Noted(Numbers):
        def __getitem__(self, index: int) -> Any:
            note("sample")
            return index

    list(loader_class(Noted(8), num_workers=2, worker_init_fn=lambda worker_id: note(str(worker_id))))
    by_pid: dict[str, list[str]] = {}
    for line in notes.read_text().splitlines():
        by_pid.setdefault(line.split()[0], []).append(line.split()[1])
    assert sorted(words[0] for words in by_pid.values()) == ["0", "1"]
    assert sum(len(words) for words in by_pid.values()) == 2 + 8
    assert all(word == "sample" for words in by_pid.values() for word in words[1:])


def test_an_exception_of_worker_init_fn_arrives_with_the_first_batch(loader_class: Any) -> None:
    def fail(worker_id: int) -> None:
        raise LookupError("no such disk")

    batches = iter(loader_class(Numbers(8), num_workers=1, worker_init_fn=fail))
    with pytest.raises(LookupError, match="no such disk"):
        next(batches)
    ended(batches)


# --- random numbers -------------------------------------------------------------------------------------------------


def test_each_worker_is_seeded_with_the_generators_base_seed_and_its_id(loader_class: Any, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    dataset = meeting(tmp_path)
    told = list(loader_class(dataset, num_workers=2, collate_fn=seeds_and_numbers, generator=generator))
    base_seed = base_seed_of(torch.Generator().manual_seed(3))
    assert {(worker_id, seed, initial) for worker_id, seed, initial, _ in told} == {
        (worker_id, base_seed + worker_id, base_seed + worker_id) for worker_id in (0, 1)
    }


def test_without_a_generator_the_base_seed_is_a_random_number_of_this_process(loader_class: Any) -> None:
    torch.manual_seed(5)
    ((_, seed, _, _),) = loader_class(Numbers(1), num_workers=1, collate_fn=seeds_and_numbers)
    torch.manual_seed(5)
    assert seed == base_seed_of(None)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_loop_uses_up_one_random_number_of_this_process_whether_it_has_workers_or_not(
    loader_class: Any, num_workers: int
) -> None:
    torch.manual_seed(5)
    loader = loader_class(Numbers(1), num_workers=num_workers)
    list(loader), list(loader)
    after = torch.rand(1)
    torch.manual_seed(5)
    base_seed_of(None), base_seed_of(None)
    assert torch.equal(after, torch.rand(1))


def test_with_a_generator_no_random_number_of_this_process_is_used_up(loader_class: Any) -> None:
    torch.manual_seed(5)
    list(loader_class(Numbers(3), num_workers=1, shuffle=True, generator=torch.Generator()))
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))


def test_workers_draw_other_numbers_than_each_other_and_in_another_loop(loader_class: Any, tmp_path: Path) -> None:
    loader = loader_class(meeting(tmp_path, 4), num_workers=2, collate_fn=seeds_and_numbers)
    drawn = [numbers for _ in range(2) for _, _, _, numbers in loader]
    for library in zip(*drawn, strict=True):
        assert len(set(library)) == len(drawn)


def test_a_seed_makes_the_workers_numbers_come_again(loader_class: Any) -> None:
    def drawn() -> list[Any]:
        torch.manual_seed(7)
        return list(loader_class(Numbers(4), num_workers=1, collate_fn=seeds_and_numbers))

    assert drawn() == drawn()


def test_worker_init_fn_is_called_after_seeding_and_may_seed_otherwise(loader_class: Any) -> None:
    seen = multiprocessing.get_context("fork").SimpleQueue()

    def seed_anew(worker_id: int) -> None:
        info: Any = get_worker_info()
        seen.put((info.seed, torch.initial_seed()))
        random.seed(11)
        np.random.seed(11)
        torch.manual_seed(11)

    ((_, _, initial, numbers),) = loader_class(
        Numbers(1), num_workers=1, worker_init_fn=seed_anew, collate_fn=seeds_and_numbers
    )
    before = seen.get()
    seen.close()
    assert before[0] == before[1] != initial == 11
    torch.manual_seed(11)
    assert numbers == (
        random.Random(11).random(),
        torch.rand(()).item(),
        float(np.random.RandomState(11).rand()),
    )


# --- how far ahead --------------------------------------------------------------------------------------------------


def test_so_many_batches_per_worker_are_loaded_in_advance(loader_class: Any, tmp_path: Path) -> None:
    told = Told()
    dataset = meeting(tmp_path, 40)
    batches = iter(loader_class(dataset, num_workers=2, prefetch_factor=3, collate_fn=told.tell))
    next(batches), next(batches)  # both workers are there
    told.wait_for(2 + 2 * 3)
    assert told.is_silent()
    next(batches)
    told.wait_for(1)
    assert told.is_silent()
    told.close()


class Told:
    """Hears of each batch that is begun in any process."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def tell(self, samples: Any) -> int:
        os.write(self._write, b".")
        return len(samples)

    def wait_for(self, number: int) -> None:
        for _ in range(number):
            assert os.read(self._read, 1) == b"."

    def is_silent(self) -> bool:
        """Nothing was told that nobody has heard yet."""
        return not select.select([self._read], [], [], 0)[0]

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def test_batches_come_in_the_samplers_order_whoever_is_quicker(loader_class: Any, tmp_path: Path) -> None:
    loader = loader_class(meeting(tmp_path, 6), batch_size=None, num_workers=2)
    assert list(loader) == [0, 1, 2, 3, 4, 5]


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_batch_that_does_not_come_within_the_timeout_is_an_error(loader_class: Any, tmp_path: Path) -> None:
    never = gate(tmp_path / "never")
    batches = iter(loader_class(SizedSamples({2: WaitAt(never)}, 4), num_workers=1, timeout=0.3))
    for _ in range(2):
        however_late(lambda: next(batches))
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.3 seconds"):
        next(batches)
    open_gate(never)


@pytest.mark.parametrize(
    "raised",
    [
        Raise(ValueError, ("bad",)),
        Raise(KeyError, ("bad",)),
        Raise(IndexError, ("bad",)),
        Raise(pools.TwoArguments, ("bad", "worse")),
    ],
    ids=["ValueError", "KeyError", "IndexError", "two arguments"],
)
def test_an_exception_in_a_worker_arrives_with_its_type_and_the_workers_traceback(
    loader_class: Any, raised: Raise
) -> None:
    batches = iter(loader_class(SizedSamples({3: raised}, 6), batch_size=2, num_workers=1))
    assert next(batches).tolist() == [0, 1]
    kind = RuntimeError if raised.make is pools.TwoArguments else raised.make
    with pytest.raises(Exception, match="bad") as caught:
        next(batches)
    told = str(caught.value)
    assert type(caught.value) is kind
    assert "Original Traceback (most recent call last)" in told and "in __getitem__" in told
    assert "in DataLoader worker process 0" in told
    assert [batch.tolist() for batch in batches] == [[4, 5]]


def test_an_exception_of_collate_fn_arrives_too(loader_class: Any) -> None:
    def fail(samples: Any) -> None:
        raise ZeroDivisionError("in collate")

    batches = iter(loader_class(Numbers(3), num_workers=1, collate_fn=fail))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="in collate"):
            next(batches)
    assert list(batches) == []


def test_in_order_false_hands_out_what_is_ready_first(loader_class: Any, tmp_path: Path) -> None:
    slow = gate(tmp_path / "slow")
    dataset: Any = SizedSamples({0: WaitAt(slow)}, 6)
    batches = iter(loader_class(dataset, batch_size=None, num_workers=2, in_order=False))
    assert [next(batches) for _ in range(4)] == [1, 3, 4, 5]
    with opened(slow):
        assert list(batches) == [0, 2]


def test_workers_that_die_are_a_runtime_error(loader_class: Any) -> None:
    batches = loader_class(SizedSamples({1: pools.die_by_sigkill}, 4), num_workers=1)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid"):
        list(batches)


# --- whose turn it is -----------------------------------------------------------------------------------------------


def who_made_them(_: Any) -> int:
    info = get_worker_info()
    assert info is not None
    return info.id


def test_batch_i_of_each_loop_is_made_by_worker_i_modulo_their_number(loader_class: Any) -> None:
    loader = loader_class(
        Numbers(7), num_workers=2, persistent_workers=True, prefetch_factor=3, collate_fn=who_made_them
    )
    for _ in range(3):
        assert list(loader) == [0, 1, 0, 1, 0, 1, 0]
    next(iter(loader))  # a loop that is left with batches on their way
    assert list(loader) == [0, 1, 0, 1, 0, 1, 0]


# --- where ours is another on purpose -------------------------------------------------------------------------------


def test_batch_i_is_made_by_worker_i_again_once_a_change_is_over() -> None:
    loader = loader_of(400, 1, num_workers=2, persistent_workers=True, collate_fn=who_made_them)
    for number, _ in enumerate(loader):
        if number == 5:
            changed(loader, num_workers=3)
        if number == 9:
            changed(loader, num_workers=2, batch_size=3)
    changed(loader, num_workers=2, batch_size=1)
    assert list(itertools.islice(loader, 50)) == [0, 1] * 25


def test_workers_that_are_started_later_are_no_two_seeded_alike() -> None:
    """torch's have base_seed + id; here an id is given again to a worker that is to draw other numbers."""
    before = settled().processes
    loader = loader_of(400, 1, num_workers=1, collate_fn=seeds_and_numbers)
    seeds: set[tuple[int, int]] = set()
    for number, (worker_id, seed, _, _) in enumerate(loader):
        seeds.add((worker_id, seed))
        if number == 50:
            for pid in settled().processes - before:
                kill_for_good(pid)  # or all samples may have been made before it is
    assert [worker_id for worker_id, _ in seeds] == [0, 0]
    assert len(seeds) == 2


def test_workers_that_come_later_use_up_no_random_number() -> None:
    """Those of dropout are drawn between the same batches; torch's workers are all there from the beginning."""
    loader = loader_of(20, 1)
    torch.manual_seed(5)
    for number, _ in enumerate(loader):
        if number == 3:
            changed(loader, num_workers=1)
    after = torch.rand(1)
    torch.manual_seed(5)
    base_seed_of(None)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_that_goes_on_uses_up_no_random_number_a_second_time(num_workers: int) -> None:
    """The random state of its checkpoint is one that lies after its beginning; torch's begins anew."""
    torch.manual_seed(5)
    loader = loader_of(20, 1, num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    state, random_state = loader.state_dict(), torch.get_rng_state()
    batches.close()  # type: ignore[attr-defined]
    resumed = loader_of(20, 1, num_workers=num_workers)
    resumed.load_state_dict(state)
    assert indices_in(resumed) == list(range(1, 20))
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_raises_stop_iteration_does_not_end_the_epoch_unseen(num_workers: int) -> None:
    """torch's loop ends there as if it were over; here samples would be lost that nobody misses."""
    dataset: Any = SizedSamples({3: Raise(StopIteration, ("bad",))}, 6)
    torchs: Any = iter(DataLoader(dataset, batch_size=2, num_workers=num_workers))
    assert [batch.tolist() for batch in torchs] == [[0, 1]]
    ended(torchs)
    batches = iter(ElasticDataLoader(dataset, batch_size=2, num_workers=num_workers))
    next(batches)
    with pytest.raises(RuntimeError, match="samples 2, 3 raised StopIteration"):
        next(batches)
    assert [batch.tolist() for batch in batches] == [[4, 5]]
