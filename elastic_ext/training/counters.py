"""How far training has come, and the noise scale of its gradients. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from elastic_ext.records.measures import METRICS
from elastic_ext.records.text import counted

__all__ = ["Counts", "NoiseScale"]


# --- at how many samples per step a gradient has as much noise as gradient, from pairs of gradients ------------------
# A step's gradient is the true one, G, and noise that is the less the more samples it is the mean of: for B samples
# its square is |G|^2 + T/B, where T is the trace of the covariance of one sample's gradient. The *noise scale* is
# T/|G|^2: below that many samples per step twice as many are nearly worth two steps, far above it hardly more than one.
#
# The gradients a and b of two steps in a row, of B samples each, are two looks at nearly the same G: a*b is |G|^2 on
# the average, and |a-b|^2 is 2T/B. Both are averaged apart, since the average of their ratio would be another number.

_KEPT = 1.0 - 1.0 / 32.0  # of the weight of what was seen, when another pair is
_FAST = 0.25  # of what is new in how large gradients are
_MOST_ABOVE = 4.0  # times as large as gradients were; one that is larger counts as if it were so
_FEWEST_PAIRS = 8
_MOST_ERROR = 0.3  # of the estimate, one standard error
_FAR = 8.0  # batches: a noise scale that is surely above that is as good as known
_SURE = 2.0  # standard errors: what lies further away cannot be true


@dataclass(slots=True)
class NoiseScale:
    """The estimate of the gradients' noise scale, from pairs of steps; the same on every rank: all add the same."""

    value: float | None = None
    """The noise scale in samples; None until known well enough, then the last known, if that can still be true.

    Where there is far more noise than gradient, how much cannot be known: then it is what there is at least.
    """
    num_steps: int = 0
    """Steps that have ended while gradients were looked at for the noise scale."""
    num_tried: int = 0
    """Pairs of steps that were to be looked at, also those that told nothing."""
    num_pairs: int = 0
    """Pairs of steps that the estimate is made of."""
    size: float = 0.0
    """A running mean of the gradients' squared norm."""
    weight: float = 0.0
    """The sum of the pairs' weights; older pairs weigh less."""
    weight_squares: float = 0.0
    """The sum of the squares of the pairs' weights."""
    noise: float = 0.0
    """The weighted sum of the pairs' T, each divided by the gradients' squared norm of that time."""
    signal: float = 0.0
    """The weighted sum of the pairs' |G|^2, each divided by the gradients' squared norm of that time."""
    noise_squares: float = 0.0
    """The weighted sum of the squares of what ``noise`` adds up."""
    signal_squares: float = 0.0
    """The weighted sum of the squares of what ``signal`` adds up."""
    products: float = 0.0
    """The weighted sum of the products of what ``noise`` and ``signal`` add up."""

    def note_nothing(self) -> None:
        """Count a pair of steps that was to be looked at, and that gives no estimate."""
        self.num_tried += 1

    def add(self, num_samples: int, *, apart: float, product: float) -> None:
        """Add a pair of gradients of ``num_samples`` each: the square of their difference, and their product."""
        self.num_tried += 1
        size = apart / 2.0 + product  # which is half of both squares
        if not (math.isfinite(size) and size > 0.0 and apart >= 0.0):
            return
        self.num_pairs += 1
        # By the size that gradients had before, so that early ones, which are large as a rule, do not outweigh others.
        usual = max(self.size, size / _MOST_ABOVE) if self.num_pairs > 1 else size
        self.size = size if self.num_pairs == 1 else self.size + _FAST * (min(size, _MOST_ABOVE * usual) - self.size)
        noise, signal = num_samples * apart / 2.0 / usual, product / usual
        self.weight = _KEPT * self.weight + 1.0
        self.weight_squares = _KEPT**2 * self.weight_squares + 1.0
        self.noise = _KEPT * self.noise + noise
        self.signal = _KEPT * self.signal + signal
        self.noise_squares = _KEPT * self.noise_squares + noise**2
        self.signal_squares = _KEPT * self.signal_squares + signal**2
        self.products = _KEPT * self.products + noise * signal
        found = self._found(num_samples)
        if found is not None and math.isfinite(found):
            self.value = found

    def _found(self, num_samples: int) -> float | None:
        """The noise scale by all pairs; where that is too uncertain, the last value as far as it can still be true."""
        if self.num_pairs < _FEWEST_PAIRS:
            return None
        noise, signal = self.noise / self.weight, self.signal / self.weight
        num_alike = self.weight**2 / self.weight_squares  # pairs of equal weight that would tell as much
        if signal > 0.0:
            ratio = noise / signal
            # Of noise - ratio * signal, whose mean is 0: how far it lies from there, by what it is divided by.
            squares = self.noise_squares - 2.0 * ratio * self.products + ratio * ratio * self.signal_squares
            error = math.sqrt(max(squares, 0.0) / self.weight / num_alike) / signal
            if error <= _MOST_ERROR * ratio:
                return ratio
        doubt = _SURE * math.sqrt(max(self.signal_squares / self.weight - signal**2, 0.0) / num_alike)
        most, least = max(signal, 0.0) + doubt, signal - doubt
        lowest = noise / most if most > 0.0 else 0.0
        if self.value is None:
            return lowest if lowest >= _FAR * num_samples else None
        known = max(self.value, lowest)
        return min(known, noise / least) if least > 0.0 else known

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved estimate; a field that was not saved begins anew."""
        for each in fields(self):
            setattr(self, each.name, state.get(each.name, each.default))


# --- how far training has come; the words are explained in trainer.py ------------------------------------------------

_TOTALS = tuple(name for name, metric in METRICS.items() if metric.over_steps == "total")


@dataclass(slots=True)
class Counts:
    """How far training has come: steps, epochs and samples; the same on every rank, but for ``measured``."""

    global_step: int = 0
    """Steps that committed since training began."""
    num_steps: int = 0
    """Steps that committed since the epoch began, or since ``reset()``."""
    epoch: int = 0
    """The epoch under way; between two epochs the next one."""
    start_epoch: int = 0
    """The epoch that the loop is to begin with: 0, or where a loaded state was."""
    is_in_epoch: bool = False
    """Whether the loop is within ``with trainer.epoch()``."""
    unfinished_epoch: int | None = None
    """The epoch whose loop was left before its end, where no other has begun since."""
    epoch_gone_back_to: int | None = None
    """The epoch that comes next, or its rest, since training went back between two epochs, and the data with it."""
    is_resumed: bool = False
    """Whether a saved state was loaded, after which training goes on."""
    reference_batch: int | None = None
    """The global batch of the job's first start, which the user's learning rates were chosen for."""
    noise_scale: NoiseScale = field(default_factory=NoiseScale)
    """The estimate of the gradients' noise scale; empty where nobody looks for it."""
    num_boundaries: int = 0
    """Steps that ended since this run began, whether they committed or not."""
    num_samples: int = 0
    """Samples, over all ranks, of the steps that ended since this run began, as far as they are known."""
    measured: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_TOTALS, 0))
    """Values of metrics for this rank's next record, by name. Those that are added up over steps begin with 0."""

    @property
    def epoch_to_resume(self) -> int:
        """The epoch with which a run begins that resumes from here: an unfinished one, or else ``epoch``."""
        return self.epoch if self.unfinished_epoch is None else self.unfinished_epoch

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "global_step": self.global_step,
            "num_steps": self.num_steps,
            "epoch": self.epoch_to_resume,
            "reference_batch": self.reference_batch,
        }
        if self.noise_scale.num_steps > 0:
            state["noise_scale"] = self.noise_scale.state_dict()
        return state

    def begins_later(self, epoch: int) -> bool:
        """Whether a run that resumes begins with a later epoch than the one that it goes on in."""
        return self.is_resumed and self.epoch_gone_back_to is None and epoch > self.start_epoch

    def remark_on_beginning(self, epoch: int, *, is_whole: bool) -> str | None:
        """A warning where a resumed run begins with another epoch than the one that it goes on in; else None.

        ``is_whole`` says whether all of a later ``epoch`` comes, and not what the one before has left.
        """
        if self.begins_later(epoch):
            what = self._left_out(self.start_epoch, epoch, is_whole=is_whole)
            return (
                f"training goes on after step {self.global_step}, in epoch {self.start_epoch}, and the loop begins "
                f"with epoch {epoch}: {what}; to train on those samples loop over "
                "range(trainer.start_epoch, num_epochs)"
            )
        if epoch >= self.start_epoch:
            return None
        return (
            f"training goes on in epoch {self.start_epoch}, and the loop begins with epoch {epoch}: it would train "
            f"{self.start_epoch - epoch} epochs again; loop over range(trainer.start_epoch, num_epochs)"
        )

    def remark_on_going_back(self, epoch: int, *, is_whole: bool) -> str | None:
        """A warning where the loop goes on with a later epoch than the one that training has gone back to, else None.

        ``is_whole`` says whether all of ``epoch`` comes, and not what the one before has left.
        """
        expected = self.epoch_gone_back_to
        if expected is None or epoch <= expected:
            return None
        what = self._left_out(expected, epoch, is_whole=is_whole) + (", as by skip_samples=True" if is_whole else "")
        return (
            f"training went back to step {self.global_step}, in epoch {expected}, and the loop goes on with epoch "
            f"{epoch}: {what}; to take those samples again loop by `epoch = trainer.start_epoch` and `while epoch < "
            "num_epochs:` in place of range(), and have `epoch = trainer.start_epoch` follow trainer.rewind()"
        )

    def _left_out(self, expected: int, epoch: int, *, is_whole: bool) -> str:
        """What a loop leaves out that goes on with ``epoch``, and not with ``expected``, an earlier one."""
        if not is_whole:
            num_epochs = counted(epoch - expected, "epoch")
            return f"what comes is the rest of epoch {expected}, and training ends {num_epochs} early"
        epochs = f"epoch {expected}" if epoch == expected + 1 else f"epochs {expected} to {epoch - 1}"
        return f"the samples of {epochs} that come after step {self.global_step} are left out"

    def undo(self, global_step: int) -> None:
        """Go back to counting ``global_step`` steps; the epoch goes on where it is, or comes next."""
        self.num_steps = max(self.num_steps - (self.global_step - global_step), 0)
        self.global_step, self.epoch_gone_back_to = global_step, None
        self.go_on_in(self.epoch)

    def go_on_in(self, epoch: int) -> None:
        """Count the steps that come as steps of this epoch."""
        self.epoch = self.start_epoch = epoch

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.global_step, self.num_steps = state["global_step"], state["num_steps"]
        self.unfinished_epoch = self.epoch_gone_back_to = None
        self.is_resumed = True
        self.go_on_in(state["epoch"])
        self.reference_batch = state["reference_batch"]
        self.noise_scale.load_state_dict(state.get("noise_scale", {}))
