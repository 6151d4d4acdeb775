"""What memory the steps of a model take, worked out with tensors that have none. Runs in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elastic_ext.errors import ElasticError
from elastic_ext.fsdp.blocks import recompute, why_not_recompute
from elastic_ext.records.text import counted

from .live_bytes import BlockWatch, LiveBytes
from .model_description import dtype_of, from_description
from .peaks import Peaks, PeakTally
from .questions import MemoryAnswer, OptimizerKind, ParameterKind, Question

__all__ = ["analyse", "why_not_fake", "without_memory"]


# --- tensors that have shapes and no memory; the one place that asks torch for them, which has them in private -------
# Tried first with a small step whose memory is known: where this torch has none, or they behave otherwise, nothing is
# worked out with them.

_ROWS, _COLUMNS = 1 << 10, 1 << 8
_FLOAT_BYTES = 4


def without_memory() -> AbstractContextManager[Any]:
    """A context in which all tensors are fake, without memory; ImportError where this torch has no such tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    made: AbstractContextManager[Any] = FakeTensorMode()
    return made


def why_not_fake() -> str | None:
    """Why fake tensors do not tell the memory of a step in this torch; None where they do."""
    try:
        found = _tried()
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        return f"torch {torch.__version__} has no FakeTensorMode that elastic_ext can use: {error}"
    one = _ROWS * _COLUMNS * _FLOAT_BYTES
    wanted = one, 3 * one  # the result; the result, its gradient and that of the input
    if found != wanted:
        return (
            f"the fake tensors of torch {torch.__version__} give {found} bytes as the peaks of the forward and the "
            f"backward pass of a step whose peaks are {wanted}"
        )
    return None


def _tried() -> tuple[int, int]:
    """The peak bytes of the forward and of the backward pass of a step with one operation, without memory."""
    tally = PeakTally()
    with without_memory():
        given = torch.empty(_ROWS, _COLUMNS, requires_grad=True)
        with LiveBytes(tally):
            result = given.exp()
            tally.enter("backward")
            result.backward(torch.empty_like(result))  # type: ignore[no-untyped-call]
    return tally.peaks.forward_bytes, tally.peaks.backward_bytes


# --- what the steps of a model take, worked out with tensors that have no memory; in a process of its own ------------
# Each size is worked out at that size. Nothing is drawn from one size to another: what is highest in a step changes
# with the size of micro-batches, and so does what grows with it.

_NO_LOSS = (
    "the model gives no loss, and loss_fn was not given; give MemoryModel(..., loss_fn=...), which is called with "
    "what the model gives and the batch"
)
_MOST_DEPTH = 4  # of containers among what a model gives
_NUM_STEPS = 2  # of an optimizer: the first makes its state


class _Unlike(Exception):
    """Raised where the model or the loss of the user's functions is not like the one that is trained."""


def analyse(question: Question, tell: Callable[[MemoryAnswer], None]) -> None:
    """Work out a question's answers and ``tell`` each; where some are missing, the last one says why."""
    refusal = why_not_fake()
    if refusal is not None:
        tell(MemoryAnswer(problem=refusal))
        return
    with without_memory():
        try:
            model = _made(question)
        except _Unlike as error:
            tell(MemoryAnswer(problem=str(error)))
            return
        except Exception as error:  # the user's code: told to who has asked
            tell(
                MemoryAnswer(
                    problem="model_factory could not be called on fake tensors, which have no memory: "
                    f"{_in_words(error)}"
                )
            )
            return
        _tell_updates(model, question.optimizers, tell)
        _tell_passes(model, question, tell)


def _made(question: Question) -> nn.Module:
    model = question.factory.find()()
    if not isinstance(model, nn.Module):
        raise _Unlike(f"model_factory gives a {type(model).__name__}; allowed: a torch.nn.Module")
    model.train(question.is_training)
    _make_alike(dict(model.named_parameters()), question.parameters)
    return model


def _make_alike(made: Mapping[str, nn.Parameter], trained: Sequence[ParameterKind]) -> None:
    """Give the made parameters the types of those that are trained; _Unlike where these are other parameters."""
    names = {each.name for each in trained}
    if names != made.keys():
        other = min(names ^ made.keys())
        where = "the model that is trained" if other in made else "what model_factory gives"
        raise _Unlike(f"model_factory gives another model than the one that is trained: {where} has no {other}")
    for each in trained:
        parameter = made[each.name]
        if tuple(parameter.shape) != each.shape:
            raise _Unlike(
                f"model_factory gives another model than the one that is trained: {each.name} is of shape "
                f"{tuple(parameter.shape)} instead of {each.shape}"
            )
        parameter.requires_grad_(each.is_trained)
        if parameter.dtype != dtype_of(each.dtype):
            parameter.data = parameter.data.to(dtype_of(each.dtype))


# --- passes -----------------------------------------------------------------------------------------------------------


