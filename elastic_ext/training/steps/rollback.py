"""How a step is taken back: what it changed besides parameters is kept and put back, and the rest is forgotten."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from elastic_ext.config.control_word import Purpose

if TYPE_CHECKING:
    from elastic_ext.training.training import Training

__all__ = ["Retry", "Rollback", "Snapshot"]

_logger = logging.getLogger(__name__)


# --- what a step has changed in the parts of training on this rank: taken back, forgotten, or why it cannot be -------
# When that is done, and what becomes of the step, is said in steps.py.


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """What ranks compare of a step that was rolled back, before they take it again."""

    purpose: Purpose = Purpose.RETRY
    """How far the step had come on this rank, as the control word says it."""
    num_exchanges: int = 0
    """How many collectives of the model the step had begun."""
    num_lost: int = 0
    """Micro-batches that the step took and that do not come again."""


class Rollback:
    """Takes back what the step under way has changed in the parts of training on this rank."""

    def __init__(self, training: Training) -> None:
        self._state = training.state
        self._gradients = training.gradients
        self._batches = training.batches
        self._optimizers = training.prepared.optimizers
        self._scaler = training.prepared.scaler
        self._has_warned = False
        self.snapshot: Snapshot | None = None
        """Copies of what the step under way may change besides parameters; None where these are not kept."""

    def retry(self, num_taken: int, *, num_exchanges: int, is_called: bool) -> Retry:
        """What ranks compare of the step before they take it again; asked before ``roll_back``.

        ``num_exchanges`` is the number of collectives when the step began.
        """
        purpose = Purpose.RETRY_CALLED if is_called else Purpose.RETRY
        return Retry(
            purpose=Purpose.RETRY_AWAITED if self._gradients.awaited else purpose,
            num_exchanges=self._gradients.sharing.num_exchanges - num_exchanges,
            num_lost=0 if self._batches.can_replay else num_taken,
        )

    def roll_back(self, num_taken: int, *, is_called: bool) -> None:
        """Undo the step: gradients, samples, scaler and snapshot; ``is_called`` if the model was called in it."""
        if is_called:
            self._gradients.sharing.have_shared_buffers()
        self._gradients.drop()
        self._batches.rollback(num_taken)
        if self._scaler is not None:
            self._scaler.rollback()
        self._state.begin_anew()
        if self.snapshot is not None:
            self.snapshot.restore()
        if not self._batches.can_replay and not self._has_warned:
            self._has_warned = True
            which = "the trainer was given no dataloader, and the loop's own has gone past them"
            if self._batches.loader is not None:
                which = "this dataloader cannot hand them out twice"
            _logger.warning(
                "a step was rolled back, and its samples do not come again: %s; an ElasticDataLoader can hand them out "
                "again",
                which,
            )

    def leave_out(self, *, restores: bool) -> None:
        """Drop the gradients of a step that optimizers were kept from; with ``restores`` only its samples count."""
        self._gradients.drop()
        if restores and self.snapshot is not None:
            self.snapshot.restore()

    def start_over(self, num_torn: int, *, passes_over: bool) -> None:
        """Forget the step under way and what is left of the last one, once a checkpoint is loaded.

        A torn step had ``num_torn`` micro-steps; ``passes_over`` says that their samples do not come again.
        """
        if num_torn:
            settle_samples = self._batches.commit if passes_over else self._batches.rollback
            settle_samples(num_torn)
        self.forget()
        self._gradients.end_step()
        if self.snapshot is not None:
            self.snapshot.end_step()
        self._state.begin_anew()

    def forget(self) -> None:
        """Drop all gradients, and what a scaler has noted of them."""
        self.forget_gradients()
        if self._scaler is not None:
            self._scaler.forget()

    def forget_gradients(self) -> None:
        """Drop all gradients, and have no optimizer wait for its ``zero_grad()``."""
        self._gradients.drop()
        for optimizer in self._optimizers:
            optimizer.forget_zeroing()

    def why_torn(self, error: BaseException | None) -> str | None:
        """Why the step is torn: an optimizer began and did not end, or one of several ended and ``error`` came.

        None where the step is not torn.
        """
        state = self._state
        if not state.is_torn and (error is None or state.num_begun == 0 or state.has_committed):
            return None
        return (
            f"an optimizer failed in the middle of its step ({state.num_stepped} of {state.num_optimizers} had ended): "
            f"parameters may be half updated; resume from a checkpoint, or have all ranks call trainer.rewind()"
        )

    def why_stuck(self) -> str | None:
        """Why the step cannot be rolled back, since a pass through the model was begun; None where it can."""
        state = self._state
        if not (state.phase.is_inside and state.has_forward and state.num_begun == 0):
            return None
        why = self._gradients.sharing.why_not_forget()
        return None if why is None else f"a step failed after the model was called, and {why}; resume from a checkpoint"


# --- what a step changes besides parameters, kept so that a step that never happened leaves no trace -----------------
# Random states, buffers and registered tensors; gradients, samples and counters are the trainer's own affair.


class Snapshot:
    """Copies of random states, buffers and registered tensors, taken as a step begins and put back after it failed.

    Tensors are copied into memory that is kept from step to step.
    """

    def __init__(self, model: nn.Module, registered: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self._model = model
        self._registered = registered
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._held: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = []
        self._shared: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._restore_random: list[Callable[[], None]] = []

    def take(self) -> None:
        """Copy random states, buffers and registered tensors as they are now."""
        self._held = [(module, dict(module._buffers)) for module in self._model.modules()]
        live = list(self._tensors())
        kept = [copy for _, copy in self._copies]
        if list(map(_kind, kept)) != list(map(_kind, live)):
            kept = [torch.empty_like(tensor) for tensor in live]
        with torch.no_grad():
            for tensor, copy in zip(live, kept, strict=True):
                copy.copy_(tensor)
        self._copies = list(zip(live, kept, strict=True))
        self._restore_random = list(_random_states())

    def take_shared(self) -> None:
        """Copy the buffers that the first rank has broadcast in a step's first pass; called right after that."""
        with torch.no_grad():
            self._shared = [(buffer, buffer.clone()) for buffer in self._model.buffers()]

    def put_shared(self) -> None:
        """Put back the buffers of ``take_shared``, for a step that is taken again, in which none are broadcast."""
        for buffer, shared in self._shared:
            _put(buffer, shared)

    def end_step(self) -> None:
        """Drop the broadcast buffers of a step that has ended."""
        self._shared = []

    def let_go(self) -> None:
        """Drop all copies, until ``take`` is called again."""
        self._copies, self._held, self._shared, self._restore_random = [], [], [], []

    def restore(self) -> None:
        """Put random states, buffers and registered tensors back as ``take`` found them."""
        for module, buffers in self._held:  # some modules put others in their place
            module._buffers.clear()
            module._buffers.update(buffers)
        for tensor, copy in self._copies:
            _put(tensor, copy)
        for restore in self._restore_random:
            restore()

    def _tensors(self) -> Iterable[torch.Tensor]:
        yield from self._model.buffers()
        for tensors in self._registered.values():
            yield from tensors.values()


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    """What has to be the same of two tensors for a copy of one to serve the other."""
    lies = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return tensor.shape, tensor.dtype, tensor.device, lies


def _put(tensor: torch.Tensor, kept: torch.Tensor) -> None:
    """Copy ``kept`` into ``tensor`` unseen by autograd, since a backward pass may still need the tensor's graph."""
    tensor.data.copy_(kept)


def _random_states() -> Iterable[Callable[[], None]]:
    """One function per random generator in use, which puts it back to where it is now."""
    python = random.getstate()
    yield lambda: random.setstate(python)
    host = torch.get_rng_state()
    yield lambda: torch.set_rng_state(host)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = torch.cuda.get_rng_state_all()
        yield lambda: torch.cuda.set_rng_state_all(devices)
    numpy: Any = sys.modules.get("numpy")  # a script that has not imported it has not drawn from it
    if numpy is not None:
        drawn = numpy.random.get_state()
        yield lambda: numpy.random.set_state(drawn)
