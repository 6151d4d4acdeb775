"""Choosing: which loops the arguments of a loader mean, or why they mean none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .epochs import Epochs
from .indexed import Indexed
from .sampler import ElasticDistributedSampler, OfTorch, OwnBatches
from .streamed import Streamed

__all__ = ["Ordering", "epochs_of"]


@dataclass(frozen=True, slots=True)
class Ordering:
    """What a loader was given to order samples by."""

    sampler: Any
    batches: Iterable[Any] | None
    """A batch sampler that decides itself how many samples a batch has."""
    shuffle: bool
    seed: int | None


def epochs_of(loader: DataLoader[Any], ordering: Ordering, *, seeds_samples: bool, fast_forward: bool) -> Epochs:
    """The loops over a loader's dataset; ValueError where there can be none."""
    if isinstance(loader.dataset, IterableDataset):
        return _streamed(loader, ordering, seeds_samples, fast_forward)
    return _indexed(loader, ordering, seeds_samples, fast_forward)


def _streamed(loader: DataLoader[Any], ordering: Ordering, seeds_samples: bool, fast_forward: bool) -> Streamed:
    if seeds_samples:
        raise ValueError("seed_samples needs samples with an index, and an IterableDataset has none")
    return Streamed(
        loader.dataset,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        fast_forward=fast_forward,
        in_order=loader.in_order,
        seed=ordering.seed,
        generator=loader.generator,
    )


def _indexed(loader: DataLoader[Any], ordering: Ordering, seeds_samples: bool, fast_forward: bool) -> Indexed:
    if fast_forward:
        raise ValueError(
            "fast_forward is for an IterableDataset; a dataset with samples that are asked for by index goes on "
            "anywhere at once"
        )
    seed = ordering.seed
    if seed is None:
        seed = 0 if loader.generator is None else loader.generator.initial_seed()
    dataset: Any = loader.dataset
    sampler: Any = ordering.sampler if ordering.batches is None else ordering.batches
    if sampler is None:
        sampler = ElasticDistributedSampler(dataset, 1, 0, shuffle=ordering.shuffle, seed=seed)
    elif isinstance(sampler, ElasticDistributedSampler):
        pass
    elif ordering.batches is not None:
        sampler = OwnBatches(sampler, dataset, seed)
    elif OfTorch.is_like(sampler):
        sampler = OfTorch(sampler)
    else:
        sampler = ElasticDistributedSampler(None, 1, 0, sampler=sampler, seed=seed)
    return Indexed(
        dataset,
        sampler,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        is_of_batches=ordering.batches is not None,
        collate_fn=loader.collate_fn,
        seeds_samples=seeds_samples,
        in_order=loader.in_order,
    )
