"""Whether a job's members can change while its processes go on, and what a worker that joins has to have in common.

Ranks that train say at ``prepare()`` why their members could change by a restart alone. A worker that joins compares
what it is with what they are before anything moves: model, optimizers, data, arguments, rates that the loop writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from elastic_ext.data.sources import CountedSource, RewindableSource
from elastic_ext.fsdp.checkpoint.job import versions
from elastic_ext.members.regroup import present_backend
from elastic_ext.records.text import counted
from elastic_ext.torch_private.groups import groups_made

from .checks import check_shared

if TYPE_CHECKING:
    from .training import Training

__all__ = ["check_all_are_shared", "facts_of", "why_not_other_groups", "why_not_these_rates", "why_restart"]


def why_restart(training: Training) -> str:
    """Why members of this job can change by a restart alone, a sentence; empty where they can change live."""
    batches, loader = training.batches, training.batches.loader
    if training.accelerated is not None:
        return "accelerate has prepared the model, and keeps a world of its own"
    if loader is not None and batches.source is None and getattr(loader, "batch_size", 0) is None:
        return "a batch sampler of the script's own says which batches each rank has"
    if batches.source is None or not isinstance(loader, CountedSource) or not isinstance(loader, RewindableSource):
        kind = "no dataloader was given to the trainer" if loader is None else f"a {type(loader).__name__}"
        return f"{kind}: only an ElasticDataLoader can be told how many ranks there are, and hand samples out again"
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return "an IterableDataset is read by each rank from a position of its own, which other ranks cannot go on from"
    if getattr(loader, "has_own_positions", False) or batches.drawing is not None:
        return "a batch sampler of the script's own says which batches each rank has"
    if batches.ordered is not None and batches.ordered.draws_order:
        return "a sampler of the script's own draws the order of samples, which ranks that come do not know"
    if batches.is_gathered_by_hand:
        return (
            "the loop gathers gradients over several micro-batches by itself, and counts them from where it began: "
            "whoever joins would step in other ones"
        )
    if training.options.share_weights is not None:
        return "share_weights has a weight for each of so many ranks"
    backend = present_backend()
    if backend != "gloo":
        return f"the process groups are of {backend}, which was not tried; members change live on gloo"
    why_not = training.spread.why_not_other_ranks()
    return why_not or why_not_other_groups(training) or ""


def why_not_other_groups(training: Training) -> str | None:
    """Why the process groups of the script stand against it; None where it has none, or makes them anew by itself."""
    made = groups_made() or []
    ours = {id(dist.group.WORLD), *map(id, training.spread.groups)}
    others = [group for group in made if id(group) not in ours and not training.ranks.has_group(group)]
    if not others or training.on_members:
        return None
    return (
        f"the script has made {counted(len(others), 'process group')} of its own, which would end; have it make them "
        "anew in a function that trainer.on_members() is given"
    )


def facts_of(training: Training) -> dict[str, Any]:
    """What must be the same on ranks that train together, by names for people."""
    parts = training.prepared
    loader, root = training.batches.loader, training.spread.root
    facts: dict[str, Any] = {
        **versions(),
        "the model": type(root).__name__,
        "the optimizers": [type(each).__name__ for each in training.optimizers],
        "the schedulers": [type(each.inner).__name__ for each in parts.schedulers],
        "a scaler": parts.scaler is not None,
        "registered state": sorted(training.registered),
        "functions given to on_members": len(training.on_members),
        "the dataset's length": _length_of(loader),
        "drop_last": bool(getattr(loader, "drop_last", False)),
        "rollback": str(training.options.rollback),
        "arguments for checkpoints": training.request.to_compare(),
        "checkpoints": None if training.checkpoints is None else str(training.checkpoints.job.root),
        "saving beside training": None if training.checkpoints is None else training.checkpoints.job.saver.can_save,
        "the job": None if training.checkpoints is None else training.checkpoints.job.name,
        "agree_every_steps": training.following.agree_every_steps,
        **{name: str(value) for name, value in training.follower.agreement.compared_at_start.items()},
    }
    for name, parameter in root.named_parameters():
        is_trained = "trained" if parameter.requires_grad else "frozen"
        facts[f"the parameter {name}"] = [list(parameter.shape), str(parameter.dtype), is_trained]
    for name, buffer in root.named_buffers():
        facts[f"the buffer {name}"] = [list(buffer.shape), str(buffer.dtype)]
    sizes = [[len(group["params"]) for group in each.param_groups] for each in training.optimizers]
    facts["the groups of parameters"] = sizes  # last: where a model differs, that says more
    return facts


def check_all_are_shared(training: Training) -> None:
    """Raise where optimizers train parameters that nothing would average over the ranks: one rank alone may do that."""
    sharing = training.gradients.sharing
    groups = [group for each in training.prepared.optimizers for group in each.param_groups]
    left_out = partial(sharing.left_out, as_others_join=True)
    check_shared(training.model, groups, left_out=left_out, how=sharing.name)


def why_not_these_rates(training: Training, theirs: Sequence[float | None]) -> str:
    """Why a worker that joins cannot go on with the rates of a loop that writes them, a sentence; empty where it can.

    ``theirs`` are, by optimizer, the rates that the scripts of the others gave, where what their loops write starts
    from those.
    """
    for optimizer, given in zip(training.prepared.optimizers, theirs, strict=False):
        if given is not None and given != optimizer.rates.given:
            return (
                f"the loop writes learning rates, which start from the one that {type(optimizer.inner).__name__} was "
                f"made with: {optimizer.rates.given:g} here, and {given:g} on the ranks that train"
            )
    return ""


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError, NotImplementedError):
        return None
