"""Learning: what the size of a step means to what is learned, seen while training goes on.

Looked at only where that is wanted: where the user lets steps grow, or where rates follow the noise of gradients. Which
steps are looked at, and when ranks add up what they have seen, depends on what is the same on all of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from .batches import Batches
from .config.batch_rules import BatchRule
from .config.elastic_config import ElasticConfig
from .gradient_pairs import GradientPairs
from .records.metrics import LearningFacts
from .step_state import StepState

if TYPE_CHECKING:
    from .config.follower import ConfigFollower
    from .counts import Counts

__all__ = ["Learning"]

_logger = logging.getLogger(__name__)

_KEY = "global_batch_size"
_FIRST_PAIRS, _MORE_PAIRS = 16, 48  # of steps; so many without steps between them, and until there are so many
_OFTEN_STEPS, _EVERY_STEPS = 8, 32  # ... one pair in so many, and then in so many; even numbers
_DIGITS = 2  # of what is told: what is no news is not told again
_OWN_SIZE = (
    "the tuner changes how many samples a step has where the dataloader can be told its sizes; use ElasticDataLoader"
)


class Learning:
    """One rank's part."""

    def __init__(
        self,
        follower: ConfigFollower,
        counts: Counts,
        batches: Batches,
        state: StepState,
        pairs: GradientPairs,
        *,
        rule: BatchRule,
    ) -> None:
        self.is_on = False
        """Whether gradients are looked at; the same on all ranks, from one boundary to the next."""
        self.lets_grow = False
        """The user lets the tuner choose how many samples a step has, and it can be changed."""
        self.why_not = ""
        """Why it cannot be, where the user would let it."""
        self.on_news: Callable[[], None] = lambda: None
        """Called on all ranks at a boundary, when more is known of the noise."""
        self._follower = follower
        self._counts = counts
        self._batches = batches
        self._state = state
        self._pairs = pairs
        self._rule = rule
        self._step = self._num_samples = 0  # as the step under way began
        self._first: tuple[int, int] | None = None  # the first step of a pair, and its samples

    def take_up(self, config: ElasticConfig) -> None:
        """Go on under ``config``, from the next step on; all ranks at the same boundary."""
        knobs = config.tuning.knobs or {}
        self.why_not = self._why_not(config) if _KEY in knobs else ""
        self.lets_grow = _KEY in knobs and not self.why_not
        is_wanted = self.lets_grow or self._rule == "adascale"
        self.is_on = is_wanted and self._follower.settings.enabled and self._batches.global_batch is not None
        if not self.is_on:
            self.forget()
        self.begin_step()

    def begin_step(self) -> None:
        """A step comes: have its gradients looked at, if it is its turn."""
        counts = self._counts
        self._step, self._num_samples = counts.global_step, counts.num_samples
        is_seen = self.is_on and self._is_seen(counts.noise_scale.num_steps)
        self._state.on_gradients = self._pairs.look if is_seen else None

    def end_step(self) -> None:
        """A step has ended, on all ranks: after the second of a pair they add up what they have seen.

        Also where it has not committed, since others may have taken it for one that has: they find that out elsewhere.
        """
        counts, noise = self._counts, self._counts.noise_scale
        number, noise.num_steps = noise.num_steps, noise.num_steps + 1
        if not self._is_seen(number):
            return
        num_samples = counts.num_samples - self._num_samples if counts.global_step > self._step else 0
        if number % 2 == 0:
            self._pairs.keep()
            self._first = number, num_samples
            return
        is_pair, self._first = num_samples > 0 and self._first == (number - 1, num_samples), None
        seen = self._pairs.compare()
        self._take(num_samples, self._all_of(seen if is_pair else None))

    def forget(self) -> None:
        """The next gradients are no pair with those before: of another model or another state of it."""
        self._pairs.forget()
        self._first = None

    def facts(self) -> LearningFacts | None:
        """For whoever tunes; None where the user does not let steps grow."""
        first = self._counts.reference_batch
        if not self.lets_grow or first is None:
            return None
        return LearningFacts(rule=self._rule, first_batch=first, noise_scale=self._told)

    @property
    def _told(self) -> float | None:
        """The noise scale in few digits."""
        found = self._counts.noise_scale.value
        return None if found is None else float(f"{found:.{_DIGITS}g}")

    def _why_not(self, config: ElasticConfig) -> str:
        """Why a step cannot have another number of samples, empty where it can."""
        batch = self._batches.global_batch
        if self._batches.source is None or batch is None:
            return _OWN_SIZE
        return self._batches.check(config.revise({_KEY: 2 * batch}, "to be asked for")) or ""

    def _is_seen(self, number: int) -> bool:
        """Whether the step with this number is one of a pair, the same for both."""
        num_tried = self._counts.noise_scale.num_tried
        if num_tried < _FIRST_PAIRS:
            return True
        return number % (_OFTEN_STEPS if num_tried < _MORE_PAIRS else _EVERY_STEPS) < 2

    def _all_of(self, seen: tuple[float, float] | None) -> tuple[float, float] | None:
        """What all ranks have seen together, the same on all to the bit; None where one has seen no pair."""
        text = "" if seen is None else " ".join(map(float.hex, seen))
        texts = self._follower.bring_noise(text)
        if "" in texts:
            return None
        each = [tuple(map(float.fromhex, told.split())) for told in texts]
        apart, product = (sum(numbers) for numbers in zip(*each, strict=True))  # fsum raises for infinities
        return apart, product

    def _take(self, num_samples: int, seen: tuple[float, float] | None) -> None:
        noise = self._counts.noise_scale
        before = noise.value
        if seen is None or not all(map(math.isfinite, seen)):
            noise.note_nothing()
            return
        noise.add(num_samples, apart=seen[0], product=seen[1])
        if noise.value == before:
            return
        if before is None and self._follower.ranks.rank == 0:
            _logger.info(
                "gradients have as much noise as gradient at about %g samples per step; there are %d",
                self._told,
                num_samples,
            )
        self.on_news()
