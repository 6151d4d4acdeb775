"""AlikeLoaders: makes sure that the ranks' dataloaders give them as many steps, and no sample twice."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .batches import Batches
from .errors import RanksDisagreeError
from .ranks import Ranks

__all__ = ["AlikeLoaders"]


class AlikeLoaders:
    """One rank's loader, compared with those of the others; all ranks make the same calls."""

    def __init__(self, batches: Batches, ranks: Ranks) -> None:
        self._batches = batches
        self._ranks = ranks
        self._compares_orders = False  # at each epoch: a sampler draws them

    def compare(self) -> None:
        """Raise on all ranks where their loaders differ: they would take different numbers of steps, or samples twice.

        Of different seeds all take rank 0's: what seeds each rank's workers may be that rank's own.
        """
        ordered = self._batches.ordered
        mine = {
            "sizes": self._batches.description,
            "seed": None if ordered is None else ordered.seed,
            "draws": ordered is not None and ordered.draws_order,
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
        self.compare_orders()

    def compare_orders(self) -> None:
        """Raise on all ranks where samplers have drawn different orders for the epoch that comes."""
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

    def _gather(self, mine: object) -> list[bytes]:
        return self._ranks.gather(json.dumps(mine).encode(), "comparing dataloaders")


def _in_words(description: Sequence[int | None]) -> str:
    if len(description) == 1:
        return "sizes as it is told"
    micro_batch, num_batches, last_batch = description
    length = "an unknown number" if num_batches is None else str(num_batches)
    return f"{length} of {micro_batch} samples" + (f", the last of {last_batch}" if last_batch else "")
