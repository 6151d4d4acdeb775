"""How the processes of a benchmark become gloo ranks on this machine, one thread each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["joined"]

_SECONDS_TO_WAIT = 60.0


@contextmanager
def joined(*, rank: int, world_size: int, port: int) -> Iterator[None]:
    """This process as a rank of a group, whose store somebody else keeps at ``port``."""
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo",
        RES_OPTIONS="timeout:1",  # a store's client asks for a name, and waits for an answer that may not come
        RANK=str(rank),  # these are for accelerate, which takes the group that is there
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    timeout = timedelta(seconds=_SECONDS_TO_WAIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()
