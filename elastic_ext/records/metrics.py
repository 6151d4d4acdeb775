"""The records that training writes into the run directory: metrics, and facts about what can be changed in a job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from .json import JsonRecord
from .measures import Measures

__all__ = [
    "CAN_GO_ON",
    "FILE",
    "MERGED_BY",
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
"""The kind of a JobEvent by which a rank that was told to end says that nothing is saved to go on from."""


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
    from_checkpoint: Mapping[str, str] = field(default_factory=dict)
    """By dotted key, a value in force that the resumed checkpoint has brought, in words, with the script's own."""
    not_from_checkpoint: Mapping[str, str] = field(default_factory=dict)
    """By dotted key, a value in force that the script has in place of the resumed checkpoint's, in words, with both."""
    measures: Measures = field(default_factory=Measures)

    def check_read(self) -> None:
        if not all(type(each) in (int, float) and 0 <= each <= 1.001 for each in self.measures.shares.values()):
            raise ValueError("measures.shares holds a value that is no share of time; allowed: numbers from 0 to 1")
        if not all(type(each) is float for each in self.measures.logged.values()):
            raise ValueError("measures.logged holds a value that is no floating point number")


def _merged_by(how: Literal["sum", "by phase", "most", "any"], **given: Any) -> Any:
    """A field of a StepWindow, with the way in which its values in several windows make one in its metadata."""
    return field(metadata={"merged_by": how}, **given)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow(JsonRecord):
    """Where the time of one rank went, over some steps; those of a process follow each other without a gap."""

    begin: float
    """When the window begins, seconds since 1970."""
    end: float
    """When the window ends, seconds since 1970."""
    rank: int
    world_size: int
    restart: int
    """How often the launcher had restarted the job's processes."""
    step: int = _merged_by("most")
    """Steps that had committed since training began, at the window's end."""
    num_steps: int = _merged_by("sum")
    """Steps that ended in the window."""
    config_version: int
    config_revision: int
    seconds: Mapping[str, float] = _merged_by("by phase")
    """Seconds by phase, as profile/phases.py names them; they add up to the length of the window."""
    processor_seconds: Mapping[str, float] = _merged_by("by phase", default_factory=dict)
    """Processor time of the training thread in seconds, by phase."""
    typical: Mapping[str, float] = field(default_factory=dict)
    """The median seconds of a measured step, by phase; empty where no step was measured, or known yet."""
    step_seconds: tuple[float, ...] = ()
    """How long measured steps took, as quantiles: a tenth no longer than the first, then half, nine tenths, and all."""
    waiting_seconds: float | None = None
    """How long a step waits for other ranks, as the lower quartile: a link is slow in every step, a rank that has no
    processor in some. None where ``typical`` is empty."""
    computing_seconds: float | None = None
    """How long transfers, passes and the optimizer take in a step, as the lower quartile; None where ``typical`` is
    empty."""
    is_settling: bool = _merged_by("any", default=False)
    """Whether something was still starting in the window, such as data workers, after which steps will be quicker."""
    num_samples: int = _merged_by("sum", default=0)
    """Samples that all ranks together took in the window."""
    num_tokens: int = _merged_by("sum", default=0)
    """Tokens that this rank's model was given in measured steps."""
    num_bytes: int = _merged_by("sum", default=0)
    """Bytes that this rank's model was given in measured steps."""
    num_detailed: int = _merged_by("sum", default=0)
    """How many steps were measured: whose phases are told one by one (profile/phases.py)."""
    memory_bytes: int | None = None
    """The machine's memory that this process holds at the window's end."""
    accelerator_bytes: int | None = None
    """The accelerator's memory that this process holds at the window's end."""
    accelerator_peak_bytes: int | None = _merged_by("most", default=None)
    """The most accelerator memory that this process held since torch's peak counters began anew."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """The numbers that the script gave to ``trainer.log()``, by name: each its mean over all that was logged of it."""
    members: int = 0
    """The version of the membership plan by which the ranks came together while they trained; 0 where they have started
    so. With ``restart`` and ``world_size`` it says which world the window is of."""
    logged_weights: Mapping[str, float] = field(default_factory=dict)
    """By the name of a logged number, the sum of the weights that its mean is made with: the samples of the micro-steps
    that have logged it. Older records have none; there a number weighs as much as the window's steps."""

    @property
    def length(self) -> float:
        return self.end - self.begin

    def check_read(self) -> None:
        lengths = [*self.seconds.values(), *self.processor_seconds.values(), *self.typical.values(), *self.step_seconds]
        lengths.extend(each for each in (self.waiting_seconds, self.computing_seconds) if each is not None)
        if not all(type(each) in (int, float) and 0 <= each < math.inf for each in lengths):
            raise ValueError(
                "seconds, processor_seconds, typical, step_seconds, waiting_seconds or computing_seconds holds a value "
                "that is no length of time; allowed: finite numbers of at least 0"
            )
        if not all(type(each) is float for each in self.logged.values()):
            raise ValueError("logged holds a value that is no floating point number")
        if not all(type(each) in (int, float) and 0 < each < math.inf for each in self.logged_weights.values()):
            raise ValueError("logged_weights holds a value that is no weight; allowed: finite numbers above 0")

    def weighed_logged(self) -> dict[str, tuple[float, float]]:
        """Each number that the script has logged in the window, with its weight in a mean over several windows."""
        of_steps = float(max(self.num_steps, 1))
        return {name: (value, self.logged_weights.get(name, of_steps)) for name, value in self.logged.items()}


