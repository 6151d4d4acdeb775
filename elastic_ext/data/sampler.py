"""ElasticDistributedSampler: an epoch's samples in an order that no number of ranks changes, and this rank's of them.

    sampler = ElasticDistributedSampler(dataset, seed=1)        # ranks as torch.distributed has them
    sampler.set_epoch(3)
    state = sampler.state_dict()                                # one position, the same on all ranks between two rounds
    ElasticDistributedSampler(dataset, num_replicas=5, rank=0).load_state_dict(state)

An ElasticDataLoader takes the order from it, and cuts it as steps are cut. By itself, as the sampler of another loader,
it gives its ranks samples in turn, round after round: the first to rank 0, the next to rank 1, and around again; a rank
whose share weighs more has more of each round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, Sampler

from elastic_ext.records.text import check_flag

from .order import Drawn, Order, SequentialOrder, Shuffled, told_length
from .seeding import seeded

__all__ = ["BatchSamplerAdapter", "DistributedSamplerAdapter", "ElasticDistributedSampler"]


class ElasticDistributedSampler(Sampler[Any]):
    """This rank's samples of an epoch, in an order that all ranks share: of ``dataset``, or as ``sampler`` draws it.

    ``sampler`` may be any that a seed makes repeatable: its ``generator``, and this process's random numbers while it
    draws, are seeded from ``seed`` and the epoch, and its ``set_epoch`` is called. Such an order is kept as an array of
    64-bit integers where all indices are such, else as a list. By ``shuffle`` up to 65,536 samples are kept as an
    array; the order of more is computed block by block.

    ``share_weights`` are whole numbers, one per rank: what each has of a round of sum(share_weights) samples, by
    default 1.

    Where the last samples are not enough for a round some ranks have fewer of it, unless ``drop_last`` leaves them out,
    or ``pad`` gives these ranks the iteration's first samples again (in a loader without a trainer, the epoch's);
    ``num_padded`` says how many. In a loader with a trainer ``pad`` does nothing.
    """

    def __init__(
        self,
        dataset: Sized | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        sampler: Iterable[Any] | None = None,
        pad: bool = False,
        share_weights: Sequence[int] | None = None,
    ) -> None:
        if (dataset is None) == (sampler is None):
            raise ValueError("give a dataset, or a sampler whose order is shared out, and not both")
        check_flag("pad", pad)
        if pad and drop_last:
            raise ValueError("pad and drop_last are both True: the last samples are completed or left out; give one")
        joined = dist.is_available() and dist.is_initialized()
        self.num_replicas = (dist.get_world_size() if joined else 1) if num_replicas is None else num_replicas
        self.rank = (dist.get_rank() if joined else 0) if rank is None else rank
        if type(self.num_replicas) is not int or not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank is {self.rank} of {self.num_replicas} replicas; allowed: 0 to num_replicas - 1")
        shares = (1,) * self.num_replicas if share_weights is None else tuple(share_weights)
        if len(shares) != self.num_replicas or not all(type(share) is int and share > 0 for share in shares):
            raise ValueError(
                f"share_weights are {list(shares)}; allowed: {self.num_replicas} whole numbers > 0, one per rank"
            )
        self.share_weights = shares
        self.dataset = dataset
        self.sampler = sampler
        self.shuffle = shuffle
        self.seed = int(seed)  # and no number of numpy's, which checkpoints cannot hold
        self.drop_last = drop_last
        self.pad = pad
        self.epoch = 0
        self._start = 0  # the position at which the iteration under way began
        self._taken = 0  # samples that this rank has taken since then
        self._has_ended = False  # whether the iteration has gone to its end on this rank
        self._goes_on_at = 0  # the position at which the next iteration begins
        self._order: Order | None = None

    @property
    def order(self) -> Order:
        """The order of this epoch; drawn anew where the dataset has another length now."""
        if self._order is not None and (self.dataset is None or self._order.num_samples == len(self.dataset)):
            return self._order
        if self.sampler is not None:
            self._order = self._drawn(self.sampler)
        elif self.dataset is not None:
            size = len(self.dataset)
            self._order = Shuffled(size, seed=self.seed, epoch=self.epoch) if self.shuffle else SequentialOrder(size)
        assert self._order is not None
        return self._order

    @property
    def num_padded(self) -> int:
        """Samples that come twice in what is left of the epoch, so that all ranks have as many."""
        return -self._num_left() % self._round if self.pad and self._num_left() else 0

    @property
    def goes_on_at(self) -> int:
        """The position at which the next iteration begins: 0, or that of a loaded state."""
        return self._goes_on_at

    @property
    def told_length(self) -> int:
        """How many samples the next epoch has: as ``sampler`` says now, else as it drew last."""
        try:
            return len(self.sampler) if isinstance(self.sampler, Sized) else self.order.num_samples
        except (TypeError, NotImplementedError):  # a sampler may have the method, and no length
            return self.order.num_samples

    def draw_anew(self) -> None:
        """Forget the order, so that ``sampler`` draws it again when needed; not if that gives its samples once."""
        if self.sampler is not None and not isinstance(self.sampler, Iterator):
            self._order = None

    def begin_elsewhere(self) -> None:
        """Forget the loaded position, from which a loader goes on: the next iteration here begins an epoch."""
        self._goes_on_at = 0

    def reseed(self, seed: int) -> None:
        """Draw later orders from another seed."""
        if seed != self.seed:
            self.seed, self._order = seed, None

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch; one that is under way already, as after ``load_state_dict``, goes on."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._begin_anew()

    def __len__(self) -> int:
        """How many samples the next iteration gives this rank: of an epoch, or of what a state has left of one."""
        num_rounds, rest = divmod(self._num_left(), self._round)
        return num_rounds * self.share_weights[self.rank] + self._num_of_round(rest)

    def __iter__(self) -> Iterator[Any]:
        order = self.order
        num_left, num_own = self._num_left(), len(self)
        start = self._start = self._goes_on_at
        self._taken = self._goes_on_at = 0
        self._has_ended = False
        own, before = self.share_weights[self.rank], sum(self.share_weights[: self.rank])
        for number in range(num_own):
            place = start + (number // own * self._round + before + number % own) % num_left
            self._taken += 1
            yield order.indices(place, place + 1)[0]
        self._has_ended = True

    def state_dict(self, num_taken: int | None = None) -> dict[str, Any]:
        """The position of the epoch once this rank has taken ``num_taken`` samples of the last iteration.

        By default all that were asked for; a loader with workers asks for more than it has handed out. Ranks whose
        shares weigh more than 1 stand together only between two rounds. A rank without samples in an epoch's last round
        counts that round once its iteration has gone to the end, and never with ``num_taken``.
        """
        taken = self._taken if num_taken is None else num_taken
        num_samples = self.order.num_samples
        num_rounds, rest = divmod(taken, self.share_weights[self.rank])
        position = self._start + num_rounds * self._round
        num_of_round = self._num_of_round(num_samples - position)
        if 0 < rest < num_of_round:
            raise ValueError(
                f"rank {self.rank} has taken {rest} of its {num_of_round} samples in a round of "
                f"{self._round} (the sum of share_weights), so that one position cannot describe all ranks; call "
                "state_dict() after whole rounds"
            )
        is_at_end = num_taken is None and self._has_ended and not self.drop_last
        position = num_samples if is_at_end else min(position + (self._round if rest else 0), num_samples)
        return {"epoch": self.epoch, "position": position, "order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration go on from a state, with any number of ranks; ValueError if its order is another.

        From a state at an epoch's end the next iteration gives that epoch anew, unless ``set_epoch`` names another.
        """
        missing = sorted({"epoch", "position", "order"} - set(state))
        if missing:
            raise ValueError(
                f"the state has no {', '.join(missing)}, and is not one of an ElasticDistributedSampler; give what its "
                "state_dict() gave"
            )
        if state.get("completed"):
            raise ValueError(
                "the state is of a loader with in_order=False, and samples behind its position are consumed, which a "
                "sampler by itself would give again; give it to an ElasticDataLoader over this sampler"
            )
        saved = dict(state["order"])
        before = self.epoch, self.seed
        self.epoch, self.seed, self._order = int(state["epoch"]), saved.get("seed", self.seed), None
        if self.order.state_dict() != saved:
            told = self.order.state_dict()
            self.epoch, self.seed = before
            self._order = None
            raise ValueError(
                f"the state is of the order {saved}, and this sampler gives {told}; give it the dataset and the "
                "arguments with which the state was saved"
            )
        self._start = self._goes_on_at = int(state["position"])
        self._taken, self._has_ended = 0, False
        if self._num_left() < (self._round if self.drop_last else 1):  # no rank has any of what is left
            self._start = self._goes_on_at = 0

    @property
    def _round(self) -> int:
        return sum(self.share_weights)

    def _num_of_round(self, num_left: int) -> int:
        """How many samples this rank has of the next round, where ``num_left`` samples of the epoch are left."""
        own, before = self.share_weights[self.rank], sum(self.share_weights[: self.rank])
        if num_left >= self._round or (self.pad and num_left > 0):
            return own
        return 0 if self.drop_last else min(max(num_left - before, 0), own)

    def _begin_anew(self) -> None:
        """Begin another epoch: no samples are taken, and its order is not drawn yet."""
        self._start = self._taken = self._goes_on_at = 0
        self._has_ended = False
        self._order = None

    def _num_left(self) -> int:
        return self.order.num_samples - self._goes_on_at

    def _check(self, sampler: Any) -> None:
        """Refuse a sampler that gives ranks different samples."""
        if hasattr(sampler, "num_replicas") or hasattr(sampler, "num_processes"):
            raise ValueError(
                f"{type(sampler).__name__} shares its samples out by itself, in a way of its own; with a trainer, give "
                "the loader the sampler that it wraps, or no sampler; without a trainer, give the loader torch's "
                "DistributedSampler or an ElasticDistributedSampler instead"
            )

    def _drawn(self, sampler: Any) -> Drawn:
        self._check(sampler)
        parts: list[Any] = [sampler, getattr(sampler, "sampler", None)]  # a batch sampler has one of its own
        for each in parts:
            if hasattr(each, "set_epoch"):
                each.set_epoch(self.epoch)
            if isinstance(getattr(each, "generator", self), torch.Generator | None):
                each.generator = torch.Generator().manual_seed(_seed_of(self.seed, self.epoch))
        with seeded(_seed_of(self.seed, self.epoch)):  # for samplers deeper in it, and those that have no generator
            return self._taken_from(sampler)

    def _taken_from(self, sampler: Any) -> Drawn:
        return Drawn(sampler)


