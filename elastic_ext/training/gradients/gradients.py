"""What a step does to the gradients of a model: weigh, share, divide, clip and drop them; and how changes made in
between are noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from elastic_ext.errors import StepError
from elastic_ext.torch_private.engine import after_pass, current_pass
from elastic_ext.torch_private.module_hooks import Hook
from elastic_ext.training.steps.state import StepState

from .finite import FiniteGradients
from .loss_weighting import Weighing
from .sharing import Sharing, as_parameters, clip_norm, sharing_of

if TYPE_CHECKING:
    from elastic_ext.training.optimizers.optimizer import ElasticOptimizer

__all__ = ["Gradients", "Tampering", "local_part"]


# --- notices that gradients are changed while a step gathers them, as clipping in every micro-step would do ----------

_SOME = 256


class Tampering:
    """Notices that gradients were changed between backward passes; in some steps, as in all it would cost too much."""

    def __init__(self) -> None:
        self.is_looking = False
        """Whether changes are looked for in the step under way."""
        self._seen: dict[torch.Tensor, tuple[int, torch.Tensor]] = {}  # gradients' versions, and some of their values

    def begin_step(self, *, is_looking: bool) -> None:
        """Begin a step of several micro-steps, in which changes are looked for or not."""
        self._seen.clear()
        self.is_looking = is_looking

    def forget(self) -> None:
        """Hold no parameter until the next backward pass."""
        self._seen.clear()

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remember the gradients of ``parameters`` as a backward pass has left them."""
        for part in parameters:
            gradient = part.grad
            if gradient is not None and not gradient.is_sparse:
                self._seen[part] = local_part(gradient)._version, _some(gradient).clone()

    def has_seen_change(self) -> bool:
        """Whether a gradient has changed or is gone since the last backward pass."""
        seen = ((part.grad, version, values) for part, (version, values) in self._seen.items())
        return any(
            gradient is None or local_part(gradient)._version != version or not _are_alike(_some(gradient), values)
            for gradient, version, values in seen
        )


def local_part(gradient: torch.Tensor) -> torch.Tensor:
    """The part of a gradient that lies on this rank."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _some(gradient: torch.Tensor) -> torch.Tensor:
    """Some elements of a gradient, to see a change that leaves its version as it is, as a GradScaler's do."""
    return local_part(gradient).detach().reshape(-1)[:_SOME]


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


# --- what a step does to the gradients of a model: weigh, share, divide, clip and drop them --------------------------
# How ranks share them is in sharing.py, how passes are weighed in loss_weighting.py.

_LOST = (
    "the gradients of this step's earlier micro-steps are gone or replaced: something other than the optimizer's "
    "zero_grad() has cleared or changed them, such as model.zero_grad(); call optimizer.zero_grad(), which waits for "
    "the step to end"
)
_CHANGED = (
    "gradients were changed in a micro-step that does not end a step, after its backward pass, as clip_grad_norm_() "
    "and a GradScaler's unscale_() do: accumulated gradients would be scaled again and again; call "
    "trainer.clip_grad_norm_(), give the scaler to prepare(), or do it `if trainer.sync_gradients:`"
)
_UNCOUNTED = (
    "backward passes with num_items and without were mixed in one step: {}; call trainer.backward(loss_sum, "
    "num_items=...) in every micro-step, with 0 where there is nothing to count, and once in the last"
)
_OVERRIDDEN = (
    "no_sync(), set_requires_gradient_sync() or set_requires_all_reduce() was used, and otherwise than the trainer "
    "does: it shares gradients over all ranks by itself, in a step's last micro-step, or with sync_every_micro_step in "
    "each; take that out of the loop"
)
_DIVIDED = (
    "num_items needs gradients that are averaged over the ranks, and this model's are divided by a factor of its own "
    "(set_gradient_divide_factor); leave that out, or divide the loss by hand and leave num_items out"
)
_UNWEIGHTED = (
    "gradients came from a loss that does not go through the model's outputs, so they do not count as a part of the "
    "step; call trainer.backward(loss) instead of loss.backward()"
)
_NOT_CALLED = (
    "gradients came in a micro-step in which the model itself was not called, but a part of it, or before the step, so "
    "they do not count as a part of the step: call model(...) within `with trainer.step():`, or else call "
    "trainer.backward(loss) instead of loss.backward()"
)
_UNSHARED = (
    "optimizer.step() was called in a micro-step that ends a step, and no backward pass through the model went before "
    "it in that micro-step: the ranks have not shared their gradients; call loss.backward() in every micro-step, or "
    "leave the optimizer out as well, on all ranks"
)