MERGED_BY: Mapping[str, str] = {
    each.name: each.metadata["merged_by"] for each in fields(StepWindow) if "merged_by" in each.metadata
}
"""How a field's values in several windows make one where windows are merged, by the field's name.

Other fields merge in ways of their own (profile/breakdown.py), or the last value counts.
"""
SIZES = tuple(each.name for each in fields(StepWindow) if each.type == "int | None")
"""The fields of a StepWindow that hold bytes of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCensus(JsonRecord):
    """What one micro-step of a rank asks of its machine, counted once: forward, backward and the optimizer's step."""

    time: float
    rank: int
    num_samples: int
    """Samples in the micro-batch."""
    num_ops: int
    """Operations that were dispatched, the optimizer's too."""
    num_bytes: int
    """Bytes that the operations read and wrote."""
    num_flops: int
    """Floating point operations of matrix products, convolutions and attention."""
    optimizer_ops: int
    """How many of the operations are the optimizer's, which come once in a step."""
    optimizer_bytes: int
    """How many of the bytes are read and written by the optimizer's operations."""
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrace(JsonRecord):
    """One step of a rank as torch's profiler saw it."""

    time: float
    rank: int
    step_seconds: float
    communication_seconds: float
    """How long anything was on its way between ranks."""
    exposed_seconds: float
    """How long anything was on its way between ranks while nothing was computed."""
    computing_seconds: float
    """How long anything was computed."""
    top: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the operations that took longest in all, by name, including what they called."""

    @property
    def overlapped_seconds(self) -> float:
        """How long anything was on its way between ranks while something was computed."""
        return self.communication_seconds - self.exposed_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCalibration(JsonRecord):
    """What a device of this machine does at best, measured with one process's threads."""

    time: float
    host: str
    device: str
    """The device's name, as torch has it."""
    num_threads: int
    torch: str
    """The version of torch."""
    flops_per_second: float
    """The speed of a matrix product of float32, or of bfloat16 where the device has that in hardware."""
    bytes_per_second: float
    """The speed of reading and writing memory."""
    seconds_per_op: float
    """How long one small operation takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile(JsonRecord):
    """The model that a rank trains, and its memory on that rank, as training begins or the model was last resharded."""

    time: float
    rank: int
    name: str
    """The name of the model's class."""
    num_parameters: int
    """Elements of the whole model's parameters; for FSDP1, of those that this rank holds."""
    num_trainable: int
    by_dtype: str
    """The number of parameters' elements of each dtype, the most first: ``float32 1024, bfloat16 8``."""
    parameter_bytes: int
    """Bytes of parameters that lie on this rank."""
    buffer_bytes: int
    """Bytes of buffers that lie on this rank."""
    optimizer_bytes: int
    """Bytes of the optimizers' state that lie on this rank."""
    optimizers: str
    blocks: str
    """The parts that the model repeats: ``12 x Block``."""
    device: str
    sharing: str
    """How ranks average the model's gradients: ``none``, ``DDP``, ``fully_shard`` or ``FSDP1``."""
    plan: str | None = None
    """The plan by which the model is spread over the ranks; None where it has none."""


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
"""The file name of JobFacts in the run directory of rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassesMemory:
    """The peak memory of one micro-step's passes, in each of their parts, beside what is allocated between steps."""

    micro_batch: int
    activation_checkpoint: float
    """The share of blocks whose activations are computed again in the backward pass."""
    forward_bytes: int
    """The peak until the forward pass has ended."""
    loss_bytes: int
    """The peak from the end of the forward pass to the first gradient of a block: logits and what becomes of them."""
    backward_bytes: int
    """The peak from the first gradient of a block to the end of the backward pass, without parameters' gradients."""
    with_gradients_bytes: int | None = None
    """The peak in the backward pass with parameters' gradients, where there were none before: less than the sum of both
    peaks, since activations go as gradients come. None where that is not known."""

    def most_bytes(self, gradient_bytes: int, *, has_gradients: bool) -> int:
        """The peak of the passes with parameters' gradients, which take ``gradient_bytes`` in all.

        ``has_gradients`` says that gradients are there from the beginning: from the second micro-step of a step on, and
        where they are kept for the next step as zeros.
        """
        most = max(self.forward_bytes, self.loss_bytes, self.backward_bytes)
        if has_gradients or self.with_gradients_bytes is None:
            return gradient_bytes + most
        return max(self.forward_bytes, self.loss_bytes, self.with_gradients_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFacts:
    """What a model takes of a device's memory, whole and unsharded, on one rank. Sizes are bytes."""

    source: Literal["fake", "measured"]
    """Whether sizes were worked out on fake tensors, without memory, or measured in the steps so far."""
    why_measured: str = ""
    """Why sizes, or some of them, were not worked out on fake tensors: a sentence; empty where all were."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    block_bytes: int = 0
    """Bytes of the parameters of the largest block."""
    other_bytes: int = 0
    """Bytes of all parameters that are in no block."""
    update_bytes: int = 0
    """Memory that the optimizer's step takes while it runs."""
    flops_per_sample: int | None = None
    """Floating point operations of a forward and a backward pass for one sample, where nothing is computed again:
    matrix products, convolutions, attention."""
    block_activation_bytes: tuple[int, ...] = ()
    """Activations of one sample that each block keeps for the backward pass, where nothing is computed again; in the
    model's order. Empty where that was not worked out."""
    passes: tuple[PassesMemory, ...] = ()
    """The memory of passes for several micro-batch sizes and shares of blocks computed again, in no order."""
    scale: float = 1.0
    """By how much steps' passes have taken more than was worked out: a factor on ``passes``."""
    besides_bytes: int = 0
    """Device memory that holds no tensors of the model: the context, workspaces, fragments that cannot be used."""
    capacity_bytes: int | None = None
    """Device memory that this process can have; None where not known, as on a machine without an accelerator."""

    def peak_bytes(self, passes: PassesMemory, *, has_gradients: bool) -> int:
        """The most that a whole model on one rank takes in a step whose micro-steps are ``passes``."""
        stays = self.parameter_bytes + self.optimizer_bytes + self.buffer_bytes + self.besides_bytes
        taken = math.ceil(self.scale * passes.most_bytes(self.gradient_bytes, has_gradients=has_gradients))
        return stays + max(taken, self.gradient_bytes + self.update_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningFacts:
    """What a larger global batch would mean for learning, in a job whose user lets the tuner change the batch."""

    rule: str
    """How learning rates follow the global batch: none, linear, sqrt, adascale."""
    first_batch: int
    """The global batch that the user's learning rates were chosen for."""
    noise_scale: float | None = None
    """The global batch at which a gradient has as much noise as gradient; None as long as that is not known."""

    def check(self) -> None:
        """ValueError where the first batch or the noise scale is no possible number."""
        if self.first_batch < 1 or not (self.noise_scale is None or 0 <= self.noise_scale < math.inf):
            raise ValueError("learning.first_batch is below 1, or learning.noise_scale is below 0 or not finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts(JsonRecord):
    """What the tuner can change in a job, and what it has to know of it, as the job's rank 0 sees it."""

    time: float
    """Seconds since 1970."""
    restart: int
    """How often the launcher had restarted the job's processes."""
    world_size: int
    members: int = 0
    """The version of the membership plan by which the ranks came together while they trained; 0 where they have started
    so."""
    num_local: int
    """Ranks on the machine of rank 0."""
    device: str
    """The type of the model's device: ``cpu``, ``cuda``, ..."""
    num_processors: int
    """Processors for each rank on the machine of rank 0."""
    config_version: int
    config_revision: int
    values: Mapping[str, Any]
    """By config key, the value in force: the config's, or else the start-up value. None: torch's way."""
    choices: Mapping[str, Sequence[Any]]
    """By config key, the values that the job can change it to while it trains; empty for all that the key allows."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """By config key, why it cannot be changed: a sentence."""
    global_batch: int
    """Samples of a step over all ranks."""
    share: int
    """Samples of a step on the rank that has the most, which is the largest micro-batch there can be."""
    num_replicas: int
    """Replicas of the model, which take samples of their own: the data-parallel degree."""
    bound: int | None = None
    """The fewest samples at once that did not fit into memory under the present plan; None where all did."""
    num_blocks: int = 0
    num_parameters: int = 0
    census: StepCensus | None = None
    calibration: NodeCalibration | None = None
    memory: MemoryFacts | None = None
    learning: LearningFacts | None = None
    """What a larger global batch would mean; None where the user does not let the tuner change the batch."""

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
            raise ValueError("choices holds a value that is no list")
        if self.memory is not None and not 0 < self.memory.scale < math.inf:
            raise ValueError("memory.scale is no number above 0")
        if self.learning is not None:
            self.learning.check()
