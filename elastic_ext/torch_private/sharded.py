"""Models whose state is saved: how FSDP1 and DTensors cut it, and more, by private parts of torch.

Each function looks for what it needs first, and raises where this torch keeps it elsewhere: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from elastic_ext.errors import ElasticError
from elastic_ext.version import TESTED_TORCH_IN_WORDS

__all__ = [
    "FlatPart",
    "flat_parts",
    "has_hooks",
    "num_outer",
    "pickle_in",
    "reshard_flat",
    "sharded_dim",
    "transient_buffers",
    "version_of",
]


@dataclass(frozen=True, slots=True)
class FlatPart:
    """The part of one parameter that a rank has in FSDP1's flat parameter."""

    parameter: torch.Tensor
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    start: int
    """The first element of the part, in the flattened parameter."""
    end: int
    """The element after the part, in the flattened parameter."""
    is_cut: bool
    """Whether FSDP1 shards the parameter over ranks, rather than keep replicas of it."""
    fault: str | None
    """Why start and end cannot be relied on, in words; None if they can."""


def transient_buffers(module: nn.Module) -> frozenset[str]:
    """The names of a module's own buffers that ``state_dict()`` leaves out, since they are not persistent."""
    return frozenset(_found(module, "_non_persistent_buffers_set"))


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has hooks that are called when its gradient comes."""
    return bool(_found(tensor, "_backward_hooks") or _found(tensor, "_post_accumulate_grad_hooks"))


def version_of(tensor: torch.Tensor) -> int:
    """A tensor's version: another number after each change in place that autograd is told of."""
    return int(_found(tensor, "_version"))


def pickle_in(saved: IO[bytes]) -> bytes:
    """The pickle in a file that torch.save has written, found by torch's own reader: another reader might find another
    one in a file made to mislead. RuntimeError where there is none."""
    data: bytes = _found(torch._C, "PyTorchFileReader")(saved).get_record("data.pkl")
    return data


def sharded_dim(placement: Placement) -> int | None:
    """Which dimension of a tensor a DTensor's placement shards, None if it shards none."""
    if isinstance(placement, Shard):
        return int(placement.dim)
    if type(placement).__name__ == "_StridedShard":
        return int(_found(placement, "dim"))
    return None


def num_outer(placement: Placement) -> int:
    """Into how many parts later mesh dimensions have cut a tensor before this placement: its split factor, or 1."""
    return int(_found(placement, "split_factor")) if type(placement).__name__ == "_StridedShard" else 1


def reshard_flat(module: FullyShardedDataParallel) -> None:
    """Have FSDP1 free the whole parameters that it has gathered for passes that are over.

    Its parameters are then their shards again, and what is written into these is gathered for the next pass: after a
    forward pass without a backward pass FSDP1 keeps what it gathered for the outermost module, and would use that.
    """
    if _found(module, "_is_root") is None:  # it was never called
        return
    for handle in _handles(module):
        if not _found(handle, "uses_sharded_strategy"):
            continue
        state = str(_found(_found(handle, "_training_state"), "name"))
        if state != "IDLE":
            raise ElasticError(
                f"FSDP1 is in the middle of a pass ({state}), where its parameters cannot be saved or loaded; "
                "save and load after backward()"
            )
        reshard, after, _ = _found(handle, "reshard"), _found(handle, "post_reshard"), _found(handle, "_prefetched")
        reshard(True)
        after()
        handle._prefetched = False


def flat_parts(module: FullyShardedDataParallel) -> Iterator[FlatPart]:
    """This rank's part of each parameter that an FSDP1 module holds flattened, without FSDP1 modules inside it."""
    for handle in _handles(module):
        flat = _found(handle, "flat_param")
        if not _found(handle, "_use_orig_params"):
            raise ValueError(
                "the model is in FullyShardedDataParallel with use_orig_params=False, where optimizers hold one flat "
                "tensor that goes by no parameter's name; give use_orig_params=True"
            )
        is_cut = bool(_found(handle, "uses_sharded_strategy"))
        parameters: Sequence[torch.Tensor] = _found(flat, "_params")
        columns = (_found(flat, name) for name in ("_shapes", "_contiguities", "_param_extensions"))
        for parameter, shape, is_contiguous, extension, info in zip(
            parameters, *columns, _found(flat, "_shard_param_infos"), strict=True
        ):
            start, end = (_found(info, "intra_param_start_idx"), _found(info, "intra_param_end_idx"))
            if not is_cut:
                start, end = 0, shape.numel() - 1
            elif not _found(info, "in_shard"):
                start, end = 0, -1
            yield FlatPart(parameter, tuple(shape), start, end + 1, is_cut, _flat_fault(bool(is_contiguous), extension))


def _flat_fault(is_contiguous: bool, extension: object) -> str | None:
    if extension is not None:
        return "is cut by tensor parallelism inside FSDP1; use fully_shard, which tells what lies where"
    if not is_contiguous:
        return "was not contiguous when FSDP1 flattened it; make it so before wrapping, with contiguous()"
    return None


def _handles(module: FullyShardedDataParallel) -> list[Any]:
    handle = _found(module, "_handle")  # None where a module has no parameters of its own
    return [] if handle is None else [handle]


def _found(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name)
    except AttributeError:
        raise ElasticError(
            f"torch {torch.__version__} keeps {name} of a {type(holder).__name__} in another place than the versions "
            f"that this library knows ({TESTED_TORCH_IN_WORDS}); use one of those to save and load such models"
        ) from None
