"""LoggedNumbers: the numbers that a script gives to ``trainer.log()``, averaged on this rank over steps that committed.

Readers average over ranks, as they do with other metrics: nothing is exchanged for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from numbers import Real

import torch
from torch.distributed.tensor import DTensor

from elastic_ext.records.logged import why_no_name

__all__ = ["LoggedNumbers"]

_logger = logging.getLogger(__name__)

_Sum = tuple[float | torch.Tensor, float]
"""A weighted sum of a number, and its weight. A sum of tensors stays on their device until it is read."""
_NOTHING: _Sum = 0.0, 0.0


class LoggedNumbers:
    """The numbers that a rank's script logs: ``add`` each, ``count`` or ``drop`` those of the step under way.

    They are read as a profile window ends and as metrics are written: this waits once for each device that has sums.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._counted: dict[str, _Sum] = {}  # since they were read last
        self.under_way: dict[str, _Sum] = {}
        """Sums as the end of the step under way would make them, of the numbers that were logged in it."""
        self._of_window: dict[str, tuple[float, float]] = {}  # read, and not told in a window so far
        self._of_metrics: dict[str, tuple[float, float]] = {}  # read, and not told in metrics so far
        self._newest: dict[str, float] = {}
        self._has_warned = False

    def add(self, values: Mapping[str, object], weight: float) -> None:
        """Add numbers to the step under way, each with ``weight``; ValueError for what is no number, or no name.

        Where one of them is refused, none is added.
        """
        names = self._names if values.keys() <= self._names else self._admitted(values)
        under_way, sums = self.under_way, dict[str, _Sum]()
        for name, value in values.items():
            total, weights = under_way.get(name) or self._counted.get(name, _NOTHING)
            sums[name] = _plus(total, name, value, weight), weights + weight
        self._names = names
        under_way.update(sums)

    def count(self) -> None:
        """Count the numbers of the step under way, which has committed."""
        self._counted.update(self.under_way)
        self.under_way.clear()

    def drop(self) -> None:
        """Forget the numbers of the step under way, which is taken back, left out, or never ended."""
        self.under_way.clear()

    def take_window(self) -> dict[str, tuple[float, float]]:
        """The mean of each number since the last call, and the sum of its weights, for a profile window.

        None where none was logged.
        """
        self._read()
        return _taken(self._of_window)

    def newest(self) -> dict[str, float]:
        """The mean of each number since the last call, for metrics; the mean before where none was logged since."""
        self._read()
        self._newest |= {name: mean for name, (mean, _) in _taken(self._of_metrics).items()}
        return dict(self._newest)

    def _admitted(self, values: Iterable[str]) -> set[str]:
        """The known names and those in ``values``; ValueError for one under which nothing can be logged."""
        names = set(self._names)
        for name in values:
            if name not in names:
                why_not = why_no_name(name, names)
                if why_not is not None:
                    raise ValueError(f"trainer.log(): {why_not}")
                names.add(name)
        return names

    def _read(self) -> None:
        """Read the sums, which waits for their devices; between two steps alone, as one under way goes on."""
        if self.under_way or not self._counted:
            return
        counted, self._counted = self._counted, {}
        values: dict[str, float] = {}
        on_devices: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, (total, _) in counted.items():
            if isinstance(total, torch.Tensor):
                on_devices.setdefault(total.device, {})[name] = total
            else:
                values[name] = total
        for totals in on_devices.values():
            values |= self._copied(totals)
        for name in filter(values.__contains__, counted):  # in the order of their first log()
            for sums in (self._of_window, self._of_metrics):
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + values[name], before[1] + counted[name][1]

    def _copied(self, totals: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """The sums on one device, read in one copy; empty where the device is broken, of which this warns.

        That is not raised: whatever has broken it says so, and what ends then is still to be told of.
        """
        try:
            return dict(zip(totals, torch.stack(list(totals.values())).tolist(), strict=True))
        except RuntimeError as error:
            if not self._has_warned:
                self._has_warned = True
                _logger.warning(
                    "numbers of trainer.log() cannot be read from their device, and are left out: %s", error
                )
            return {}


def _taken(sums: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """The mean and the weight of each sum, which begins anew; none of a number that no sample was counted for."""
    found = {name: (total / weight, weight) for name, (total, weight) in sums.items() if weight > 0}
    sums.clear()
    return found


def _plus(total: float | torch.Tensor, name: str, value: object, weight: float) -> float | torch.Tensor:
    """``total`` and ``value`` times ``weight``; where ``value`` is a tensor, on its device.

    This waits for no device, unless the tensors of one name are on several.
    """
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
    # In double precision, so that sums over many steps are exact enough; Apple's devices have none.
    dtype = torch.float32 if value.device.type == "mps" else torch.float64
    if isinstance(total, torch.Tensor):
        return torch.add(total.to(value.device, dtype), value, alpha=weight)
    return value.to(dtype) * weight + total
