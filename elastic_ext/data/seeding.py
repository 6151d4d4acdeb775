"""Random numbers for a sample by seed, epoch and index; copies of a dataset's state that no later change reaches."""

from __future__ import annotations

import copy
import copyreg
import hashlib
import io
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info

from .order import Order

__all__ = ["Copied", "SeededDataset", "SeededOrder", "SeededSample", "seeded"]


# --- random numbers of a sample that depend on a seed, the epoch and the sample's index alone ------------------------
# They depend neither on the process that loads the sample, nor on the samples that it has loaded before.


class SeededSample(NamedTuple):
    """A sample's index with the seed for its random numbers: what a SeededDataset is asked for."""

    index: Any
    seed: int

    def __repr__(self) -> str:
        return repr(self.index)


class SeededOrder:
    """An order whose indices come with the seeds of their samples, which differ from epoch to epoch."""

    def __init__(self, order: Order, *, seed: int, epoch: int) -> None:
        self._order = order
        self._key = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=32).digest()

    @property
    def num_samples(self) -> int:
        return self._order.num_samples

    def indices(self, start: int, stop: int) -> list[Any]:
        return [SeededSample(index, self._seed_of(index)) for index in self._order.indices(start, stop)]

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()

    def has_seeds_of(self, other: Order) -> bool:
        """Whether ``other`` gives each sample the same seed, which ``state_dict`` does not tell."""
        return isinstance(other, SeededOrder) and other._key == self._key

    def _seed_of(self, index: Any) -> int:
        plain = index.__index__() if hasattr(index, "__index__") else index  # whatever kind of integer it is
        told = hashlib.blake2b(repr(plain).encode(), digest_size=8, key=self._key).digest()
        return int.from_bytes(told, "little") >> 1  # 63 bits, as torch takes them


class SeededDataset:
    """A dataset that seeds ``random``, numpy and torch for each sample; outside of workers it restores them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, sample: SeededSample) -> Any:
        if get_worker_info() is not None:
            _seed(sample.seed)
            return self.dataset[sample.index]
        with seeded(sample.seed):
            return self.dataset[sample.index]


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed devices too


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which this process's random numbers are those of a seed; afterwards they go on as before."""
    plain, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        _seed(seed)
        yield
    finally:
        random.setstate(plain)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


# --- a copy of a value, which later changes of the value do not reach ------------------------------------------------
# It is unpickled only when it is asked for.


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy of a value: bytes that can go to another process; where pickling fails, an object for this one alone."""

    content: Any
    """The pickled bytes, or a deep copy where pickling failed."""
    is_pickled: bool

    @classmethod
    def of(cls, value: Any) -> Copied:
        """A copy of a value as it is now."""
        written = io.BytesIO()
        try:
            _Pickler(written).dump(value)
        except Exception:  # it cannot be pickled: the copy is of use in this process alone
            return cls(copy.deepcopy(value), is_pickled=False)
        return cls(written.getvalue(), is_pickled=True)

    def value(self) -> Any:
        """The value that was copied, as another object each time."""
        return ForkingPickler.loads(self.content) if self.is_pickled else copy.deepcopy(self.content)


class _Pickler(ForkingPickler):
    """A pickler that copies tensors, where multiprocessing's has them shared among processes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.dispatch_table = copyreg.dispatch_table
