"""Refusing: why the workers and sizes of a loader cannot be as a config wants them. Taking them up is the loader's."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from elastic_ext.config.keys import DataloaderSection

from .epochs import Epochs

__all__ = ["fixed_settings", "why_not_change"]


def why_not_change(loader: DataLoader[Any], batches: Any, epochs: Epochs, wanted: DataloaderSection) -> str | None:
    """The reason in words, None if they can; ``batches`` is a batch sampler that decides sizes itself."""
    if loader.persistent_workers and wanted.num_workers == 0:
        return "num_workers is 0, and persistent_workers keeps some; leave one, or make the loader without it"
    changes_workers = wanted.num_workers is not None and wanted.num_workers != loader.num_workers
    if changes_workers and isinstance(loader.dataset, IterableDataset) and hasattr(loader.dataset, "__next__"):
        return (
            "num_workers of an IterableDataset changes from one loop to the next, and this dataset is an iterator, "
            "which gives nothing to a second loop; have its __iter__ give a new one"
        )
    if wanted.batch_size is None:
        return None
    if batches is None:
        if loader.batch_size is None:
            return "batch_size is None, which makes no batches; make the loader with a number"
    elif wanted.batch_size != getattr(batches, "batch_size", None) and not hasattr(batches, "set_batch_size"):
        return (
            "the batch_sampler decides how many samples a batch has; give it a method set_batch_size(batch_size), "
            "or the loader a sampler and a batch_size"
        )
    return epochs.why_not_resize(wanted.batch_size)


def fixed_settings(*, keeps_workers: bool, can_pin: bool) -> dict[str, str]:
    """Which settings cannot change while a loop is under way, each with the reason."""
    found = {}
    if keeps_workers:
        found["num_workers"] = "workers of an IterableDataset change from one loop to the next, and not within one"
    if not can_pin:
        found["pin_memory"] = "there is no accelerator that batches could be copied to"
    return found