class Gradients:
    """What steps do to one model's gradients on this rank: weigh, share, divide, clip, check and drop them."""

    def __init__(self, model: nn.Module, state: StepState) -> None:
        self._model = model
        self._state = state
        self.sharing = sharing_of(model)
        """How ranks average the gradients."""
        self._is_alone = self.sharing.num_ranks == 1 and not self.sharing.exchanges_always
        self._weighing = self._weighing_of(self.sharing)
        self._is_needed = False  # to see passes and weigh them
        self._num_trained = 0  # parameters, by the optimizers
        self._others: list[torch.Tensor] = []  # parameters of the model, which no optimizer trains
        self._handles: list[RemovableHandle] = []
        self.shares_first = self.sharing.shares_first
        self.awaited: list[torch.Tensor] = []
        """Outputs of a forward pass whose backward pass has not begun, and shares gradients: other ranks wait."""
        self.before_step: Callable[[], None] | None = None
        """Called on all ranks as a step begins, to see whether the model was wrapped anew; None without a plan."""
        self.on_unused: Callable[[], None] | None = None
        """Called once, when a pass through sharded modules has left out a parameter that is trained.

        Each step's first pass is looked at, and now and then all of a step.
        """
        self.on_shared_buffers: Callable[[], None] | None = None
        """Called in a step's first pass, once the first rank's buffers were broadcast; None where nobody asks."""
        self._has_shared_buffers = False  # in the step under way
        self.share_guarded: Callable[[], None] = lambda: None
        """Called after the passes of a guarded step's last micro-step, on all ranks."""
        self._sharing_pass = -1  # gradients are shared when this one has ended
        self.optimizers: list[ElasticOptimizer] = []
        self.finite: FiniteGradients | None = None
        """The check that losses and norms are finite; None before ``prepare``."""
        self._tampering = Tampering()
        self._num_items: torch.Tensor | None = None
        self._left: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients of the step before, by parameters
        self._is_counted: bool | None = None  # whether this step's backward passes come with num_items
        self._has_counted = False  # in this training
        self._is_divided = False
        self._hidden = 0  # what has come to gradients that no parameter shows, as a number that grows
        self._witness: tuple[torch.Tensor, int] | None = None  # has a gradient since an earlier micro-step; its version
        self._unshared: list[tuple[torch.Tensor, int]] = []  # gradients since the micro-step before: changes, how many
        self._seeds: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}

    def take_up(self, engine: DistributedDataParallel | None) -> None:
        """See again how gradients are averaged, after a change of plan between two steps; ``engine`` is its DDP."""
        self.let_go()
        before = self.sharing
        self.sharing = sharing_of(self._model, engine)
        self.sharing.share(now=True)  # whatever those before were told
        if not _is_same_ddp(before, self.sharing):
            self.awaited.clear()  # with what waited for it
        self.shares_first = self.sharing.shares_first
        self._is_alone = self.sharing.num_ranks == 1 and not self.sharing.exchanges_always
        self._weighing = self._weighing_of(self.sharing)
        self._weighing.counts = not self._is_alone or self._has_counted

    def let_go_of_groups(self) -> None:
        """Hold no process group, since these are about to end; ``take_up`` comes next."""
        self.let_go()
        self.awaited.clear()
        self.sharing = Sharing(self._model)

    def holders(self) -> list[object]:
        """Objects that still refer to parameters once ``let_go`` was called; a change of plan asks for them."""
        self.let_go()
        return [self.sharing.averaged()]

    def let_go(self) -> None:
        """Hold no parameter of the model, until the next step watches it."""
        self.watch(needed=False)
        self._others.clear()
        self._tampering.forget()
        self._unshared.clear()
        self._witness = None

    def _weighing_of(self, sharing: Sharing) -> Weighing:
        return Weighing(sharing.parts, self._state, on_output=self._note_output, on_backward=self._note_backward)

    @property
    def are_exchanged(self) -> bool:
        """Whether forward or backward passes exchange anything with other ranks."""
        return not self._is_alone

    @property
    def sees_passes(self) -> bool:
        """Whether forward and backward passes of the micro-step under way are noticed."""
        return self._is_needed and (self._weighing.counts or self._state.weight != 1.0)

    def parameters(self) -> Iterator[torch.Tensor]:
        """All parameters that have gradients: the model's, and others that the optimizers train."""
        yield from dict.fromkeys([*self._model.parameters(), *self._trained()])

    def watch(self, *, needed: bool) -> None:
        """Set or remove the hooks by which forward and backward passes are noticed and weighed, as ``needed``."""
        if not needed and not self._is_needed:
            return
        num_trained = sum(len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups)
        if needed == self._is_needed and num_trained == self._num_trained:
            return
        self._is_needed, self._num_trained = needed, num_trained
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if not needed:
            self._weighing.turn_off()
            return
        trained = set(self._trained())
        self._others = [part for part in self._model.parameters() if part not in trained]
        self._handles += self.sharing.hooks()
        self._weighing.turn_on(self.parameters())
        for part in self.sharing.sharing_buffers if self.on_shared_buffers is not None else ():
            self._handles.append(part.register_forward_pre_hook(Hook(self._after_sharing_buffers)))

    def begin_gathering(self, *, is_looked_at: bool) -> None:
        """Begin a step of several micro-steps; in some, changes of gradients are looked for (``is_looked_at``)."""
        self._tampering.begin_step(is_looking=is_looked_at)
        self._weighing.counts = not self._is_alone or self._has_counted or self._tampering.is_looking

    def release(self) -> None:
        """Leave the model as it was found: without hooks, and with gradients shared in each pass."""
        self.awaited.clear()
        self.watch(needed=False)
        self.sharing.share(now=True)
        self.sharing.expect_shared_buffers()

    def backward(self, loss: torch.Tensor, num_items: float | torch.Tensor | None, **options: Any) -> None:
        """Call ``loss.backward()`` with this micro-batch's weight, whatever the loss was computed from."""
        state, weighing = self._state, self._weighing
        weight = state.weight
        is_first = not state.has_backward and (weighing.counts or weight != 1.0)  # else others may have gone unseen
        self._note_pass(is_counted=num_items is not None, is_first=is_first)
        is_gathering = self._tampering.is_looking and not state.phase.is_last
        if is_gathering and self._tampering.has_seen_change():
            raise StepError(_CHANGED)
        if num_items is not None:
            weight = 1.0
            if self._num_items is None:
                self._set_left_aside()
            self._count(loss, num_items)
        if state.number >= state.looks_from and self.finite is not None:
            self.finite.note_loss(loss)
        weighing.is_exact = state.is_exact = True
        try:
            if weight == 1.0:
                loss.backward(**options)  # type: ignore[no-untyped-call]
            elif loss.numel() == 1 and "gradient" not in options:
                loss.backward(self._seed(weight, loss), **options)  # type: ignore[no-untyped-call]
            else:
                (loss * weight).backward(**options)  # type: ignore[no-untyped-call]
        finally:
            weighing.is_exact = False
        state.has_backward = True
        if is_gathering:
            self._tampering.note(self._trained())
        if state.is_guarded and state.phase.is_last:
            self._share_guarded()
        if state.phase.is_last and num_items is not None:
            self._divide()

    def clip(
        self, parameters: Any, most: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> torch.Tensor:
        """Scale gradients down to a norm of at most ``most`` over all ranks; gives the norm that they had."""
        parts = as_parameters(parameters)
        if self._state.on_gradients is not None:
            self._state.on_gradients(parts, None)
        if self.finite is not None and self._state.number >= self._state.looks_from:
            self.finite.note_clipping(parts)
        norm = self.sharing.clip(parts, most, norm_type, error_if_nonfinite=error_if_nonfinite)
        if norm is None:
            norm = clip_norm(parts, most, norm_type, error_if_nonfinite, foreach)
        if self.finite is not None:
            self.finite.note_norm(norm)
        return norm

    @property
    def can_wait_for_weights(self) -> bool:
        """Whether gradients can be weighed once, at a step's end: until then nobody shares, sees or overflows them."""
        if any(map(_has_hooks, self._model.modules())) or any(map(_has_hooks, self._model.parameters())):
            return False
        if any(part._post_accumulate_grad_hooks for part in self._trained()):
            return False  # also of what lies outside of the model
        trained = set(self._trained())
        if any(part.requires_grad and part not in trained for part in self._model.parameters()):
            return False  # its gradient is of earlier steps too, which have had their weights
        is_kept = self.sharing.shows_gathered and not self.sharing.shares_first
        return is_kept and not any(parameter.dtype is torch.float16 for parameter in self.parameters())

    def weigh_gathered(self, weight: float) -> None:
        """Multiply the gradients of a step's earlier micro-steps by the weight that these have in common."""
        if not self._is_counted:
            gradients = self._gathered()
            if gradients:
                torch._foreach_mul_(gradients, weight)
                self._note_witness()

    def check(self) -> None:
        """Raise where this micro-step's gradients cannot be those of the step."""
        state, before = self._state, self._witness
        if self._weighing.is_in_pipeline:
            self._weighing.refuse_pipeline()
        if self.on_unused is not None and state.has_backward:
            self._look_for_unused(self.on_unused)
        if state.phase.is_last:
            unfinished = self.sharing.why_unfinished()
            if unfinished is not None:
                raise StepError(unfinished)
            if not state.has_backward and not self._is_alone and state.num_begun == 0:
                raise StepError(_UNSHARED)
            if state.is_guarded and not state.is_shared and not self._is_alone:
                raise StepError(_UNSHARED)
            if self._num_items is not None and not self._is_divided:
                raise StepError(_UNCOUNTED.format("the last micro-step has none"))
        self._note_witness()
        if not state.phase.is_last:
            sharing = self.sharing
            is_shown = state.has_backward and (sharing.shows_gathered or sharing.is_sharing)
            if is_shown and (self._witness is None or self._witness[0].grad is None):
                raise StepError(_LOST)
            if self._tampering.is_looking and self._tampering.has_seen_change():
                raise StepError(_CHANGED)
            if not sharing.shows_gathered:
                self._check_hidden()
        if self._is_counted is None and self._witness != before and not state.is_exact:
            self._is_counted = False
        if state.is_exact or not self._is_needed or (state.weight == 1.0 and self._is_alone):
            return
        self._weighing.check()
        if not state.has_backward and self._witness != before:
            raise StepError(self._why_unweighted())

    def _look_for_unused(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once if the pass that has ended has left out a parameter that is trained."""
        if self._state.index == 0:
            is_found = self.sharing.leaves_unused()
        else:  # each has a gradient of an earlier one, which a pass that uses it changes
            is_found = any(counter._version == number for counter, number in self._unshared)
        self._unshared.clear()
        if is_found:
            tell()
            self.on_unused = None
        elif self._tampering.is_looking and not self._state.phase.is_last:
            self._unshared = self.sharing.versions_of_unshared()

    def answer(self) -> None:
        """Make the backward pass that other ranks wait for, with zeros, where this rank has left it out.

        Torch's DDP counts on it: without it a later pass would be taken for it.
        """
        outputs, self.awaited = self.awaited, []
        cleared = [part for part in self.parameters() if part.grad is None] if self._state.num_stepped else []
        if outputs:
            self._weighing.is_exact = True
            try:
                torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
            finally:
                self._weighing.is_exact = False
            if self._has_counted and self._state.phase.is_last and not self._is_divided:  # others add up their items
                self.sharing.add_up(torch.zeros((), dtype=torch.float64, device=outputs[0].device))
        for part in cleared:  # after the step has committed
            part.grad = None

    def drop(self) -> None:
        """Drop this step's gradients, and give up a pass that failed."""
        self._forget_counts()
        self._unshared.clear()
        self.sharing.forget()
        if self.sharing.forgets_passes:
            self.awaited.clear()
        for parameter in self.parameters():
            parameter.grad = None

    def end_step(self) -> None:
        """End a step: the next one counts its items anew, and shares buffers."""
        self._forget_counts()
        self._has_shared_buffers = self.shares_first = False
        self._weighing.counts = not self._is_alone or self._has_counted

    def _check_hidden(self) -> None:
        """Raise where a pass that did not go through the model's outputs has added to gradients outside of ``grad``."""
        before, self._hidden = self._hidden, self.sharing.num_hidden
        if not self._state.has_backward and not self._state.is_exact and self._hidden != before:
            raise StepError(self._why_unweighted())

    def _why_unweighted(self) -> str:
        return _UNWEIGHTED if self._state.has_forward else _NOT_CALLED

    def _trained(self) -> Iterator[torch.Tensor]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _gathered(self) -> list[torch.Tensor]:
        """The parts of all gradients that lie on this rank."""
        parts = [*self._trained(), *self._others]
        found = [part.grad for part in (parts if len(self.optimizers) == 1 else dict.fromkeys(parts))]
        return [each.to_local() if isinstance(each, DTensor) else each for each in found if each is not None]

    def _seed(self, weight: float, loss: torch.Tensor) -> torch.Tensor:
        """The gradient, ``weight``, that a backward pass starts with; kept, since making it costs as much as that."""
        key = (weight, loss.dtype, loss.device)
        seed = self._seeds.get(key)
        if seed is None or seed.shape != loss.shape:
            if len(self._seeds) > 64:  # tails of many sizes
                self._seeds.clear()
            seed = self._seeds[key] = torch.full_like(loss, weight, requires_grad=False)
        return seed

    def _count(self, loss: torch.Tensor, num_items: float | torch.Tensor) -> None:
        state = self._state
        if self._num_items is None and not self.sharing.is_average:
            raise StepError(_DIVIDED)
        if state.phase.is_last and state.has_backward:
            raise StepError(_UNCOUNTED.format("it was called twice in the last micro-step"))
        count = torch.as_tensor(num_items, dtype=torch.float64, device=loss.device).detach()
        self._num_items = count.clone() if self._num_items is None else self._num_items + count

    def _set_left_aside(self) -> None:
        """Set gradients left from the step before aside, so that they are not divided by the items of this one."""
        if not any(optimizer.may_have_left_gradients for optimizer in self.optimizers):
            return
        for part in self._trained():
            if part.grad is not None:
                self._left.append((part, part.grad.clone()))
                part.grad = None

    def _forget_counts(self) -> None:
        self._left = []
        self._num_items = self._is_counted = self._witness = None
        self._hidden = 0
        self._is_divided = False

    def _note_pass(self, *, is_counted: bool, is_first: bool) -> None:
        """Note a backward pass; raise where it cannot follow the earlier ones of its step."""
        if self._is_counted is None:
            self._is_counted = is_counted
        elif self._is_counted is not is_counted:
            raise StepError(_UNCOUNTED.format(f"{'with' if is_counted else 'without'} here, and otherwise before"))
        if self._witness is not None and self._state.num_begun == 0:  # else it may be cleared already
            parameter, version = self._witness
            if parameter.grad is None or (
                is_first and not self.sharing.writes_gradients and parameter.grad._version != version
            ):
                raise StepError(_LOST)

    def _note_witness(self) -> None:
        """Look at the first parameter that has a gradient, to notice later where that was changed or lost."""
        for part in self._trained() if self._witness is None else (self._witness[0],):
            gradient = part.grad
            if gradient is not None:
                self._witness = part, gradient._version
                return

    def _divide(self) -> None:
        """Turn the ranks' averaged sums into the mean over all items of the step."""
        total = self._num_items
        assert total is not None
        self._has_counted = True
        self.sharing.add_up(total)
        if not total.item() > 0:
            raise StepError(
                f"the num_items of the step add up to {total.item():g} over all ranks; allowed: more than 0"
            )
        gradients = self._gathered()
        torch._foreach_div_(gradients, float(total.item() / self.sharing.num_ranks))
        with torch.no_grad():
            for part, gradient in self._left:
                part.grad = gradient if part.grad is None else part.grad.add_(gradient)
        self._left = []
        self._is_divided = True

    def _note_output(self, output: torch.Tensor) -> None:
        """Note an output of the model, whose backward pass other ranks will wait for if it shares gradients."""
        sharing = self.sharing
        if sharing.is_overridden:
            raise StepError(_OVERRIDDEN)
        if sharing.exchanges_always or (sharing.is_sharing and not self._is_alone):
            self.awaited.append(output)

    def _note_backward(self) -> None:
        """Note that a backward pass has come to the model's outputs."""
        if self.sharing.is_overridden:
            raise StepError(_OVERRIDDEN)
        is_first, self._state.has_backward = not self._state.has_backward, True
        self.awaited.clear()
        if self._tampering.is_looking and not self._state.phase.is_last:
            after_pass(lambda: self._tampering.note(self._trained()))
        if not self._weighing.is_exact:
            self._note_pass(is_counted=False, is_first=is_first)
            if self._state.is_guarded and self._state.phase.is_last and self._sharing_pass != current_pass():
                self._sharing_pass = current_pass()
                after_pass(self._share_guarded)

    def _share_guarded(self) -> None:
        self.share_guarded()
        if self._witness is not None:
            self._witness = None
            self._note_witness()

    def _after_sharing_buffers(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._state.phase.is_inside and not self._has_shared_buffers and self.on_shared_buffers is not None:
            self._has_shared_buffers = True
            self.on_shared_buffers()


def _is_same_ddp(one: Sharing, other: Sharing) -> bool:
    """Whether the same DDP modules average gradients in both."""
    return len(one.wrapped) == len(other.wrapped) and all(
        wrapped is again and isinstance(wrapped, DistributedDataParallel)
        for wrapped, again in zip(one.wrapped, other.wrapped, strict=True)
    )


def _has_hooks(part: Any) -> bool:
    """Whether a module or parameter has hooks that see, and may change, gradients."""
    names = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(part, name, None) for name in names)
