"""When the phases of a step begin and end, from hooks on a model and its optimizers, and which steps are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle, unserializable_hook

from elastic_ext.torch_private.engine import at_end_of_pass
from elastic_ext.torch_private.module_hooks import (
    Hook,
    beside_graphs,
    is_compiled,
    num_graphs_compiled,
    skipped_by_compiler,
)

from .phases import Phase

__all__ = ["PassWatcher", "Probe", "ProbePace"]


# --- when the phases of a step begin and end, learnt from hooks on a model and its optimizers ------------------------
# The loop stays as it is. What is seen on the processor's clock is where the training thread waits and works; on an
# accelerator that lags behind, device_timeline.py records the same moments there.
#
# Hooks are on the model while steps are measured, and off while none are, but for two cases, in which they stay on and
# do nothing within unmeasured micro-steps. Where the loader does not tell when it is waited for, they tell evaluations
# between two steps from waiting. Where a compiler has made a graph of anything, it would make its graphs anew without
# them. What it makes a graph of has no part of them, and is not cut by them: a pass whose model is called within such a
# graph is not seen.

_DEPTH = 3  # of containers in which tensors are looked for
_MOST_TENSORS = 16  # of an output

EnterPhase = Callable[[int], int]
"""A function that is called with a phase as it begins, and gives the phase before."""


class PassWatcher(Protocol):
    """Observes the inputs, outputs and gradients of a model's passes."""

    def see_inputs(self, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Take in that a forward pass begins, with these arguments."""

    def see_outputs(self, outputs: Any) -> None:
        """Take in that a forward pass has ended, with these outputs, of which some require a gradient."""

    def see_end_of_pass(self) -> None:
        """Take in that a backward pass from the outputs has ended."""


class Probe:
    """Tells when phases begin on one model and its optimizers, by hooks, in the micro-steps that it is told of."""

    def __init__(
        self, enter_phase: EnterPhase, model: nn.Module, optimizers: Sequence[Optimizer], *, is_on_accelerator: bool
    ) -> None:
        """``model`` is what the loop calls."""
        self.num_tokens = self.num_bytes = 0
        """Tokens and bytes that were given to forward passes.

        Tokens are the elements of a pass's first tensor, where that is of integers and has two dimensions or more.
        """
        self.num_rows = 0
        """Rows of the first tensor in each micro-step's first pass: samples, as a rule; since the probe was made."""
        self.has_seen = False
        """Whether the model was ever called in a micro-step that this probe was told of."""
        self.is_attached = False
        """Whether the hooks are on the model and its optimizers."""
        self.watcher: PassWatcher | None = None
        """What observes passes in the micro-steps that are measured."""
        self._enter_phase = self._own_enter_phase = enter_phase
        self._is_on_accelerator = is_on_accelerator
        self._handles: list[RemovableHandle] = []
        self._hooks: tuple[Callable[..., None], ...] = ()  # of the model, and of each optimizer
        self._model, self._optimizers = model, tuple(optimizers)
        self._num_compiled = num_graphs_compiled()
        self._is_inside = False  # whether a micro-step that is measured is under way
        self._is_unmeasured = False  # whether a micro-step that is not measured is under way
        self._depth = 0  # calls of the model within one another
        self._is_in_pass = False  # whether a backward pass is under way
        self._has_rows = False  # whether the rows of this micro-step are counted
        self._thread = 0  # the ident of the training thread
        self._phase_beside_passes = Phase.OTHER.value  # the phase of a micro-step outside of its passes
        self._phase_between_steps = Phase.OTHER.value  # the phase that goes on after a call of the model between steps
        self._leaves: list[RemovableHandle] = []  # hooks on what outlives its step

    def attach(self) -> None:
        """Put the hooks on the model and its optimizers."""
        if self.is_attached:
            return
        self.is_attached = True
        model = self._model
        if not self._hooks:
            acts = self._before_forward, self._after_forward, self._before_optimizer, self._after_optimizer
            self._hooks = tuple([self._unless_compiled(act) for act in acts])
        before_forward, after_forward, before_step, after_step = self._hooks
        if not isinstance(model, torch.jit.ScriptModule):  # which takes no hooks
            # Before FSDP's: so the first hook on the output is ours, and at the end of a backward pass what FSDP waits
            # for comes between ``_end_computing`` and ``_end_backward``.
            self._handles.append(model.register_forward_pre_hook(Hook(before_forward), prepend=True, with_kwargs=True))
            self._handles.append(model.register_forward_hook(Hook(after_forward), prepend=True))
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(before_step))
            self._handles.append(optimizer.register_step_post_hook(after_step))

    def may_detach(self) -> bool:
        """Whether hooks can be taken off and put on again without having a compiler make a graph anew."""
        return num_graphs_compiled() == self._num_compiled and not any(map(is_compiled, self._model.modules()))

    def detach(self) -> None:
        """Take the hooks off, until ``attach`` is called again."""
        self.is_attached = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget_leaves()

    def enter_micro_step(self) -> None:
        """Begin a micro-step that is measured; the loop has its batch."""
        self._thread = get_ident()
        self._is_inside, self._is_unmeasured = True, False
        self._depth, self._is_in_pass = 0, False  # whatever became of the one before
        self._has_rows = False
        self._phase_beside_passes = Phase.OTHER
        if not self.has_seen:
            self._enter_phase(Phase.STEP)  # nobody knows whether the hooks will see the model called
        else:
            self._enter_phase(Phase.TRANSFER if self._is_on_accelerator else Phase.OTHER)

    def enter_unmeasured_micro_step(self) -> None:
        """Begin a micro-step that is not measured; hooks do nothing in it."""
        self._is_unmeasured = True

    def leave_micro_step(self) -> None:
        """End a micro-step: what comes is no part of a step."""
        self._is_inside = self._is_unmeasured = False
        self._depth = 0
        if self._leaves:
            self._forget_leaves()

    def tell_phases(self, listener: Callable[[int], None] | None) -> None:
        """Call ``listener`` with each phase as it begins; None ends that."""
        enter_phase = self._own_enter_phase
        if listener is None:
            self._enter_phase = enter_phase
            return

        def tell_both(phase: int) -> int:
            listener(phase)
            return enter_phase(phase)

        self._enter_phase = tell_both

    def take_counts(self) -> tuple[int, int]:
        """The tokens and bytes that the model was given since the last call."""
        found = self.num_tokens, self.num_bytes
        self.num_tokens = self.num_bytes = 0
        return found

    def _unless_compiled(self, act: Callable[..., None]) -> Callable[..., None]:
        """``act`` as a hook: not in micro-steps that are not measured, and no part of what a compiler makes."""
        act = beside_graphs(act)

        def hook(*arguments: Any) -> None:
            if is_compiling() or self._is_unmeasured:  # is_compiling first: a compiler reads no further than to that
                return
            act(*arguments)

        return skipped_by_compiler(hook)

    def _before_forward(self, module: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        if get_ident() != self._thread:  # another thread than the one that trains
            return
        self._depth += 1
        if self._depth > 1 or self._is_in_pass:  # a call within a call, or activations are computed again
            return
        if self._is_inside:
            if self.watcher is not None:
                self.watcher.see_inputs(arguments, options)
            self._enter_phase(Phase.FORWARD)
            self.has_seen = True
            self._count((*arguments, *options.values()) if options else arguments)
        else:
            self._begin_between_steps()

    def _after_forward(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if get_ident() != self._thread:
            return
        self._depth = max(self._depth - 1, 0)
        if self._depth > 0 or self._is_in_pass:
            return
        if not self._is_inside:
            self._enter_phase(self._phase_between_steps)
        elif not self._await_backward(output):
            self._enter_phase(self._phase_beside_passes)  # an evaluation
        elif self.watcher is not None:
            self.watcher.see_outputs(output)

    def _begin_between_steps(self) -> None:
        """Begin a call of the model between two steps: an evaluation, which would be counted as waiting for data.

        ``Phase.OTHER`` takes the place of ``Phase.DATA`` alone; in any other phase the call is a part of that phase.
        """
        self._phase_between_steps = self._enter_phase(Phase.OTHER)
        if self._phase_between_steps != Phase.DATA:
            self._enter_phase(self._phase_between_steps)

    def _await_backward(self, output: Any) -> bool:
        """Hook the outputs, so that a backward pass tells when it begins; gives whether one can come to them.

        All outputs are hooked: the first may be one that no loss is made of.
        """
        found = (output,) if isinstance(output, torch.Tensor) else islice(_tensors_in(output, _DEPTH), _MOST_TENSORS)
        is_awaited = False
        for each in found:
            if each.requires_grad:
                is_awaited = True
                handle = each.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]
                if each.is_leaf:  # which is there in the next step too
                    self._leaves.append(handle)
        return is_awaited

    def _forget_leaves(self) -> None:
        while self._leaves:
            self._leaves.pop().remove()

    @unserializable_hook  # type: ignore[untyped-decorator]
    def _begin_backward(self, gradient: torch.Tensor) -> None:
        if not self._is_inside:
            return
        self._enter_phase(Phase.BACKWARD)
        if not self._is_in_pass:
            self._is_in_pass = at_end_of_pass(self._end_computing, self._end_backward)

    def _end_computing(self) -> None:
        """Begin to wait for other ranks: all gradients of the pass are computed."""
        self._enter_phase(Phase.COMMUNICATION)

    def _end_backward(self) -> None:
        self._is_in_pass = False
        self._enter_phase(self._phase_beside_passes)
        if self.watcher is not None:
            self.watcher.see_end_of_pass()

    def _before_optimizer(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if self._is_inside:
            self._phase_beside_passes = Phase.OPTIMIZER  # also after passes that it asks for
            self._enter_phase(Phase.OPTIMIZER)

    def _after_optimizer(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if self._is_inside:
            self._phase_beside_passes = Phase.OTHER
            self._enter_phase(Phase.OTHER)

    def _count(self, given: Iterable[Any]) -> None:
        is_first = True
        for value in given:
            if isinstance(value, torch.Tensor):
                self._count_tensor(value, is_first=is_first)
                is_first = False
            else:
                for each in _tensors_in(value, _DEPTH):
                    self._count_tensor(each, is_first=is_first)
                    is_first = False

    def _count_tensor(self, value: torch.Tensor, *, is_first: bool) -> None:
        try:
            size, num_dims = value.numel(), value.dim()
            num_rows = value.size(0) if num_dims > 0 else 0
        except (RuntimeError, TypeError):  # a kind of tensor that tells no size
            return
        if type(size) is not int or type(num_rows) is not int:  # a symbolic size, while a compiler traces
            return
        self.num_bytes += size * value.element_size()
        if is_first:
            if not self._has_rows:
                self._has_rows = True
                self.num_rows += num_rows
            if num_dims > 1 and not value.is_floating_point():
                self.num_tokens += size


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """The tensors in a value: in containers, and in containers within these."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 0:
        for part in _parts_of(value):
            yield from _tensors_in(part, depth - 1)


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name, None) for each in fields(value)]
    return ()


# --- which steps are measured, so that measuring takes no more than its share of their time --------------------------
# Measuring adds 60 to 300 microseconds to a step. A *look* is some steps in a row that are measured; one begins about
# once a second, so that looks take 0.3% of the time or less, and every window of a second or more has one.

_NUM_FIRST = 64  # steps of the first look
_EVERY_NANOSECONDS = 900_000_000  # from the beginning of a look to that of the next
_LEAST_TOGETHER, _MOST_TOGETHER = 4, 8  # steps of a look
_TOGETHER_NANOSECONDS = 50_000_000  # after which a look ends that has the least number of steps


class ProbePace:
    """Which steps are measured: the first ones, then some in a row about once a second; all steps where they are long.

    Moments are nanoseconds on the clock of ``time.perf_counter_ns``.
    """

    def __init__(self) -> None:
        self._is_first = True  # whether this is the first look
        self._num_steps = 0  # that were measured in this look
        self._began = 0  # when this look began

    def begin_look(self, now: int) -> None:
        """Begin to measure steps."""
        self._num_steps, self._began = 0, now

    def end_step(self, now: int) -> int:
        """Take in that a measured step has ended; gives until when coming steps are not measured, 0 if the next is."""
        self._num_steps += 1
        if self._num_steps < _NUM_FIRST if self._is_first else not is_over(self._num_steps, now - self._began):
            return 0
        until = rests_until(self._began)
        self._is_first = False
        self.begin_look(now)  # where there is no time left to rest
        return until if until > now else 0


def is_over(num_steps: int, nanoseconds: int) -> bool:
    """Whether a look at so many steps, which took so long together, is over."""
    return num_steps >= _MOST_TOGETHER or (num_steps >= _LEAST_TOGETHER and nanoseconds >= _TOGETHER_NANOSECONDS)


def rests_until(look_began: int) -> int:
    """Until when steps are not measured after a look that began at that moment."""
    return look_began + _EVERY_NANOSECONDS
