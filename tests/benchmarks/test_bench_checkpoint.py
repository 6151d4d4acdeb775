"""What the benchmark of checkpoints stands on: ways that save the same state, and load it on other ranks too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.checkpoint_load import Ranks, Seen, sides_of_loads, sides_of_saves, started
from benchmarks.checkpoint_ranks import Part, Task, draw_values, full_digest, make_training, parts_of, tensors_of
from benchmarks.checkpoint_ways import WAYS, WayName
from benchmarks.harness import Readings, Side, UnlikeWorkError, check_same_work

pytestmark = pytest.mark.slow  # what it measures with is tried where that is changed

SMALL = Task(num_blocks=1, width=16, num_words=11)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def ranks(storage: Path) -> Iterator[dict[int, Ranks]]:
    with ExitStack() as stack:
        yield {num: stack.enter_context(started(num, SMALL, storage)) for num in (1, 2)}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_way_loads_on_other_ranks_what_was_saved(ranks: dict[int, Ranks]) -> None:
    seen: dict[WayName, Seen] = {way: Seen() for way in WAYS}
    paths = {way: ranks[2].save(way)[0] for way in WAYS}
    sides = sides_of_loads(ranks[1], paths, seen, "time")
    for _ in range(2):
        _check_same_work(sides)
    assert [side.claim is not None for side in sides] == [way == "ours" for way in WAYS]
    for each in seen.values():
        assert len(each.cpu_seconds) == len(each.read_shares) == len(each.peak_bytes) == 2
        assert [len(of_ranks) for of_ranks in each.peak_bytes] == [1, 1]
    assert min(seen["dcp"].read_shares + seen["ours"].read_shares) >= 1, "less was read than was needed"


def test_every_way_saves_what_it_loads_and_nothing_is_left_of_it(ranks: dict[int, Ranks], storage: Path) -> None:
    before = set(_checkpoints_in(storage))
    sides = sides_of_saves(ranks[2], {way: Seen() for way in WAYS}, "time")
    _check_same_work(sides)
    assert set(_checkpoints_in(storage)) == before


def test_load_of_another_state_stops_the_benchmark(ranks: dict[int, Ranks], storage: Path) -> None:
    path, _ = ranks[1].save("full")
    state = torch.load(path, weights_only=True)
    state["optimizer"]["state"]["norm.bias"]["exp_avg"][3] += 1
    torch.save(state, path)
    with pytest.raises(UnlikeWorkError, match="full state, by rank 0 did not load"):
        ranks[1].load("full", path)


@pytest.mark.usefixtures("alone")
def test_state_that_is_made_is_of_the_kind_that_a_step_makes() -> None:
    made, made_optimizer = make_training(SMALL, init_device_mesh("cpu", (1,)))
    stepped, optimizer = make_training(SMALL, init_device_mesh("cpu", (1,)))
    optimizer.state.clear()
    for parameter in stepped.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    expected = {name: (type(one), one.dtype, one.shape) for name, one in tensors_of(stepped, optimizer)}
    assert {name: (type(one), one.dtype, one.shape) for name, one in tensors_of(made, made_optimizer)} == expected
    assert all((one == -1).all() for _, one in tensors_of(made, made_optimizer))
    draw_values(made, made_optimizer)
    digests = [full_digest([parts_of(dict(tensors_of(*each)))]) for each in ((made, made_optimizer),) * 2]
    assert digests[0] == digests[1]


def test_digest_of_the_full_state_is_the_same_however_its_rows_are_spread() -> None:
    table, line = torch.rand(7, 3), torch.rand(5)
    whole = _spread(table, line)
    for cut in ((0, 0), (4, 3), (7, 5)):
        apart = [_spread(table[: cut[0]], line[: cut[1]]), _spread(table[cut[0] :], line[cut[1] :])]
        assert full_digest(apart) == full_digest([whole])
    table[6, 2] += 1
    assert full_digest([_spread(table, line)]) != full_digest([whole])


def _spread(table: torch.Tensor, line: torch.Tensor) -> dict[str, Part]:
    parts = parts_of({"table": table, "line": line})
    return {name: Part(is_spread=True, digests=part.digests) for name, part in parts.items()}


def _check_same_work(sides: list[Side]) -> None:
    work: dict[str, object] = {}
    for side in sides:
        done = side.run()
        assert isinstance(done, Readings)
        assert done.values["time"] > 0
        work[side.name] = done.work
    check_same_work(work)


def _checkpoints_in(storage: Path) -> list[Path]:
    return [path for pattern in ("dcp_*", "full_*", "**/step_*") for path in storage.glob(pattern)]
