"""Blocks: the parts that a model repeats, found or named; and which of them form a unit, or are computed again.

Activations are computed again by torch's composable checkpointing, which changes no name; it is put on a block when it
is first asked for, and from then on only told whether to act.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import zip_longest
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from elastic_ext.errors import ElasticError
from elastic_ext.torch_private.module_hooks import Hook, is_compiled
from elastic_ext.torch_private.out_of_memory import is_out_of_memory

from .plan import blocks_recomputed

__all__ = ["RecomputeTrial", "Units", "blocks_of", "recompute", "why_not_recompute"]

Units: TypeAlias = type[nn.Module] | Sequence[str] | None
"""How to find a model's blocks: by a class of modules, by their names, or None for repeated blocks that are found."""

_NOT_ALIKE = (
    "activation_checkpoint is given, and a block, {kind}, computes something else when it is computed again: {how}. "
    "An input of the block, or something that the block keeps, grows with each pass, as a key-value cache does: call "
    "the model with use_cache=False (model.config.use_cache = False), or leave activation_checkpoint at 0"
)
_Saved: TypeAlias = "tuple[tuple[int, ...], torch.dtype]"

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def blocks_of(model: nn.Module, units: Units = None) -> list[nn.Module]:
    """The model's blocks, in its order; ValueError where ``units`` names none."""
    if units is None:
        return _repeated(model)
    if isinstance(units, type) and issubclass(units, nn.Module):
        found = [module for module in _outermost(model, units) if any(True for _ in module.parameters())]
        if not found:
            raise ValueError(f"units is the class {units.__name__}, and the model has no module of it with parameters")
        return found
    is_list = isinstance(units, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in units)
    if not is_list:
        raise ValueError(f"units is {units!r}; allowed: a class of modules, a list of names of modules, or None")
    by_name = dict(model.named_modules())
    unknown = [name for name in units if not name or name not in by_name]
    if unknown:
        raise ValueError(f"units has {unknown[0]!r}, which is no module within the model; see model.named_modules()")
    chosen = {id(by_name[name]): name for name in units}
    found = [module for module in model.modules() if id(module) in chosen]
    for module in found:
        for inner in module.modules():
            if inner is not module and id(inner) in chosen:
                raise ValueError(
                    f"units has {chosen[id(module)]!r} and {chosen[id(inner)]!r}, which lies within it; leave one out"
                )
    return found


def recompute(blocks: Sequence[nn.Module], ratio: float) -> None:
    """Have the activations of a share of the blocks computed again in the backward pass."""
    for block, is_chosen in zip(blocks, blocks_recomputed(len(blocks), ratio), strict=True):
        state = _recomputing(block)
        if state is None:
            if not is_chosen:
                continue
            passed = _PassedBlock()
            block.register_forward_pre_hook(passed.note)  # called before that of composable checkpointing
            _composable()(block, context_fn=passed.contexts)
            state = _recomputing(block)
        state.enable_hook = is_chosen


