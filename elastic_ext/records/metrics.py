"""The records that training writes into the run directory: metrics, and what of a job can be changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from .json import JsonRecord
from .measures import Measures

__all__ = [
    "ADDED_UP",
    "CAN_GO_ON",
    "FILE",
    "SIZES",
    "TOLD_TO_END",
    "JobEvent",
    "JobFacts",
    "LearningFacts",
    "MemoryFacts",
    "ModelProfile",
    "NodeCalibration",
    "PassesMemory",
    "RankMetrics",
    "StepCensus",
    "StepTrace",
    "StepWindow",
]


# --- frozen records of what was seen, as they stand in the files of the run directory --------------------------------

CAN_GO_ON = "can-go-on"
"""The kind of a JobEvent by which a rank that was told to end says from which step training can go on: its ``step``."""
TOLD_TO_END = "told-to-end"
"""... and of one by which it says that nothing is saved to go on from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMetrics(JsonRecord):
    """What one rank is doing, as of ``time`` (seconds since 1970)."""

    time: float
    job: str
    generation: int
    rank: int
    world_size: int
    host: str
    pid: int
    step: int
    config_version: int
    config_revision: int
    agree_every_steps: int
    measures: Measures = field(default_factory=Measures)

    def check_read(self) -> None:
        if not all(type(each) in (int, float) and 0 <= each <= 1.001 for each in self.measures.shares.values()):
            raise ValueError("measures.shares holds what is no share")


def _added_up(how: Literal["sum", "by phase", "most", "any"], **given: Any) -> Any:
    """A field of a StepWindow that is added up over windows in a way that has a name."""
    return field(metadata={"added_up": how}, **given)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow(JsonRecord):
    """Where the time of one rank went, over some steps; those of a process follow each other without a gap."""

    begin: float
    end: float
    """Seconds since 1970."""
    rank: int
    world_size: int
    restart: int
    """How often the launcher had restarted the job's processes."""
    step: int = _added_up("most")
    """Steps that had committed since training began, at its end."""
    num_steps: int = _added_up("sum")
    """Steps that ended in it."""
    config_version: int
    config_revision: int
    seconds: Mapping[str, float] = _added_up("by phase")
    """By phase, as profile/phases.py names them; they add up to the time from its beginning to its end."""
    processor_seconds: Mapping[str, float] = _added_up("by phase", default_factory=dict)
    """What the training thread had of a processor, by phase."""
    typical: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step in the middle, by phase; empty where steps were not looked at one by one."""
    step_seconds: tuple[float, ...] = ()
    """What steps took: a tenth of them no longer than the first of these, then half, nine tenths, and all."""
    waiting_seconds: float | None = None
    """What steps wait for other ranks, a quarter of them no longer: a link is slow in every step, a rank that has no
    processor in some. None where steps were not looked at one by one."""
    computing_seconds: float | None = None
    """What transfers, passes and the optimizer took of steps, a quarter of them no longer; None as above."""
    is_settling: bool = _added_up("any", default=False)
    """Whether something that is to be there was still on its way then, such as workers: steps will be quicker."""
    num_samples: int = _added_up("sum", default=0)
    """Of all ranks together."""
    num_tokens: int = _added_up("sum", default=0)
    num_bytes: int = _added_up("sum", default=0)
    """What this rank's model was given, in steps that were looked at one by one,"""
    num_detailed: int = _added_up("sum", default=0)
    """... and how many those were."""
    memory_bytes: int | None = None
    """What this process holds of the machine's memory, at the end,"""
    accelerator_bytes: int | None = None
    """... and of its accelerator's,"""
    accelerator_peak_bytes: int | None = _added_up("most", default=None)
    """... and the most since torch's peak counters began anew."""

    @property
    def length(self) -> float:
        return self.end - self.begin

    def check_read(self) -> None:
        lengths = [*self.seconds.values(), *self.processor_seconds.values(), *self.typical.values(), *self.step_seconds]
        lengths.extend(each for each in (self.waiting_seconds, self.computing_seconds) if each is not None)
        if not all(type(each) in (int, float) and 0 <= each < math.inf for each in lengths):
            raise ValueError(
                "seconds, processor_seconds, typical, step_seconds, waiting_seconds or computing_seconds hold what is "
                "no length of time"
            )


