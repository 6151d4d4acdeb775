"""Samplers of torch's DataLoader: whether one shares samples out among ranks, and whether it is told of epochs."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from .accelerator import is_prepared

__all__ = ["EpochsOfSampler", "num_unshared", "remark_on_shares"]


def num_unshared(loader: Any) -> int | None:
    """How many samples this rank takes of a dataset that nothing shares out, None where something may.

    What accelerate has prepared shares out by itself, and so may a batch sampler of the user's own.
    """
    if not isinstance(loader, DataLoader) or is_prepared(loader) or isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader.batch_sampler) is not BatchSampler or hasattr(loader.sampler, "num_replicas"):
        return None
    try:
        num_samples = len(loader.dataset)  # type: ignore[arg-type]
        return num_samples if len(loader.sampler) == num_samples else None  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def remark_on_shares(num_samples: int, num_replicas: int, sampler: object) -> str:
    """What is odd about each of several replicas taking so many samples."""
    return (
        f"each of {num_replicas} replicas of the model takes all {num_samples} samples of its dataset, since the "
        f"dataloader's {type(sampler).__name__} shares nothing out: an epoch has each sample {num_replicas} times, "
        "unless each rank's dataset holds others; use an ElasticDataLoader, which gives each rank its part of every "
        "step, or sampler=DistributedSampler(dataset)"
    )


class EpochsOfSampler:
    """Which epochs a DistributedSampler was told of by the ends of the loop's epochs."""

    def __init__(self, loader: Any) -> None:
        sampler = getattr(loader, "sampler", None)
        self._sampler: Any = sampler if isinstance(sampler, DistributedSampler) and sampler.shuffle else None
        self._last: tuple[int, int] | None = None  # an epoch, and the sampler's at its end

    def end(self, epoch: int) -> str | None:
        """The loop over ``epoch`` has ended; gives what is odd about the order that it had."""
        if self._sampler is None:
            return None
        last, self._last = self._last, (epoch, self._sampler.epoch)
        if last is None or self._last != (last[0] + 1, last[1]):
            return None
        return (
            f"epochs {last[0]} and {epoch} had the same order of samples: the DistributedSampler shuffles by its "
            f"epoch, which was {last[1]} in both; call dataloader.sampler.set_epoch(epoch) before each loop, or use an "
            "ElasticDataLoader, which needs no such call"
        )
