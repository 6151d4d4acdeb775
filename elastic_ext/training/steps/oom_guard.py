"""Guarding: steps in which a rank's memory may run out, and all ranks take the step again together.

In a guarded step no pass waits for another rank. Before its gradients are shared the ranks hear of each other whether
memory has sufficed on all; only then they are averaged. A step is guarded where memory may be asked for that was never
asked for before: after a start, after micro-batches have grown, after a change of plan; or always.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from elastic_ext.config.control_word import REFUSES_ONE
from elastic_ext.errors import StepError, StepUndone
from elastic_ext.torch_private.out_of_memory import is_out_of_memory
from elastic_ext.training.gradients.sharing import Averaging

from .state import StepState

if TYPE_CHECKING:
    from elastic_ext.training.training import Training

__all__ = ["GuardMode", "Guarding", "StepFailure"]

_logger = logging.getLogger(__name__)

GuardMode = Literal["auto", "always", "never"]
_ALWAYS = "sync_every_micro_step shares gradients before a step's end"
_OTHERS_TRAINED = (
    "ranks would share the gradients of different parameters ({}); start again, and set requires_grad alike on all"
)
_STEPS = 3  # after something new: the first asks for the most, as a rule, and the allocator settles in the others


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFailure:
    """Where in a step memory ran out on this rank, or a layer refused a single sample."""

    micro_step: int
    during: str
    """Empty where passes were not seen."""
    largest: int | None
    """The most samples that a rank takes at once, where it can be told to take fewer."""
    is_guarded: bool
    """No other rank waits for it but to hear of it."""
    keeps_all: bool
    """All that it has left was rolled back."""
    refusal: str = ""
    """What a layer said that refuses a single sample; empty where memory ran out."""

    @classmethod
    def of(
        cls,
        state: StepState,
        *,
        sees_passes: bool,
        largest: int | None,
        holds_back: bool,
        keeps_all: bool,
        refusal: str = "",
    ) -> StepFailure:
        """Of the micro-step under way; ``holds_back`` says that other ranks have a part in the step."""
        during = "forward pass" if state.has_forward else "before the model was called"
        if state.has_backward:
            during = "backward pass"
        return cls(
            micro_step=state.index,
            during=during if sees_passes else "",
            largest=largest,
            is_guarded=state.is_guarded and not (state.is_shared and holds_back),
            keeps_all=keeps_all,
            refusal=refusal,
        )

    def __str__(self) -> str:
        told = f"in micro-step {self.micro_step + 1}" + (f" ({self.during})" if self.during else "")
        return f"{REFUSES_ONE} {told}: {self.refusal}" if self.refusal else told


class Guarding:
    """Steps of one rank that all ranks can take again where memory runs out."""

    def __init__(self, training: Training) -> None:
        follower, options = training.follower, training.options
        self._mode: GuardMode = options.guard if follower.settings.enabled else "never"
        self._shares_always = options.sync_every_micro_step
        self._memory = training.memory
        self._gradients = training.gradients
        self._hear_all = follower.hear_all
        self._num_left = _STEPS
        self._most = 0  # samples at once, that memory has sufficed for since something new
        self._averaging: Averaging | None = None
        self._why_not: str | None = None
        self.holds_back = False
        """Passes of the guarded step under way are not to share gradients."""

    def is_due(self, largest: int) -> bool:
        """Whether the step that begins is to be guarded, in which a rank takes so many samples at once at most."""
        if self._mode == "never" or not (self.goes_on or largest > self._most):
            return False
        sharing = self._gradients.sharing
        why_not = _ALWAYS if self._shares_always and sharing.has_others else sharing.why_not_guard()
        if why_not is not None and why_not != self._why_not:
            _logger.info("a step for which memory does not suffice cannot be taken again: %s", why_not)
        self._why_not = why_not
        return why_not is None

    @property
    def is_watching(self) -> bool:
        """Whether a step that begins, or ends, is to be told of: it may need more memory than those before."""
        return self._num_left > 0

    def expect_more(self) -> None:
        """The steps that come may."""
        self._num_left, self._most = _STEPS, 0

    @property
    def why_not(self) -> str | None:
        """Why a step that was to be guarded cannot be, None where it can, or where none was to be."""
        return self._why_not

    def expect_again(self) -> None:
        """The step that comes was undone on all ranks, and may be once more."""
        self._num_left = max(self._num_left, 1)

    def watch(self) -> None:
        """Such a step begins."""
        self._memory.begin_step()

    def note(self, largest: int | None) -> None:
        """It has ended, and has taken so many samples at once at most."""
        self._num_left -= 1
        if largest is not None:
            self._most = max(self._most, largest)
            self._memory.end_step(largest)

    def begin_step(self) -> None:
        """A guarded step begins, on all ranks."""
        sharing = self._gradients.sharing
        sharing.share_buffers()
        self.holds_back = sharing.has_others
        if self.holds_back:
            parameters = sharing.averaged()
            if self._averaging is None or not self._averaging.is_of(parameters):
                self._averaging = Averaging(parameters, sharing.groups[0])

    def end_step(self, largest: int) -> None:
        """It has ended well, on all ranks, and has taken so many samples at once at most."""
        self._most = max(self._most, largest)
        sharing = self._gradients.sharing
        sharing.expect_shared_buffers()
        sharing.forget_unshared()
        if not self.goes_on:
            self.let_go()

    @property
    def goes_on(self) -> bool:
        """Whether the next step may be guarded too."""
        return self._num_left > 0 or self._mode == "always"

    def let_go(self) -> None:
        """Hold no parameter, and no memory, until the next guarded step."""
        self._averaging = None

    def hear(self, failed: str = "") -> Sequence[str]:
        """Hear of all ranks whether memory has sufficed; raises StepUndone on all where it has not on one.

        ``failed`` says how it ran out on this one. Gives which gradients each rank has, for ``average``.
        """
        averaging = self._averaging
        if averaging is None:  # there is no other rank
            if failed:
                raise StepUndone({0: failed})
            return ()
        try:
            if not failed:
                averaging.reserve()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed = "before gradients were shared"
        brings = averaging.held
        heard = self._hear_all(failed=failed, brings=brings)
        if heard is not None and heard.failures:
            self.let_go()
            raise StepUndone(heard.failures)
        if heard is None:
            return [brings]
        held = [word.brings for word in heard.words]
        if len(set(map(len, held))) > 1:
            numbers = ", ".join(f"{len(each)} on rank {rank}" for rank, each in enumerate(held))
            raise StepError(_OTHERS_TRAINED.format(numbers))
        return held

    def average(self, held: Sequence[str]) -> None:
        """Have gradients be the mean over the ranks; from here on none can take the step back alone."""
        if self._averaging is not None:
            self._averaging.average(held)
