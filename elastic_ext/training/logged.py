"""LoggedNumbers: the numbers that a script gives to ``trainer.log()``, averaged on this rank over steps that committed.

Readers average over ranks, as they do with other metrics: nothing is exchanged for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

import torch
from torch.distributed.tensor import DTensor

from elastic_ext.records.logged import why_no_name

__all__ = ["LoggedNumbers"]

_Sum = tuple[float | torch.Tensor, float]
"""A weighted sum of a number, and its weight. A sum of tensors stays on their device until it is read."""
_NOTHING: _Sum = 0.0, 0.0


class LoggedNumbers:
    """The numbers that a rank's script logs: ``add`` each, ``count`` or ``drop`` those of the step under way.

    They are read where training waits anyhow: as a profile window ends, and as metrics are written.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._counted: dict[str, _Sum] = {}  # since they were read last
        self._under_way: dict[str, _Sum] = {}  # the same, with the step under way: the sums that its end would make
        self._of_window: dict[str, tuple[float, float]] = {}  # read, and not told in a window so far
        self._of_metrics: dict[str, tuple[float, float]] = {}  # read, and not told in metrics so far
        self._newest: dict[str, float] = {}

    def add(self, values: Mapping[str, object], weight: float) -> None:
        """Add numbers to the step under way, each with ``weight``; ValueError for what is no number, or no name."""
        under_way = self._under_way
        for name, value in values.items():
            if name not in self._names:
                self._admit(name)
            total, weights = under_way.get(name) or self._counted.get(name, _NOTHING)
            under_way[name] = _plus(total, name, value, weight), weights + weight

    def count(self) -> None:
        """Count the numbers of the step under way, which has committed."""
        if self._under_way:
            self._counted.update(self._under_way)
            self._under_way.clear()

    def drop(self) -> None:
        """Forget the numbers of the step under way, which is taken back or left out."""
        self._under_way.clear()

    def take_window(self) -> dict[str, float]:
        """The mean of each number since the last call, for a profile window; none where none was logged."""
        self._read()
        return _means(self._of_window)

    def newest(self) -> dict[str, float]:
        """The mean of each number since the last call, for metrics; the mean before where none was logged since."""
        self._read()
        self._newest |= _means(self._of_metrics)
        return dict(self._newest)

    def _admit(self, name: str) -> None:
        why_not = why_no_name(name, self._names)
        if why_not is not None:
            raise ValueError(f"trainer.log(): {why_not}")
        self._names.add(name)

    def _read(self) -> None:
        """Read the sums from their device, which waits for it; between two steps alone, as one under way goes on."""
        if self._under_way:
            return
        counted, self._counted = self._counted, {}
        for name, (total, weight) in counted.items():
            value = float(total)
            for sums in (self._of_window, self._of_metrics):
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + value, before[1] + weight


def _means(sums: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The mean of each sum, which begins anew; none of a number that no sample was counted for."""
    found = {name: total / weight for name, (total, weight) in sums.items() if weight > 0}
    sums.clear()
    return found


def _plus(total: float | torch.Tensor, name: str, value: object, weight: float) -> float | torch.Tensor:
    """``total`` and ``value`` times ``weight``; where one of them is a tensor, on its device and without waiting."""
    if isinstance(value, torch.Tensor):
        return _plus_tensor(total, name, value.detach(), weight)
    if not isinstance(value, Real):
        raise ValueError(f"trainer.log(): {name} is {value!r:.80}; allowed: a number, or a tensor of one element")
    return total + float(value) * weight


def _plus_tensor(total: float | torch.Tensor, name: str, value: torch.Tensor, weight: float) -> torch.Tensor:
    if value.numel() != 1 or value.is_complex():
        kind = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
        raise ValueError(
            f"trainer.log(): {name} is {kind}; allowed: a real number, or a tensor of one element, such as "
            f"{name}.mean()"
        )
    if isinstance(value, DTensor):
        if not all(each.is_replicate() for each in value.placements):
            raise ValueError(
                f"trainer.log(): {name} is a DTensor that no rank has whole ({value.placements}); give "
                f"{name}.full_tensor(), on all ranks"
            )
        value = value.to_local()
    value = value.reshape(())
    if isinstance(total, torch.Tensor):
        return torch.add(total, value.to(total.device, non_blocking=True), alpha=weight)
    # In double precision, so that sums over many steps are exact enough; Apple's devices have none.
    return value.to(torch.float32 if value.device.type == "mps" else torch.float64) * weight + total
