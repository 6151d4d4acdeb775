"""The errors this library raises for what the world did, as one tree.

ElasticError
├── ConfigError          a configuration was refused (also a ValueError); .refusals says key by key why
├── CheckpointError      a checkpoint could not be saved or loaded
│   ├── CheckpointNotFound   there is none where one was asked for
│   ├── CheckpointDamaged    what is on disk is not what was saved; the message names the file
│   ├── CheckpointExists     one of this name exists already, and is not written again
│   ├── CheckpointMismatch   the checkpoint and the model do not go together (also a ValueError); says which names
│   └── CheckpointFenced     another run of this job has taken its folder over
├── StepError            the loop used a step in a way that cannot be right; the step was rolled back
│   └── TornStepError        an optimizer failed halfway: parameters may be half updated: resume from a checkpoint
├── MasterError          a master could not be asked, or has no answer
│   ├── MasterAbsent         nobody answers there in time, or another master does than the one that is meant
│   ├── MasterBusy           it has as much to do as it takes on: to be asked again later
│   ├── NodeUnknown          it knows nothing of this node, which has to join again
│   └── MasterRefused        it says that this cannot be; .about says whether that is the token, the place or the words
│       └── NodeFenced           another agent has taken this node's place
├── WorkerDiedError      worker processes that load data die, again and again on the same samples; .indices names them
│                        (also a RuntimeError, as torch's is)
└── RanksError           something happened on one or more ranks; every rank raises
    ├── RanksFailedError     ranks raised while working together; holds each one's traceback
    │   └── ApplyError           ... while a config was being applied: resume from a checkpoint
    ├── RanksDisagreeError   ranks took different numbers of steps, or run under different configs
    └── PeerLostError        a rank died, left or fell silent in the middle of an agreement
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

__all__ = [
    "ApplyError",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointFenced",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "ConfigError",
    "ElasticError",
    "MasterAbsent",
    "MasterBusy",
    "MasterError",
    "MasterRefused",
    "NodeFenced",
    "NodeUnknown",
    "PeerLostError",
    "RanksDisagreeError",
    "RanksError",
    "RanksFailedError",
    "Refusal",
    "StepError",
    "TornStepError",
    "WorkerDiedError",
    "in_words",
]


class ElasticError(Exception):
    """The base class of all errors of this library."""

    says_all = False
    """Whether the message says all, on all ranks, so that the traceback of the error itself would add nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why one key of a config was refused: what was given, what is allowed, what to do."""

    key: str
    given: str
    allowed: str
    advice: str = ""

    def __str__(self) -> str:
        subject = f"{self.key} is {self.given}" if self.key else self.given
        return f"{subject}; allowed: {self.allowed}" + (f"; {self.advice}" if self.advice else "")


class ConfigError(ElasticError, ValueError):
    """A configuration that was refused, with every reason found."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        self.refusals = tuple(refusals)
        super().__init__(" | ".join(str(refusal) for refusal in self.refusals))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Refusal, ...]]]:
        return type(self), (self.refusals,)


class CheckpointError(ElasticError):
    """A checkpoint that could not be saved or loaded; older checkpoints are as they were."""

    is_in_log = False
    """Whether the error was logged where it came about, before it was raised."""


class CheckpointNotFound(CheckpointError):
    """No checkpoint where one was asked for; the message says where that is and what is there."""


class CheckpointDamaged(CheckpointError):
    """What is on disk is not what was saved; the message names the file and where in it."""


class CheckpointExists(CheckpointError):
    """A checkpoint of this name exists already, saved by this run or by one that led to it: it is not written again."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint and a model that do not go together: what the model misses in it, what is in it besides, and what
    has another shape or type, name by name. The message has the first few of each."""

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        extra: Sequence[str] = (),
        misshaped: Mapping[str, str] | None = None,
    ) -> None:
        self.message = message
        self.missing = tuple(missing)
        self.extra = tuple(extra)
        self.misshaped = dict(misshaped or {})  # name: how it differs
        parts = [
            ("not in the checkpoint", list(self.missing)),
            ("in the checkpoint alone", list(self.extra)),
            ("not alike", [f"{name} ({how})" for name, how in self.misshaped.items()]),
        ]
        super().__init__("; ".join([message, *(f"{what}: {_some(names)}" for what, names in parts if names)]))

    def __reduce__(self) -> tuple[object, ...]:
        make = functools.partial(type(self), missing=self.missing, extra=self.extra, misshaped=self.misshaped)
        return make, (self.message,)


