"""FiniteGradients: whether the gradients of a step are finite, and what becomes of a step whose gradients are not.

A look is taken on the training thread, right before an optimizer uses the gradients. Where a step is to be left out or
taken back, every step is looked at, and all ranks decide alike; where it is only told, the first steps are, and one of
many after them. What a loop's own GradScaler finds and leaves out is no finding here, unless it never ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from elastic_ext.errors import StepError
from elastic_ext.training.options import WhenNotFinite
from elastic_ext.training.remarks import next_look

if TYPE_CHECKING:
    from elastic_ext.training.training import Training

__all__ = ["FiniteGradients", "NotFinite", "num_not_finite"]

_logger = logging.getLogger(__name__)

_MOST_LEFT_OUT = 32
"""Steps in a row that a scaler may leave out: it halves its scale in each, and infinities end long before."""
_MOST_SKIPPED = 100
"""After how many skipped steps in a row a second warning says that training does not go on."""

_ONCE = "this warning is logged once, the metric num_not_finite counts on"
_REMEDY = "lower the learning rate, clip gradients, or look at these samples"
_TEXTS: Mapping[WhenNotFinite, str] = {
    "warn": (
        "{found} in the step after step {step}, and optimizers have used them: parameters may not be finite from here "
        f'on; {_REMEDY}; when_not_finite="skip" leaves such steps out, "stop" takes the first one back, and '
        f"trainer.rewind() goes back to a checkpoint; {_ONCE}"
    ),
    "skip": (
        "{found} in the step after step {step}, which was left out: its samples are consumed, global_step and "
        f"schedules stay; {_REMEDY}; this warning is logged once, the metric num_skipped counts on"
    ),
    "stop": (
        "{found} in the step after step {step}; the step was taken back, and parameters and optimizers are as they "
        f"were before it: {_REMEDY}, and resume from a checkpoint; "
        'or have when_not_finite="skip" leave such steps out'
    ),
}
_NO_WAY_ON = (
    "training does not go on; where parameters are not finite no further step mends that: call trainer.rewind() for an "
    "earlier checkpoint, or start again with a lower learning rate"
)
_NOTHING_BUT = (
    f"{{number}} steps in a row were left out after step {{step}}, since gradients are not finite: {_NO_WAY_ON}"
)
_BY_SCALER = "the scaler has left out {number} steps in a row for gradients that are not finite at any scale"
_AT_NO_SCALE = f"{{found}}, after step {{step}}: {_NO_WAY_ON}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NotFinite:
    """Which losses and gradients of a step were not finite, as far as this rank has seen."""

    num_gradients: int = 0
    """Parameters whose gradients were not finite."""
    num_parameters: int = 0
    """Parameters whose gradients were looked at."""
    is_elsewhere: bool = False
    """Whether another rank has found gradients that were not finite."""
    losses: tuple[tuple[int, float], ...] = ()
    """Losses that were not finite, each with the number of its micro-step, from 1 on."""
    norm: float | None = None
    """The norm of all gradients, where clipping found one that is not finite."""
    num_by_scaler: int = 0
    """Steps in a row that a scaler has left out."""

    def __bool__(self) -> bool:
        has_gradients = bool(self.num_gradients or self.is_elsewhere or self.num_by_scaler)
        return has_gradients or bool(self.losses) or self.norm is not None

    def __str__(self) -> str:
        return _listed(list(self._parts()))

    def _parts(self) -> Iterator[str]:
        if self.num_by_scaler:
            yield _BY_SCALER.format(number=self.num_by_scaler)
        for number, loss in self.losses[:1]:
            more = f", and of {len(self.losses) - 1} more" if len(self.losses) > 1 else ""
            yield f"the loss of micro-step {number} was {loss:g}{more}"
        if self.num_gradients:
            yield f"the gradients of {self.num_gradients} of {self.num_parameters} parameters were not finite"
        elif self.norm is not None:
            yield f"the norm of the gradients was {self.norm:g}"
        elif self.is_elsewhere:
            yield "gradients on another rank were not finite"


class FiniteGradients:
    """Checks on one rank whether the gradients of each step are finite, and leaves out or stops steps where not."""

    def __init__(self, training: Training) -> None:
        state, scaler = training.state, training.prepared.scaler
        self._when = training.options.when_not_finite
        self._state = state
        self._counts = training.counts
        self._optimizers = training.optimizers
        self._gradients = training.gradients
        self._has_scaler = scaler is not None and scaler.is_enabled()
        self._ranks = training.ranks
        self._reports = training.follower.reports
        self._number = -1  # of the step that the following is of
        self._after = 0  # steps that had committed before it
        self._is_left_out = False
        self._num_gradients = self._num_parameters = 0
        self._is_elsewhere = False
        self._losses: list[tuple[int, torch.Tensor]] = []
        self._norm: float | None = None
        self._num_by_scaler = 0
        self._left_out_by_scaler = (-1, -1, 0)  # the step, those committed then, and how many there were in a row
        self._skipped = (-1, 0)  # steps that had committed then, and how many were skipped in a row
        self._has_told = self._has_told_again = False
        state.looks_from = 0
        state.may_step = self.may_step
        state.on_left_out = self._note_left_out

    @property
    def leaves_out(self) -> bool:
        """Whether optimizers were kept from stepping in the step under way."""
        return self._is_left_out and self._number == self._state.number

    def note_loss(self, loss: torch.Tensor) -> None:
        """Keep the loss of a micro-step that enters its backward pass; it is read when the step ends."""
        if not self._has_scaler and loss.numel() == 1:
            self._begin()
            self._losses.append((self._state.index + 1, loss.detach()))

    def note_clipping(self, parameters: Sequence[torch.Tensor]) -> None:
        """Check gradients before they are clipped: where their norm is not finite, none of them is afterwards."""
        if not self._has_scaler:
            self._begin()
            self._count(parameters)

    def note_norm(self, norm: torch.Tensor) -> None:
        """Note a norm found by clipping, where it is not finite; one on a device is not waited for."""
        if self._has_scaler or norm.device.type != "cpu":
            return
        value = float(norm)
        if not math.isfinite(value):
            self._begin()
            self._norm = value
            self._state.looks_from = min(self._state.looks_from, self._state.number)

    def may_step(self, own: Iterable[torch.Tensor]) -> bool:
        """Whether the optimizer of these parameters is to step; all ranks decide alike, unless it is only a warning.

        StepError where the step is to be taken back.
        """
        self._begin()
        if self._is_left_out:
            return False
        decides = self._when != "warn"
        # Before anything has changed the others count too, but for those that a scaler has not unscaled so far.
        looks_at_all = decides and self._state.num_begun == 0 and not self._has_scaler
        parameters = self._trained() if looks_at_all else list(own)
        num_found = self._count(parameters)
        if not decides:
            return True
        sharing = self._gradients.sharing
        if not sharing.has_alike(parameters):
            device = parameters[0].device if parameters else torch.device("cpu")
            total = sharing.total(torch.tensor(float(num_found), device=device))
            self._is_elsewhere = total > 0
        if not (num_found or self._is_elsewhere):
            return True
        if self._when == "stop":
            self._stop()
        self._is_left_out = True
        return False

    def end_step(self) -> None:
        """Count and tell what was found in a step that was looked at, as it ends on this rank."""
        state = self._state
        if self._number == state.number:
            has_stepped = state.num_stepped > 0
            finding = self._finding()
            if finding and (has_stepped or self._is_left_out or finding.num_by_scaler):
                self._note(finding)
            self._losses = []
        if self._when == "warn":
            state.looks_from = next_look(state.number)

    # ---- within ----

    def _trained(self) -> list[torch.Tensor]:
        trained = (part for each in self._optimizers for group in each.param_groups for part in group["params"])
        return list(dict.fromkeys(trained))

    def _begin(self) -> None:
        """Forget what was seen in another step."""
        if self._number != self._state.number:
            self._number, self._after = self._state.number, self._counts.global_step
            self._is_left_out = self._is_elsewhere = False
            self._num_gradients = self._num_parameters = self._num_by_scaler = 0
            self._losses, self._norm = [], None

    def _count(self, parameters: Sequence[torch.Tensor]) -> int:
        """How many of these parameters' gradients are not finite; a step's first finding, before clipping, is kept."""
        found = num_not_finite(part.grad for part in parameters if part.grad is not None)
        if found and not self._num_gradients and self._norm is None:
            self._num_gradients, self._num_parameters = found, len(parameters)
        return found

    def _finding(self) -> NotFinite:
        values = [(number, float(loss)) for number, loss in self._losses]
        return NotFinite(
            num_gradients=self._num_gradients,
            num_parameters=self._num_parameters,
            is_elsewhere=self._is_elsewhere,
            losses=tuple((number, value) for number, value in values if not math.isfinite(value)),
            norm=self._norm,
            num_by_scaler=self._num_by_scaler,
        )

    def _note(self, finding: NotFinite) -> None:
        """Count a step with gradients that are not finite, and warn of the first one."""
        counts = self._counts
        counts.measured["num_not_finite"] += 1
        if not self._is_left_out:
            self._tell(f"{_AT_NO_SCALE}; {_ONCE}" if finding.num_by_scaler else _TEXTS["warn"], finding)
            return
        counts.measured["num_skipped"] += 1
        committed, number = self._skipped
        number = number + 1 if committed == counts.global_step else 1
        self._skipped = counts.global_step, number
        self._tell(_TEXTS["skip"], finding)
        if number >= _MOST_SKIPPED and not self._has_told_again:
            self._has_told_again = True
            self._say(_NOTHING_BUT.format(number=number, step=self._after))

    def _stop(self) -> None:
        finding = self._finding()
        self._counts.measured["num_not_finite"] += 1
        text = (_AT_NO_SCALE if finding.num_by_scaler else _TEXTS["stop"]).format(found=finding, step=self._after)
        self._report(text)
        raise StepError(text)

    def _tell(self, text: str, finding: NotFinite) -> None:
        if not self._has_told:
            self._has_told = True
            self._say(text.format(found=finding, step=self._after))

    def _say(self, text: str) -> None:
        # What one rank alone has seen of gradients that are shared out, it says itself.
        if self._ranks.rank == 0 or (self._when == "warn" and not self._gradients.sharing.has_alike(self._trained())):
            _logger.warning("%s", text)
        self._report(text)

    def _report(self, text: str) -> None:
        details = {name: self._counts.measured[name] for name in ("num_not_finite", "num_skipped")}
        self._reports.write_event("not-finite", step=self._after, text=text, details=details)

    def _note_left_out(self) -> None:
        """Count steps in a row that a scaler leaves out; where they do not end, the scale is not the reason."""
        state, committed = self._state, self._counts.global_step
        last, committed_then, number = self._left_out_by_scaler
        if last == state.number:
            return
        number = number + 1 if committed_then == committed else 1
        self._left_out_by_scaler = state.number, committed, number
        if number > _MOST_LEFT_OUT:
            self._begin()
            self._num_by_scaler = number
            if self._when == "stop":
                self._stop()
            state.looks_from = min(state.looks_from, state.number)


@torch.no_grad()
def num_not_finite(gradients: Iterable[torch.Tensor]) -> int:
    """How many of these tensors have an element that is not finite; waits once for each device."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        local = _local(gradient)
        if local.numel() > 0 and (local.is_floating_point() or local.is_complex()):
            by_kind.setdefault((local.device, local.dtype), []).append(local)
    norms: dict[torch.device, list[torch.Tensor]] = {}
    for (device, _), held in by_kind.items():
        norms.setdefault(device, []).append(torch.stack(torch._foreach_norm(held)).float().sum())
    if all(math.isfinite(torch.stack(each).sum().item()) for each in norms.values()):
        return 0
    # A norm of numbers that are finite may be too large to be one itself: so look at each of them.
    are_finite = [torch.stack([each.isfinite().all() for each in held]) for held in by_kind.values()]
    return sum(int((~each).sum().item()) for each in are_finite)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """The part of a gradient that lies on this rank; of a sparse one, its values."""
    held = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    if held.layout is torch.sparse_coo:
        return held._values()
    return held.detach()


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
