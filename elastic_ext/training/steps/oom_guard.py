"""Guarding: steps in which a rank's memory may run out, and all ranks take the step again together.

In a guarded step no pass waits for another rank. Before its gradients are shared the ranks hear of each other whether
memory has sufficed on all; only then they are averaged. A step is guarded where memory may be asked for that was never
asked for before: after a start, after micro-batches have grown, after a change of plan; or always.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_ext.config.control_word import REFUSES_SINGLE_SAMPLE
from elastic_ext.errors import StepError, StepUndone
from elastic_ext.ranks.world import World
from elastic_ext.torch_private.out_of_memory import is_out_of_memory
from elastic_ext.training.gradients.sharing import Averaging
from elastic_ext.training.options import GuardMode

from .state import StepState

if TYPE_CHECKING:
    from elastic_ext.training.training import Training

__all__ = ["Guarding", "StepFailure"]

_logger = logging.getLogger(__name__)

_ALWAYS = "sync_every_micro_step shares gradients before a step's end"
_OTHERS_TRAINED = (
    "ranks would share the gradients of different parameters ({}); start again, and set requires_grad alike on all"
)
_STEPS = 3  # after something new: the first asks for the most, as a rule, and the allocator settles in the others


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFailure:
    """Where in a step memory ran out on this rank, or a layer refused a single sample."""

    micro_step: int
    """The index of the micro-step, from 0."""
    during: str
    """The pass in which memory ran out, in words; empty where passes were not seen."""
    largest: int | None
    """The most samples that a rank takes at once in the step; None where it cannot be told to take fewer."""
    is_guarded: bool
    """Whether other ranks wait for nothing but to hear of the failure, so that all can take the step again."""
    keeps_all: bool
    """Whether all that the step changed was kept, and is rolled back, buffers and registered state too."""
    refusal: str = ""
    """The error of a layer that refuses a single sample; empty where memory ran out."""

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
        """The failure of the micro-step under way; ``holds_back`` says that other ranks have a part in the step."""
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
        return f"{REFUSES_SINGLE_SAMPLE} {told}: {self.refusal}" if self.refusal else told


class Guarding:
    """Guards steps of this rank, so that all ranks can take a step again where memory runs out on one."""

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
        """Whether passes of the guarded step under way must not share gradients."""

    def take_world(self, world: World) -> None:
        """Guard the first steps with the ranks of ``world``, which may need more memory than those before."""
        self.let_go()
        self.expect_more()

    def is_due(self, largest: int) -> bool:
        """Whether the step that begins is to be guarded; in it a rank takes at most ``largest`` samples at once."""
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
        """Whether steps are measured by ``watch`` and ``note``, since they may need more memory than those before."""
        return self._num_left > 0

    def expect_more(self) -> None:
        """Guard and measure the next steps, which may need more memory than those before."""
        self._num_left, self._most = _STEPS, 0

    @property
    def why_not(self) -> str | None:
        """Why a step that was to be guarded cannot be, None where it can, or where none was to be."""
        return self._why_not

    def expect_again(self) -> None:
        """Guard the next step too, since it was undone on all ranks, and may be once more."""
        self._num_left = max(self._num_left, 1)

    def watch(self) -> None:
        """Begin to measure a step that may need more memory than those before."""
        self._memory.begin_step()

    def note(self, largest: int | None) -> None:
        """End measuring a step, which has taken at most ``largest`` samples at once."""
        self._num_left -= 1
        if largest is not None:
            self._most = max(self._most, largest)
            self._memory.end_step(largest)

    def begin_step(self) -> None:
        """Begin a guarded step, on all ranks: share buffers, and hold gradients back until its end."""
        sharing = self._gradients.sharing
        sharing.share_buffers()
        self.holds_back = sharing.has_others
        if self.holds_back:
            parameters = sharing.averaged()
            if self._averaging is None or not self._averaging.is_of(parameters):
                self._averaging = Averaging(parameters, sharing.groups[0])

    def end_step(self, largest: int) -> None:
        """End a guarded step that went well on all ranks, and has taken at most ``largest`` samples at once."""
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
        """Drop parameters and memory for averaging until the next guarded step."""
        self._averaging = None

    def hear(self, failed: str = "") -> Sequence[str]:
        """Exchange with all ranks whether memory has sufficed; gives which gradients each rank has, for ``average``.

        ``failed`` says how memory ran out on this rank. StepUndone on all ranks where it has on one.
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
        """Average gradients over the ranks; from here on no rank can take the step back alone."""
        if self._averaging is not None:
            self._averaging.average(held)