class CheckpointFenced(CheckpointError):
    """Another run of this job has taken its folder over: this one must not save there again."""


class StepError(ElasticError):
    """A loop that uses a step in a way that cannot be right; the message says what to write instead."""


class TornStepError(StepError):
    """A step failed where it can neither go on nor be taken back: resume from a checkpoint."""


class StepUndone(BaseException):
    """Leaves a step that all ranks take again, since memory ran out in it; ``failures`` says how, by rank.

    Within the library: ``trainer.run()`` catches it, and nothing before that is meant to.
    """

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        super().__init__("; ".join(f"rank {rank} {text}" for rank, text in self.failures.items()))


class MasterError(ElasticError):
    """A master that could not be asked, or had no answer; training does not depend on it."""


class MasterAbsent(MasterError):
    """Nobody answers there in time, or another master does than the one that is meant."""


class MasterBusy(MasterError):
    """A master that has as much to do as it takes on, and may be asked again later."""


class NodeUnknown(MasterError):
    """A master that knows nothing of a node, which has to join again."""


class MasterRefused(MasterError):
    """A master says that something cannot be: ``about`` is the token, the place (another job, protocol or machine than
    it takes), or the words of the request."""

    def __init__(self, message: str, *, about: Literal["token", "place", "words"]) -> None:
        self.about = about
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), about=self.about), self.args


class NodeFenced(MasterRefused):
    """Another agent has taken the place of this node, and is the node from now on."""


class WorkerDiedError(ElasticError, RuntimeError):
    """Worker processes that died one after another, over the samples of ``indices`` or, with none, before any.

    It is a RuntimeError too, as what torch's loader raises is: a script that catches that one catches this.
    """

    def __init__(self, message: str, *, indices: Sequence[object] = ()) -> None:
        self.indices = tuple(indices)
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), indices=self.indices), self.args


class RanksError(ElasticError):
    """Something that happened on one or more ranks and that every rank is told."""


class RanksFailedError(RanksError):
    """Ranks raised while all worked together; ``tracebacks`` maps each failed rank to its own.

    Of a rank that refused an argument, and raises that error itself, ``tracebacks`` has the message alone.
    """

    says_all = True

    def __init__(self, doing: str, num_ranks: int, tracebacks: Mapping[int, str]) -> None:
        self.doing = doing
        self.num_ranks = num_ranks
        self.tracebacks = dict(sorted(tracebacks.items()))
        parts = [f"{len(self.tracebacks)} of {num_ranks} ranks failed while {doing}"]
        parts += [f"--- rank {rank}:\n{text.rstrip()}" for rank, text in self.tracebacks.items()]
        super().__init__("\n".join(parts))

    def __reduce__(self) -> tuple[type[RanksFailedError], tuple[str, int, dict[int, str]]]:
        return type(self), (self.doing, self.num_ranks, self.tracebacks)


class ApplyError(RanksFailedError):
    """A config that some rank could not apply. Training state may differ between ranks: resume from a checkpoint."""


class RanksDisagreeError(RanksError):
    """Ranks that should have moved together did not; the message names them and what each counted."""


class PeerLostError(RanksError):
    """A rank stopped answering in the middle of an agreement; the message says what is known of it."""


def _some(names: Sequence[str], limit: int = 10) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def in_words(error: BaseException) -> str:
    """The message of an error as a person is told it in another message, without a traceback."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "") + _advice_on(error)
    if isinstance(error, (CheckpointError, OSError, ValueError, TypeError)):
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"


def _advice_on(error: OSError) -> str:
    """Advice on an error of the system, appended to its message; empty where there is none."""
    if error.errno == errno.EMFILE and resource is not None:
        number, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"; this process may have {number} files open: raise the limit with `ulimit -n`, or open fewer files"
    return ""