def _tell_passes(model: nn.Module, question: Question, tell: Callable[[MemoryAnswer], None]) -> None:
    """Tell what passes take at each size. Sizes that fail are left out, and the last answer says why the first did.

    Where the first one fails, no other is tried. A share of blocks that cannot be computed again is left out silently.
    """
    blocks = [model.get_submodule(name) for name in question.blocks]
    has_answered = has_flops = False
    problem: str | None = None
    for ratio in question.ratios:
        if ratio and why_not_recompute(model, blocks, ratio) is not None:
            continue
        for size in question.micro_batches:
            is_first = ratio == 0 and not has_flops
            try:
                recompute(blocks, ratio)
                found = _passes(model, question, size, blocks if is_first else ())
            except Exception as error:  # the user's code: told to who has asked
                if problem is None:
                    of_size = f"a step of {counted(size, 'sample')} on fake tensors, which have no memory, failed"
                    problem = f"{of_size}: {_in_words(error)}"
                if has_answered:
                    continue
                tell(MemoryAnswer(problem=problem))
                return
            passes = found.peaks.passes(micro_batch=size, activation_checkpoint=ratio)
            if is_first:
                kept = tuple(each // size for each in found.kept_by_blocks)
                tell(MemoryAnswer(passes=passes, flops_per_sample=found.num_flops // size, block_activation_bytes=kept))
            else:
                tell(MemoryAnswer(passes=passes))
            has_answered, has_flops = True, has_flops or ratio == 0
    if problem is not None:
        tell(MemoryAnswer(problem=problem))


class _Passes(NamedTuple):
    peaks: Peaks
    num_flops: int
    kept_by_blocks: tuple[int, ...]
    """Bytes that each block keeps for its backward pass; empty where that is not known."""


def _passes(model: nn.Module, question: Question, size: int, blocks: Sequence[nn.Module]) -> _Passes:
    """The memory of a micro-step of ``size`` samples, and what each of ``blocks`` keeps for its backward pass."""
    tally = PeakTally()
    live = LiveBytes(tally)
    watch = BlockWatch(blocks, tally)
    with _keeping_gradients(model, live), live:
        batch = None if question.batch is None else from_description(question.batch, size)
        at_hand = list(_tensors_in(batch, _MOST_DEPTH))
        given = _from_batch(from_description(question.given, size), at_hand)
        options = _from_batch(from_description(question.options, size), at_hand)
        del at_hand
        with _computing_in(question.autocast):
            with watch:
                outputs = model(*given, **options)
            tally.enter("loss")
            handles = _told_of_gradients(outputs, tally)
            loss = _loss_of(question, outputs, batch)
        if not question.keeps_outputs:
            del outputs
        loss.backward()  # type: ignore[no-untyped-call]
        tally.enter("after")
    for handle in handles:
        handle.remove()
    return _Passes(tally.peaks, live.num_flops, watch.kept_bytes)


@contextlib.contextmanager
def _keeping_gradients(model: nn.Module, live: LiveBytes) -> Iterator[None]:
    """A context in which each parameter's gradient is told to ``live``; there are none before and after."""

    def keep(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            live.keep_gradient(parameter.grad)

    trained = [each for each in model.parameters() if each.requires_grad]
    handles = [each.register_post_accumulate_grad_hook(keep) for each in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for each in trained:
            each.grad = None


def _from_batch(given: Any, at_hand: Sequence[torch.Tensor]) -> Any:
    """``given`` with its tensors replaced by those of the batch that are like them.

    What a model is given is taken from the batch, and does not take memory twice.
    """
    if isinstance(given, torch.Tensor):
        return next((each for each in at_hand if each.shape == given.shape and each.dtype == given.dtype), given)
    if isinstance(given, dict):
        return {key: _from_batch(part, at_hand) for key, part in given.items()}
    if isinstance(given, (tuple, list)):
        return type(given)(_from_batch(part, at_hand) for part in given)
    return given


def _told_of_gradients(outputs: Any, tally: PeakTally) -> list[RemovableHandle]:
    """Have the stage ``backward`` begin in ``tally`` with the first gradient of the model's outputs."""

    def begin(gradient: torch.Tensor) -> None:
        tally.enter("backward")

    found = [each for each in _tensors_in(outputs, _MOST_DEPTH) if each.requires_grad]
    return [each.register_hook(begin) for each in found]  # type: ignore[no-untyped-call]


def _computing_in(autocast: str | None) -> AbstractContextManager[Any]:
    return contextlib.nullcontext() if autocast is None else torch.autocast("cpu", dtype=dtype_of(autocast))


def _loss_of(question: Question, outputs: Any, batch: Any) -> torch.Tensor:
    """The loss that a backward pass begins with: what loss_fn gives, or what the model itself gives."""
    if question.loss is not None:
        loss = question.loss.find()(outputs, batch)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
            return loss
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise _Unlike(f"loss_fn gives {kind}; allowed: a tensor of one number with a gradient")
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
    if isinstance(found, (tuple, list)) and found:
        found = found[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.requires_grad:
        raise _Unlike(_NO_LOSS)
    return found


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 0 and isinstance(value, (tuple, list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(part, depth - 1)
    elif depth > 0 and hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors_in(getattr(value, name, None), depth - 1)


# --- the optimizers' steps --------------------------------------------------------------------------------------------


def _tell_updates(model: nn.Module, optimizers: Sequence[OptimizerKind], tell: Callable[[MemoryAnswer], None]) -> None:
    """Tell what the largest of the optimizers' steps takes; nothing where one of them cannot be worked out."""
    most = 0
    parameters = dict(model.named_parameters())
    try:
        for kind in optimizers:
            most = max(most, _update_bytes(kind, parameters))
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, ElasticError):
        return
    finally:
        for each in parameters.values():
            each.grad = None
    if optimizers:
        tell(MemoryAnswer(update_bytes=most))


def _update_bytes(kind: OptimizerKind, parameters: Mapping[str, nn.Parameter]) -> int:
    groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in kind.groups]
    optimizer = getattr(torch.optim, kind.name)(groups)
    for group in groups:
        for each in group["params"]:
            each.grad = torch.empty_like(each) if each.requires_grad else None
    tally = PeakTally()
    for _ in range(_NUM_STEPS):
        tally = PeakTally()
        with LiveBytes(tally):
            tally.enter("update")
            optimizer.step()
    return tally.peaks.update_bytes or 0


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if not isinstance(error, _Unlike) else text
