"""Calibrating: what a device of this machine does at best, in less than a tenth of a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from elastic_ext.records.metrics import NodeCalibration

__all__ = ["calibrate"]

_SIDE, _SIDE_ON_GPU = 512, 4096
_NUM_FLOATS, _NUM_FLOATS_ON_GPU = 1 << 22, 1 << 26
_NUM_SMALL = 200
_TRIES = 5


def calibrate(device: torch.device, *, host: str) -> NodeCalibration:
    """Measured now: the best of some tries, since whatever disturbs makes them slower."""
    is_cpu = device.type == "cpu"
    side, num_floats = (_SIDE, _NUM_FLOATS) if is_cpu else (_SIDE_ON_GPU, _NUM_FLOATS_ON_GPU)
    dtype = torch.float32 if is_cpu else torch.bfloat16
    with torch.no_grad():
        square = torch.ones(side, side, dtype=dtype, device=device)
        product = torch.empty_like(square)
        row = torch.ones(num_floats, device=device)
        copied, small = torch.empty_like(row), torch.ones(4, device=device)

        def have_small_ones() -> None:
            for _ in range(_NUM_SMALL):
                torch.add(small, 1)

        multiply = _least_seconds(lambda: torch.mm(square, square, out=product), device)
        copy = _least_seconds(lambda: torch.add(row, 1, out=copied), device)
        small_ones = _least_seconds(have_small_ones, device)
    return NodeCalibration(
        time=time.time(),
        host=host,
        device=_name(device),
        num_threads=torch.get_num_threads(),
        torch=torch.__version__,
        flops_per_second=2.0 * side**3 / multiply,
        bytes_per_second=2.0 * row.numel() * row.element_size() / copy,
        seconds_per_op=small_ones / _NUM_SMALL,
    )


def _least_seconds(act: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_TRIES):
        began = time.perf_counter()
        act()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return max(best, 1e-9)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
