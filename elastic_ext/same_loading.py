"""SameLoading: whether the loaders of all ranks give batches of the same sizes, out of the same order of samples."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from .batches import Batches
from .errors import RanksDisagreeError
from .ranks.group import Ranks
from .remarks import Remarks
from .samplers import num_unshared, remark_on_shares

__all__ = ["SameLoading"]

_logger = logging.getLogger(__name__)


class SameLoading:
    """This rank's loader beside those of the others. All ranks compare at the same places, and all raise."""

    def __init__(self, batches: Batches, ranks: Ranks) -> None:
        self._batches = batches
        self._ranks = ranks
        self._compares_orders = False  # at each epoch: a sampler draws them
        self._num_unshared: int | None = None  # samples that each rank takes of a dataset, where that is their number
        self._compares_batches = False  # at the first one: each rank draws them for itself

    def compare(self) -> None:
        """Raise where loaders differ: the ranks would take different numbers of steps, or samples twice.

        Of different seeds all take rank 0's: what seeds each rank's workers may be that rank's own.
        """
        ordered = self._batches.ordered
        mine = {
            "sizes": self._batches.description,
            "seed": None if ordered is None else ordered.seed,
            "draws": ordered is not None and ordered.draws_order,
            "batches": self._batches.drawing is not None,
            "unshared": num_unshared(self._batches.loader) if self._batches.source is None else None,
        }
        answers = [json.loads(data) for data in self._gather(mine)]
        if any(other["sizes"] != answers[0]["sizes"] for other in answers):
            told = "; ".join(f"rank {rank}: {_in_words(each['sizes'])}" for rank, each in enumerate(answers))
            raise RanksDisagreeError(
                f"the ranks' dataloaders differ ({told}); give all ranks batches of the same sizes"
            )
        seed = answers[0]["seed"]
        if ordered is not None and None not in (ordered.seed, seed) and ordered.seed != seed:
            ordered.take_seed(seed)
        self._compares_orders = len(answers) > 1 and any(each["draws"] for each in answers)
        self._compares_batches = all(each["batches"] for each in answers)
        unshared = {each["unshared"] for each in answers}
        self._num_unshared = unshared.pop() if len(unshared) == 1 else None  # else each rank has a dataset of its own
        self.compare_orders()

    def compare_shares(self, num_replicas: int, remarks: Remarks) -> None:
        """Say so where each of several replicas of the model takes all samples; called after ``compare``."""
        if self._num_unshared is not None and num_replicas > 1:
            sampler = self._batches.loader.sampler
            remarks.say("samples not shared out", remark_on_shares(self._num_unshared, num_replicas, sampler))

    def compare_orders(self) -> None:
        """Raise where samplers have drawn different orders for the epoch that comes."""
        if not self._compares_orders:
            return
        ordered = self._batches.ordered
        orders = [json.loads(data) for data in self._gather(None if ordered is None else ordered.order_to_come())]
        if any(order != orders[0] for order in orders):
            told = "; ".join(f"rank {rank}: {order}" for rank, order in enumerate(orders))
            raise RanksDisagreeError(
                f"the ranks' samplers draw different orders, and samples would come twice or never ({told}); have the "
                "sampler draw from its `generator`, from random numbers of random, numpy.random or torch, which are "
                "seeded alike on all ranks, or from a seed of its own and its set_epoch(epoch)"
            )

    def compare_batches(self, num_replicas: int) -> None:
        """Warn, once, where batch samplers have drawn the same for so many replicas of the model."""
        if not self._compares_batches or num_replicas == 1:
            return
        self._compares_batches = False
        drawing = self._batches.drawing
        drawn = [json.loads(data) for data in self._gather(None if drawing is None else drawing.order_to_come())]
        if all(order == drawn[0] for order in drawn) and self._ranks.rank == 0:
            _logger.warning(
                "the batch samplers of all ranks draw the same batches: each sample is trained on %d times in an "
                "epoch; have the batch_sampler give each rank its share of them, or the loader seed=rank on each rank, "
                "so that each draws its own",
                num_replicas,
            )

    def _gather(self, mine: object) -> list[bytes]:
        return self._ranks.gather(json.dumps(mine).encode(), "comparing dataloaders")


def _in_words(description: Sequence[int | None]) -> str:
    if len(description) == 1:
        return "sizes as it is told"
    micro_batch, num_batches, last_batch = description
    length = "an unknown number" if num_batches is None else str(num_batches)
    return f"{length} of {micro_batch} samples" + (f", the last of {last_batch}" if last_batch else "")