ADDED_UP: Mapping[str, str] = {
    each.name: each.metadata["added_up"] for each in fields(StepWindow) if "added_up" in each.metadata
}
"""How fields of a StepWindow are added up over windows, by the field's name; of most others the last value counts."""
SIZES = tuple(each.name for each in fields(StepWindow) if each.type == "int | None")
"""The fields of a StepWindow that hold bytes of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCensus(JsonRecord):
    """What one micro-step of a rank asks of its machine, counted once: forward, backward and the optimizer's step."""

    time: float
    rank: int
    num_samples: int
    """Of the micro-batch."""
    num_ops: int
    """Operations that were dispatched."""
    num_bytes: int
    """What they read and wrote."""
    num_flops: int
    """Of matrix products, convolutions and attention."""
    optimizer_ops: int
    """How many of these operations are the optimizer's, which come once in a step,"""
    optimizer_bytes: int
    """... and how many of the bytes."""
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrace(JsonRecord):
    """One step of a rank as torch's profiler saw it."""

    time: float
    rank: int
    step_seconds: float
    communication_seconds: float
    """While anything was on its way between ranks,"""
    exposed_seconds: float
    """... and nothing was computed beside it,"""
    computing_seconds: float
    """... and while something was computed."""
    top: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the operations that took longest in all, with what they called."""

    @property
    def overlapped_seconds(self) -> float:
        """Communication beside which something was computed."""
        return self.communication_seconds - self.exposed_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCalibration(JsonRecord):
    """What a device of this machine does at best, measured with one process's threads."""

    time: float
    host: str
    device: str
    """Its name, as torch has it."""
    num_threads: int
    torch: str
    flops_per_second: float
    """Of a matrix product of float32, or of bfloat16 where the device has that in hardware."""
    bytes_per_second: float
    """Of memory that is read and written."""
    seconds_per_op: float
    """What it takes to have a small operation done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile(JsonRecord):
    """What a rank trains, as training begins."""

    time: float
    rank: int
    name: str
    """Of the model's class."""
    num_parameters: int
    """Of the whole model; as this rank holds them where it is FSDP1's."""
    num_trainable: int
    by_dtype: str
    """How many there are of each type, the most first: ``float32 1024, bfloat16 8``."""
    parameter_bytes: int
    """What lies on this rank of them,"""
    buffer_bytes: int
    """... of buffers,"""
    optimizer_bytes: int
    """... and of the optimizers' state."""
    optimizers: str
    blocks: str
    """The parts that it repeats: ``12 x Block``."""
    device: str
    sharing: str
    """How ranks share it."""
    plan: str | None = None
    """By which plan it is spread over them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent(JsonRecord):
    """Something worth remembering that happened to one rank, such as a config that came into force."""

    time: float
    generation: int
    rank: int
    step: int
    kind: str
    text: str
    details: Mapping[str, object] = field(default_factory=dict)


# --- what of a job can be chosen while it trains, and what it asks of its machines, as its rank 0 sees it ------------
# Whoever chooses, the tuner of a master for one, reads no model: it reads this. Rank 0 writes it to the run directory,
# and writes it again where anything in it has changed.
#
# Words as a trainer has them: a *micro-step* is one micro-batch, a *step* some of them and one optimizer step. A
# *block* is one of the parts that a model repeats.

FILE = "job.json"
"""In the run directory of rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassesMemory:
    """What the passes of one micro-step take beside what lies there between steps, by when it is the most."""

    micro_batch: int
    activation_checkpoint: float
    """The share of blocks that are computed again."""
    forward_bytes: int
    """At most until the forward pass has ended,"""
    loss_bytes: int
    """... from there until the first gradient of a block: logits and what becomes of them,"""
    backward_bytes: int
    """... and from there to the end of the backward pass, without gradients of parameters."""
    with_gradients_bytes: int | None = None
    """The same with those that have come by then, where there were none before: it is less than both at their most,
    since activations go as gradients come. None where that is not known."""

    def most_bytes(self, gradient_bytes: int, *, has_gradients: bool) -> int:
        """At most, with gradients of parameters: of so many bytes in all, which lie there from the beginning or not.

        They do from the second micro-step of a step on, and where they are kept for the next step as zeros.
        """
        most = max(self.forward_bytes, self.loss_bytes, self.backward_bytes)
        if has_gradients or self.with_gradients_bytes is None:
            return gradient_bytes + most
        return max(self.forward_bytes, self.loss_bytes, self.with_gradients_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFacts:
    """What a model takes of a device's memory, whole and unsharded, on one rank. Sizes are bytes."""

    source: Literal["fake", "measured"]
    """Whether it was worked out on tensors without memory, or is what steps have taken so far."""
    why_measured: str = ""
    """Why it was not worked out: a sentence; empty where it was."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    block_bytes: int = 0
    """Of the parameters of the largest block,"""
    other_bytes: int = 0
    """... and of all that is in no block."""
    update_bytes: int = 0
    """What the optimizer's step takes for itself while it runs."""
    flops_per_sample: int | None = None
    """Of a forward and a backward pass, where nothing is computed again: matrix products, convolutions, attention."""
    block_activation_bytes: tuple[int, ...] = ()
    """Of one sample, what each block keeps from its forward pass for the backward pass, where nothing is computed
    again; in the model's order. Empty where that was not worked out."""
    passes: tuple[PassesMemory, ...] = ()
    """Of several sizes of micro-batches and shares, in no order."""
    scale: float = 1.0
    """What steps have taken beyond the rest, by what was worked out of it: multiplies ``passes``."""
    besides_bytes: int = 0
    """What the device holds that is no tensor of the model's: its context, workspaces, pieces that cannot be used."""
    capacity_bytes: int | None = None
    """What there is for this process, None where that is not known, as on a machine without an accelerator."""

    def peak_bytes(self, passes: PassesMemory, *, has_gradients: bool) -> int:
        """The most that a whole model on one rank takes in a step whose micro-steps are ``passes``."""
        stays = self.parameter_bytes + self.optimizer_bytes + self.buffer_bytes + self.besides_bytes
        taken = math.ceil(self.scale * passes.most_bytes(self.gradient_bytes, has_gradients=has_gradients))
        return stays + max(taken, self.gradient_bytes + self.update_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningFacts:
    """What the size of a step means to what is learned, in a job whose user lets it grow."""

    rule: str
    """How learning rates follow it: none, linear, sqrt, adascale."""
    first_batch: int
    """Samples of a step that the rates were chosen for."""
    noise_scale: float | None = None
    """Samples of a step at which its gradient has as much noise as gradient; None as long as that is not known."""

    def check(self) -> None:
        """ValueError where that cannot be."""
        if self.first_batch < 1 or not (self.noise_scale is None or 0 <= self.noise_scale < math.inf):
            raise ValueError("learning.first_batch or learning.noise_scale is no such number")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts(JsonRecord):
    """What can be chosen, and what is known."""

    time: float
    """Seconds since 1970."""
    restart: int
    """How often the launcher had restarted the job's processes."""
    world_size: int
    num_local: int
    """Ranks on a machine."""
    device: str
    """``cpu``, ``cuda``, ..."""
    num_processors: int
    """That a machine of rank 0's kind lets one rank have, its share of them."""
    config_version: int
    config_revision: int
    values: Mapping[str, Any]
    """By key, as the table of keys has it, what is in force: start-up values under the config. None: torch's way."""
    choices: Mapping[str, Sequence[Any]]
    """By key, what the job can change it to while it trains; empty: all that the table allows."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """By key, why it cannot be changed: a sentence."""
    global_batch: int
    """Samples of a step over all ranks,"""
    share: int
    """... and on the rank that has most of them, which is the largest micro-batch there can be."""
    num_replicas: int
    """Of the model, that take samples of their own."""
    bound: int | None = None
    """The fewest samples at once for which memory did not suffice by the present plan; None where it always did."""
    num_blocks: int = 0
    num_parameters: int = 0
    census: StepCensus | None = None
    calibration: NodeCalibration | None = None
    memory: MemoryFacts | None = None
    learning: LearningFacts | None = None
    """None where the user does not let steps grow."""

    def check_read(self) -> None:
        counts = (
            self.world_size,
            self.num_local,
            self.num_processors,
            self.global_batch,
            self.share,
            self.num_replicas,
        )
        if not all(0 < each < 2**53 for each in counts):
            raise ValueError(
                "world_size, num_local, num_processors, global_batch, share or num_replicas is no number above 0"
            )
        if not all(isinstance(each, (list, tuple)) for each in self.choices.values()):
            raise ValueError("choices holds what is no list")
        if self.memory is not None and not 0 < self.memory.scale < math.inf:
            raise ValueError("memory.scale is no number above 0")
        if self.learning is not None:
            self.learning.check()
