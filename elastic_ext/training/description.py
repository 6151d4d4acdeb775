"""What a trainer holds, in words: ``trainer.describe()``, and the line that a person sees as training starts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from elastic_ext.records.text import counted

if TYPE_CHECKING:
    from .batches import Batches
    from .checkpoints.checkpoints import Checkpoints
    from .training import Training

__all__ = ["description", "start_line"]


def description(training: Training, *, is_prepared: bool) -> str:
    """What a training is made of and how far it has come, a line for each thing."""
    rows = [*_of_model(training)]
    if is_prepared:
        rows = [*_of_job(training), *rows, *_of_prepared(training)]
    else:
        rows.append(("steps", f"{training.counts.global_step} so far; prepare() was not called yet"))
    return "\n".join(f"{name:<12} {words}" for name, words in rows)


def start_line(training: Training, num_keys: int) -> str:
    """One line about a training that begins: its job, where it begins, its config file, and how to look at it.

    ``num_keys`` is how many keys the config file, found at the start, sets otherwise than the script.
    """
    settings, step, checkpoints = training.follower.settings, training.counts.global_step, training.checkpoints
    begins = "training begins"
    if step:
        path = None if checkpoints is None else checkpoints.path
        begins = f"training goes on after step {step}" + ("" if path is None else f" of {path}")
    otherwise = f", which sets {counted(num_keys, 'key')} otherwise than the script" if num_keys else ""
    return (
        f"job {settings.job}, {counted(training.ranks.world_size, 'rank')}: {begins}; config file "
        f"{settings.config_file}{otherwise}; to look at the job: {_status_command(training)}"
    )


def _status_command(training: Training) -> str:
    return f"elastic-ext status {shlex.quote(str(training.follower.settings.run_dir))}"


def _of_job(training: Training) -> Iterator[tuple[str, str]]:
    settings, ranks = training.follower.settings, training.ranks
    yield "job", f"{settings.job}, rank {ranks.rank} of {counted(ranks.world_size, 'rank')}"
    if settings.enabled:
        yield "look at it", _status_command(training)
    else:
        yield "look at it", "not possible: ELASTIC_EXT=off, so that nothing is written"


def _of_model(training: Training) -> Iterator[tuple[str, str]]:
    parameters = list(training.model.parameters())
    sharing, plan = training.gradients.sharing, training.spread.plan
    devices = ", ".join(dict.fromkeys(str(each.device) for each in parameters)) or "no device"
    num_elements = sum(each.numel() for each in parameters if not is_lazy(each))
    num_lazy = sum(map(is_lazy, parameters))
    lazy = f"; {counted(num_lazy, 'parameter')} of lazy modules, without a shape so far" if num_lazy else ""
    yield "model", f"{type(training.model).__name__}, {num_elements:,} elements of parameters on {devices}{lazy}"
    if sharing.num_ranks * sharing.num_parts > 1:
        parts = f", each over {counted(sharing.num_parts, 'rank')}" if sharing.num_parts > 1 else ""
        yield "replicas", f"{counted(sharing.num_ranks, 'replica')} that share gradients by {sharing.name}{parts}"
    if plan is not None:
        yield "plan", str(plan)


def _of_prepared(training: Training) -> Iterator[tuple[str, str]]:
    counts, config, file = training.counts, training.follower.config, training.follower.settings.config_file
    yield "batch", _batch_in_words(training.batches, training.gradients.sharing.num_ranks)
    yield (
        "steps",
        f"{counts.global_step} so far; epoch {counts.epoch} is {'under way' if counts.is_in_epoch else 'next'}",
    )
    yield "config", f"{config.label} in force; file {file}"
    yield "checkpoints", _checkpoints_in_words(training.checkpoints)


def _batch_in_words(batches: Batches, num_replicas: int) -> str:
    samples = batches.step_samples
    words = "an unknown number of samples a step" if samples is None else f"{counted(samples, 'sample')} a step"
    if not batches.largest:
        return f"{words}, in one micro-batch for each of {counted(num_replicas, 'replica')}"
    num_micro_steps = -(-batches.share // batches.largest)
    return (
        f"{words}: {counted(num_replicas, 'replica')} with {counted(num_micro_steps, 'micro-step')} of at most "
        f"{counted(batches.largest, 'sample')}"
    )


def _checkpoints_in_words(checkpoints: Checkpoints | None) -> str:
    if checkpoints is None:
        return "none; give shared_storage_path"
    if checkpoints.path is None:
        return f"in {checkpoints.job.root}, {checkpoints.interval_in_words}; none so far"
    return f"in {checkpoints.path.parent}, {checkpoints.interval_in_words}; the newest is {checkpoints.path.name}"