class DistributedSamplerAdapter(ElasticDistributedSampler):
    """An ElasticDistributedSampler with the dataset, seed, rank and other settings of torch's DistributedSampler.

    Its order is the elastic one, which does not change with the number of ranks. The epoch is the DistributedSampler's:
    whoever calls its ``set_epoch`` sets the epoch here too.
    """

    def __init__(self, of: DistributedSampler[Any]) -> None:
        epoch = self._epoch = of.epoch
        self._of = of
        super().__init__(
            of.dataset,  # type: ignore[arg-type]  # which has a length, or the other could not be made
            of.num_replicas,
            of.rank,
            of.shuffle,
            of.seed,
            of.drop_last,
            pad=not of.drop_last,
        )
        self.epoch = epoch

    @staticmethod
    def can_adapt(sampler: Any) -> bool:
        """Whether a sampler is a DistributedSampler whose samples are the ones that torch's class gives."""
        return isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__

    @property
    def epoch(self) -> int:
        if self._of.epoch != self._epoch:  # somebody has named another
            self._epoch = self._of.epoch
            self._begin_anew()
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._of.set_epoch(epoch)


class BatchSamplerAdapter(ElasticDistributedSampler):
    """An ElasticDistributedSampler that gives all batches of this rank's batch sampler.

    Batches are not shared out here: the batch samplers of the ranks may do that, by giving each rank others.
    """

    def __init__(self, batches: Iterable[Any], dataset: Any, seed: int) -> None:
        super().__init__(None, 1, 0, sampler=batches, seed=seed)
        self._dataset = dataset

    def _check(self, sampler: Any) -> None:
        """Any batch sampler will do, also one that shares its batches out."""

    def _taken_from(self, sampler: Any) -> Drawn:
        return Drawn.of_batches(sampler, told_length(self._dataset))


def _seed_of(seed: int, epoch: int) -> int:
    """The seed of a sampler's random numbers in an epoch; how it is made never changes: saved orders depend on it."""
    first = Shuffled(1 << 47, seed=seed, epoch=epoch)
    return int(first.indices(0, 1)[0])
