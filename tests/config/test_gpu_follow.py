"""Following a config where the default process group is NCCL's. One GPU is enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elastic_ext import follow_config
from elastic_ext.ranks.group import Ranks
from tests.support.loops import put, seen_by, step_until

pytestmark = pytest.mark.gpu


@pytest.fixture
def nccl(tmp_path: Path) -> None:
    """A default process group of NCCL's, of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))


def test_a_config_is_followed_beside_nccl(nccl: None, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    with seen_by() as seen, follow_config(run_dir=tmp_path / "0", job="test") as follower:
        put(tmp_path, 0, {"version": 1, "user": {"x": 1}})
        step_until(follower, seen, lambda: follower.config.version == 1)
    dist.destroy_process_group()


def test_control_traffic_beside_nccl_stays_on_the_cpu(nccl: None) -> None:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    world = Ranks.alone().world
    ranks = Ranks(world, group=group)
    before = torch.cuda.memory_allocated()
    assert ranks.gather(b"hello", "testing") == [b"hello"]
    assert ranks.broadcast(b"hello", 0, "testing") == b"hello"
    assert ranks.sum([1, -2], "testing") == [1, -2]
    assert torch.cuda.memory_allocated() == before
    ranks.close()
    dist.destroy_process_group()