class _PassedBlock:
    """Which block is computed: a model's copy has the hooks of the model, so they are not of one block alone."""

    def __init__(self) -> None:
        self._block: nn.Module | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _PassedBlock:
        return self

    def note(self, block: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Note that a pass comes to ``block``."""
        self._block = block

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts in which the block is computed, and computed again."""
        assert self._block is not None
        return nullcontext(), _with_copies_of_buffers(self._block)


@contextmanager
def _with_copies_of_buffers(block: nn.Module) -> Iterator[None]:
    """A context in which a block's modules have copies of their buffers, so that a pass changes none of them.

    A BatchNorm would count a batch twice that is computed again. The buffers themselves come back as they were: a graph
    that has kept one is not to see it change.
    """
    buffers = [(part, dict(part._buffers)) for part in block.modules() if part._buffers]
    try:
        for part, own in buffers:
            part._buffers.update({name: None if each is None else each.clone() for name, each in own.items()})
        yield
    finally:
        for part, own in buffers:
            part._buffers.update(own)


class RecomputeTrial:
    """Whether blocks can be computed again: the next pass computes the first block of each kind twice, on copies.

    What each computation keeps for the backward pass has to be the same: else gradients are wrong, or the backward pass
    fails. Nothing is left of either, and hooks are not called. Not tried are compiled models, blocks that have units of
    their own within, and blocks that are given what cannot be copied.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], *, raises: bool = False) -> None:
        """With ``raises``, the pass raises ValueError where blocks cannot be computed again."""
        self.why_not: str | None = None
        """Why blocks cannot be computed again, as far as passes have told; None where nothing stands against it."""
        self._raises = raises
        kinds = {} if any(map(is_compiled, model.modules())) else {type(block): block for block in reversed(blocks)}
        self._handles: dict[nn.Module, RemovableHandle] = {
            block: block.register_forward_pre_hook(Hook(self._look), with_kwargs=True)
            for block in kinds.values()
            if not any(isinstance(part, FSDPModule) for part in block.modules() if part is not block)
        }

    @property
    def is_over(self) -> bool:
        """Whether no coming pass can tell anything more."""
        return not self._handles

    def stop(self) -> None:
        """End the trial: leave later passes alone."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _look(self, block: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or block not in self._handles:
            return
        why_not = _why_not_alike(block, arguments, options)
        self._handles.pop(block).remove()
        self.why_not = self.why_not or why_not
        if why_not is not None and self._raises:
            raise ValueError(why_not)


class _SharingTensors(TorchFunctionMode):
    """A context in which copies of objects share their tensors with the originals."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is torch.Tensor.__deepcopy__ else function(*args, **(kwargs or {}))


def _why_not_alike(block: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> str | None:
    """What differs where a block is computed twice; None where nothing does, or where it cannot be tried."""
    try:
        with _SharingTensors():
            arguments, options = copy.deepcopy((arguments, options))
    except Exception as error:  # of whatever class: an object says by itself that it is not to be copied
        if is_out_of_memory(error):
            raise
        return None
    devices = {part.device.index for part in block.parameters() if part.device.type == "cuda"}
    with _as_it_is(block), torch.random.fork_rng(devices=[index for index in devices if index is not None]):
        try:
            first = _saved_by(block, arguments, options)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None  # the pass itself says so
        try:
            second = _saved_by(block, arguments, options)
        except Exception as error:  # so the backward pass would
            if is_out_of_memory(error):
                raise
            how = f"the second time it raises {type(error).__name__}: {error}"
            return _NOT_ALIKE.format(kind=_kind(block), how=how)
    for one, other in zip_longest(first, second):
        if one != other:
            how = f"for its backward pass it keeps {_told(one)} the first time and {_told(other)} the second"
            return _NOT_ALIKE.format(kind=_kind(block), how=how)
    return None


def _saved_by(block: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> list[_Saved]:
    """Shapes and types of what a block keeps for its backward pass, in order; its hooks are not called."""
    found: list[_Saved] = []

    def note(tensor: torch.Tensor) -> None:
        found.append((tuple(tensor.shape), tensor.dtype))

    with torch.autograd.graph.saved_tensors_hooks(note, _no_backward):
        block.forward(*arguments, **options)
    return found


def _no_backward(kept: object) -> NoReturn:
    raise AssertionError("nothing is computed backward here")


@contextmanager
def _as_it_is(block: nn.Module) -> Iterator[None]:
    """A context after which a block's modules, their attributes and buffers are as before it.

    What users have hooked is not called meanwhile: it would keep what it is given, and the pass would use it.
    """
    attributes = [(part, dict(vars(part)), dict(part._buffers)) for part in block.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in block.buffers()]
    try:
        for part, _, _ in attributes:
            part._forward_hooks, part._forward_pre_hooks = OrderedDict(), OrderedDict()
        yield
    finally:
        for part, own, named in attributes:
            vars(part).clear()
            vars(part).update(own)
            part._buffers.update(named)
        for buffer, values in buffers:
            buffer.data.copy_(values)  # of which a graph that has kept the buffer is to know as little as of the change


def _kind(block: nn.Module) -> str:
    """The name that a block's class has from its author: fully_shard gives the block a class of its own."""
    return next(kind for kind in type(block).__mro__ if not issubclass(kind, FSDPModule)).__name__


def _told(saved: _Saved | None) -> str:
    return "nothing more" if saved is None else f"a {saved[1]} of shape {saved[0]}"


def why_not_recompute(model: nn.Module, blocks: Sequence[nn.Module], ratio: float) -> str | None:
    """Why a share of the model's blocks cannot be computed again; None where it can."""
    if ratio and not blocks:
        return "activation_checkpoint is given, and no repeated blocks were found; name them with units="
    if ratio and _are_in_compiled(model, {id(block) for block in blocks}, is_within=False):
        return (
            "activation_checkpoint is given, and blocks are compiled as parts of a larger module, where torch cannot "
            "compute them again; compile each by itself instead, with block.compile()"
        )
    try:
        _composable()
    except ElasticError as error:
        return str(error) if ratio else None
    return None


def _are_in_compiled(module: nn.Module, blocks: Collection[int], *, is_within: bool) -> bool:
    if id(module) in blocks:
        return is_within
    is_within = is_within or is_compiled(module)
    return any(_are_in_compiled(part, blocks, is_within=is_within) for part in module.children())


def _repeated(model: nn.Module) -> list[nn.Module]:
    """The blocks that lists of modules repeat, and those that stand alone in a list, in the order of the model."""
    several = list(_several(model))
    found = several + list(_lone(model, {type(block) for block in several}))
    chosen = {id(block) for block in found}
    return [module for module in model.modules() if id(module) in chosen]


def _several(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks in the outermost lists that hold several of them."""
    chosen = _candidates(module)
    for part in _parts(module):
        if len(chosen) > 1 and any(part is each for each in chosen):
            yield part
        else:
            yield from _several(part)


def _lone(module: nn.Module, kinds: Collection[type[nn.Module]]) -> Iterator[nn.Module]:
    """The blocks in lists that hold only one, if the block is of one of these kinds.

    Where there are no kinds: those that hold no other.
    """
    chosen = _candidates(module)
    for part in _parts(module):
        is_chosen = any(part is each for each in chosen)
        if is_chosen and (len(chosen) > 1 or type(part) in kinds):
            yield part
            continue
        inner = list(_lone(part, kinds))
        yield from inner
        if is_chosen and not kinds and not inner:
            yield part


def _candidates(module: nn.Module) -> list[nn.Module]:
    """The modules of a list that may be blocks: of one class, each of several parts, beside modules without parts."""
    if not isinstance(module, _LISTS):
        return []
    parts = _parts(module)
    if len(parts) == 1 or len({type(part) for part in parts}) > 1:
        parts = [part for part in parts if not isinstance(part, _LISTS)]
    else:
        parts = [part for part in parts if not isinstance(part, (nn.ModuleList, nn.ModuleDict))]  # nobody calls these
    parts = [part for part in parts if any(True for _ in part.children())]
    return parts if len({type(part) for part in parts}) == 1 else []


def _parts(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.children() if any(True for _ in part.parameters())]


def _outermost(model: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    for child in model.children():
        if isinstance(child, kind):
            yield child
        else:
            yield from _outermost(child, kind)


def _composable() -> Any:
    try:
        from torch.distributed._composable import checkpoint  # type: ignore[attr-defined]
    except ImportError:
        raise ElasticError(
            "this torch has no composable activation checkpointing, which the trainer turns on and off; leave "
            "activation_checkpoint at 0"
        ) from None
    return checkpoint


def _recomputing(block: nn.Module) -> Any:
    """What composable checkpointing keeps of a block; None where it was never put on the block."""
    checkpoint = _composable()
    try:
        state = checkpoint.state(block)
    except (AttributeError, KeyError, AssertionError):
        return None
    return state
