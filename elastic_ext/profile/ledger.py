"""The goodput ledger: what all the time of a training went into, over every process that a rank has had. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from elastic_ext.records.metrics import StepWindow

from .phases import IN_STEPS, LEAST_SECONDS, WITHIN_MICRO_STEPS, Phase

__all__ = [
    "ENTRIES",
    "USEFUL",
    "Ledger",
    "ProcessProfile",
    "Slice",
    "TimeUse",
    "TrainingHistory",
    "WindowPiece",
    "in_order",
    "ledger_of_job",
    "ledger_of_slices",
    "merge_neighbours",
    "pieces_of",
    "processes_of",
    "processes_within",
    "slices_of",
    "trainings_of",
]


# --- what a rank's windows say of its processes: which belong together, in which order, where time is missing --------
# A *ProcessProfile* is one process's windows, as far as they could be read. A *training* is all that was done from a
# step 0 on; a run directory holds several where a job was started in it from the beginning more than once.

_STARTUP = Phase.STARTUP.label
_TOUCHING_SECONDS = 1e-3  # windows that lie this close to one another have no gap between them
_MOST_WINDOWS = 40_000  # kept of one file without merging neighbours
_SHORT_SECONDS = 1.0  # half of the length up to which neighbours are merged at first
_MOST_AT_ONCE = 8
"""How many processes may write into one file at the same time; there should be one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessProfile:
    """The profile windows of one process, one after another without a gap."""

    windows: tuple[StepWindow, ...]
    shift_seconds: float = 0.0
    """Seconds added to the times of this process, whose clock had been put back."""

    @property
    def begin(self) -> float:
        return self.windows[0].begin + self.shift_seconds

    @property
    def end(self) -> float:
        return self.windows[-1].end + self.shift_seconds

    @property
    def restart(self) -> int:
        return self.windows[0].restart

    @property
    def first_step(self) -> int:
        """The step from which this process went on."""
        return self.windows[0].step - self.windows[0].num_steps

    @property
    def is_whole(self) -> bool:
        """Whether the process's first window is here; otherwise its earlier windows could not be read."""
        return _is_first(self.windows[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPiece:
    """A profile window, or the part of it that no other window covers."""

    window: StepWindow
    process: ProcessProfile
    begin: float
    end: float
    first_step: int
    """The step that training was at as the window began: later than at its end where training went back."""


def processes_of(windows: Iterable[StepWindow]) -> list[ProcessProfile]:
    """The processes that wrote one file's windows, each with its own, in the order of the file's lines.

    Of very many windows, neighbours are merged, so that the memory for them stays small.
    """
    found: list[list[StepWindow]] = []
    lines: list[tuple[int, int]] = []  # the first and the last line of each process in ``found``
    num_kept, most, longest = 0, _MOST_WINDOWS, _SHORT_SECONDS
    for line, window in enumerate(windows):
        num_kept += 1
        if num_kept > most:
            longest *= 2
            found = [merge_neighbours(each, longest) for each in found]
            num_kept = sum(map(len, found)) + 1
            most = max(_MOST_WINDOWS, 2 * num_kept)  # where few can be made one, it is not tried again and again
        for number in range(len(found) - 1, max(len(found) - 1 - _MOST_AT_ONCE, -1), -1):
            if _goes_on(found[number][-1], window):
                found[number].append(window)
                lines[number] = lines[number][0], line
                break
        else:
            found.append([window])
            lines.append((line, line))
    processes: list[ProcessProfile] = []
    ends: list[tuple[int, float]] = []  # the last line of each process, and when the process had ended
    for each, (first, last) in zip(found, lines, strict=True):
        over = [end for line, end in ends[-_MOST_AT_ONCE:] if line < first]
        processes.append(_on_a_clock_that_goes_on(each, max(over, default=float("-inf"))))
        ends.append((last, processes[-1].end))
    return processes


def merge_neighbours(windows: Sequence[StepWindow], longest: float) -> list[StepWindow]:
    """These windows with neighbours of one config made one, where the merged window is no longer than ``longest``."""
    kept: list[StepWindow] = []
    for window in windows:
        goes_back = len(kept) > 1 and kept[-1].step < kept[-2].step
        if kept and not goes_back and _can_be_one(kept[-1], window) and window.end - kept[-1].begin <= longest:
            kept[-1] = _one(kept[-1], window)
        else:
            kept.append(window)
    return kept


def in_order(processes: Iterable[ProcessProfile]) -> list[ProcessProfile]:
    """Processes sorted by when they began, whichever file their windows are from."""
    return sorted(processes, key=lambda each: each.begin)


def pieces_of(processes: Sequence[ProcessProfile]) -> list[WindowPiece]:
    """Profile windows of all processes, cut so that none overlaps another; ``processes`` as ``in_order`` gives them.

    Where two processes have written for the same time, the one whose window began first counts.
    """
    every = [
        (window.begin + process.shift_seconds, window, process, first_step)
        for process in processes
        for window, first_step in zip(process.windows, _first_steps(process), strict=True)
    ]
    every.sort(key=lambda each: each[0])
    pieces: list[WindowPiece] = []
    covered_until = float("-inf")
    for begin, window, process, first_step in every:
        end = window.end + process.shift_seconds
        if begin < covered_until + _TOUCHING_SECONDS:
            begin = covered_until
        if end > begin:
            pieces.append(WindowPiece(window=window, process=process, begin=begin, end=end, first_step=first_step))
            covered_until = end
    return pieces


def trainings_of(processes: Sequence[ProcessProfile], launches: Sequence[float] | None) -> list[float]:
    """The times at which one rank's trainings began.

    ``launches`` are the times at which the launcher was started, None where there is none. A process that begins at
    step 0 after others had taken steps begins another training, unless a launcher has only restarted it.
    """
    begins: list[float] = []
    before: ProcessProfile | None = None
    num_steps = 0
    for process in processes:
        if before is None or (num_steps > 0 and _is_new_training(process, before, launches)):
            begins.append(process.begin)
            num_steps = 0
        num_steps += sum(each.num_steps for each in process.windows)
        before = process
    return begins


def processes_within(processes: Iterable[ProcessProfile], begin: float, end: float) -> list[ProcessProfile]:
    """The processes that belong to the training that began at ``begin``, if the next one began at ``end``."""
    return [each for each in processes if begin <= _begun(each) < end]


def _first_steps(process: ProcessProfile) -> list[int]:
    """The step that training was at as each window began. Not every step that ended in a window has committed."""
    return [max(process.first_step, 0), *(each.step for each in process.windows[:-1])]


def _begun(process: ProcessProfile) -> float:
    """When a process's first step began, which is after the starts of all ranks that belong together."""
    return process.windows[0].end + process.shift_seconds if process.is_whole else process.begin


def _is_new_training(process: ProcessProfile, before: ProcessProfile, launches: Sequence[float] | None) -> bool:
    if not process.is_whole or process.first_step != 0 or process.restart > before.restart:
        return False
    return launches is None or any(before.begin < each <= _begun(process) for each in launches)


def _is_first(window: StepWindow) -> bool:
    """Whether a window is the first one of its process, which ends as the first step begins."""
    return window.num_steps == 0 and window.seconds.get(_STARTUP, 0.0) > 0


def _can_be_one(first: StepWindow, second: StepWindow) -> bool:
    return (
        first.step <= second.step
        and first.config_version == second.config_version
        and first.config_revision == second.config_revision
        and not _is_first(first)
    )


def _one(first: StepWindow, second: StepWindow) -> StepWindow:
    """Two neighbouring windows as one; typical times are those of the one with more measured steps, if it has any."""
    typical = max(second, first, key=lambda each: (bool(each.typical), each.num_detailed))
    return replace(
        second,
        begin=first.begin,
        num_steps=first.num_steps + second.num_steps,
        seconds=_sums(first.seconds, second.seconds),
        processor_seconds=_sums(first.processor_seconds, second.processor_seconds),
        typical=typical.typical,
        step_seconds=typical.step_seconds,
        num_samples=first.num_samples + second.num_samples,
        num_tokens=first.num_tokens + second.num_tokens,
        num_bytes=first.num_bytes + second.num_bytes,
        num_detailed=first.num_detailed + second.num_detailed,
    )


def _sums(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in (*first, *second)}


def _on_a_clock_that_goes_on(windows: list[StepWindow], until: float) -> ProcessProfile:
    """A process's windows, moved to begin at ``until`` where they say that they ended before it.

    ``until`` is when the process before had ended: the clock was put back since.
    """
    is_put_back = windows[0].end < until
    return ProcessProfile(windows=tuple(windows), shift_seconds=until - windows[0].begin if is_put_back else 0.0)


def _goes_on(before: StepWindow, window: StepWindow) -> bool:
    """Whether the same process has written both, one after the other."""
    return (
        window.restart == before.restart
        and abs(window.begin - before.end) < _TOUCHING_SECONDS
        and not _is_first(window)
    )


# --- what all the time of a training went into; its entries add up to the wall time ----------------------------------
# The wall time of a rank is from the start of its first process to the last moment that is known of it; that of the job
# from the first start on any rank to the last moment on any. *Goodput* is the share of useful entries in it.
#
# Exposed communication is useful here: steps of several ranks cannot be without it. It is an entry of its own, so that
# whoever thinks otherwise can take it off. Unmeasured steps are divided as their window's typical step is, or that of
# the last window before it that has one.


class TimeUse(Enum):
    """What the time of a training went into: an entry of the ledger; the values stand in JSON."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    TRANSFER = "transfer"
    STEP = "step"
    """Unmeasured steps before the first window of their process that has a typical step."""
    COMMUNICATION = "communication"
    OTHER = "other"
    DATA = "data"
    AGREEMENT = "agreement"
    CHECKPOINT = "checkpoint"
    CHANGE = "change"
    MEMBERSHIP = "membership"
    ROLLED_BACK = "rolled-back"
    """Steps that the process itself rolled back."""
    LOST_STEPS = "again"
    """Steps that were lost, since training went on from a step before them; their repetition counts as useful."""
    STARTUP = "startup"
    """The start of a rank's first process, or of one that begins after nothing was running."""
    RESTART = "restart"
    """Time from a failure, or another end of a process, to the first step of the process in its place."""
    UNSEEN = "unseen"
    """Time that no readable record covers: after a process's last window up to its failure, or where lines are lost."""
    OUTSIDE = "outside"
    STOPPED = "stopped"
    """Time in which no process ran, and no launcher was about to start one."""


ENTRIES = tuple(TimeUse)
USEFUL = frozenset(
    (
        TimeUse.FORWARD,
        TimeUse.BACKWARD,
        TimeUse.OPTIMIZER,
        TimeUse.TRANSFER,
        TimeUse.STEP,
        TimeUse.COMMUNICATION,
        TimeUse.OTHER,
    )
)
_OF_PHASE = {phase.label: TimeUse(phase.label) for phase in Phase}
_STEP = Phase.STEP.label
_LOST_WITH_STEP = frozenset(TimeUse(phase.label) for phase in IN_STEPS)
"""The entries whose time is lost with a step, where training goes on from one before it."""
_DIVIDING_STEP = tuple(phase.label for phase in (*WITHIN_MICRO_STEPS, Phase.OTHER))
"""The phases that the time of unmeasured steps is divided into, as a typical step is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingHistory:
    """What other files than a rank's own say of a training: starts on all ranks, failures, and launchers."""

    begun: tuple[tuple[float, int], ...] = ()
    """When training began or went on in a process of any rank, and the step from which it went on."""
    failures: tuple[float, ...] = ()
    """When processes were seen to have failed, or to hang."""
    stopped: tuple[tuple[float, float], ...] = ()
    """The spans in which no launcher ran: from when to when."""
    has_launcher: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A part of a rank's time, and what it went into; slices follow one another without a gap."""

    begin: float
    end: float
    seconds: Mapping[TimeUse, float]
    """Seconds of this slice by entry; they add up to its length."""
    piece: WindowPiece | None = None
    """The profile window that tells of this slice; None where nothing was written."""
    kept: float = 1.0
    """The share of this slice's steps that were not taken again later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What the wall time of a rank or a job went into; ``seconds`` has every entry."""

    wall_seconds: float
    seconds: Mapping[TimeUse, float]

    @property
    def useful_seconds(self) -> float:
        return sum(self.seconds[each] for each in USEFUL)

    @property
    def goodput(self) -> float:
        """The share of useful seconds in the wall time; 0 where there was no time."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        """The ledger as plain values for JSON."""
        return {
            "wall_seconds": self.wall_seconds,
            "goodput": self.goodput,
            "useful_seconds": self.useful_seconds,
            "seconds": {entry.value: self.seconds[entry] for entry in ENTRIES},
        }


def slices_of(processes: Sequence[ProcessProfile], history: TrainingHistory, *, until: float = 0.0) -> list[Slice]:
    """One rank's time from its first process on, in slices without a gap; ``processes`` in order.

    It ends with the rank's last window, or at ``until`` if that is later: what lies between is time without a process.
    """
    pieces = pieces_of(processes)
    kept = _kept(pieces, history)
    division: Mapping[str, float] = {}
    slices: list[Slice] = []
    previous: WindowPiece | None = None
    is_restart = False  # whether a process starts in another's place
    for piece, share in zip(pieces, kept, strict=True):
        if previous is not None and previous.process is not piece.process:
            gap = _gap(previous, piece, history)
            slices += gap
            is_restart = not gap or any(TimeUse.STOPPED not in each.seconds for each in gap)
            division = {}
        division = _division(piece.window) or division
        slices.append(_slice_of(piece, share, division, is_restart=is_restart))
        previous = piece
    if previous is not None and until > previous.end:
        slices += _slices_without_process(previous.end, until, history, default=TimeUse.STOPPED)
    return slices


def ledger_of_slices(slices: Sequence[Slice]) -> Ledger:
    """The ledger of one rank, from its slices."""
    seconds = dict.fromkeys(ENTRIES, 0.0)
    for each in slices:
        for entry, spent in each.seconds.items():
            seconds[entry] += spent
    wall = slices[-1].end - slices[0].begin if slices else 0.0
    return Ledger(wall_seconds=wall, seconds=seconds)


def ledger_of_job(ledgers: Iterable[Ledger], spans: Sequence[tuple[float, float]]) -> Ledger:
    """The ledger of a job, from those of all ranks; ``spans`` is from when to when each rank was known.

    Each entry is a mean over the ranks that there were, so that all entries add up to the job's wall time; a moment at
    which no rank was known is one at which nothing was running.
    """
    known = _union_seconds(spans)
    wall = max(end for _, end in spans) - min(begin for begin, _ in spans) if spans else 0.0
    seconds, total = dict.fromkeys(ENTRIES, 0.0), 0.0
    for ledger in ledgers:
        total += ledger.wall_seconds
        for entry, spent in ledger.seconds.items():
            seconds[entry] += spent
    scale = known / total if total > 0 else 0.0  # from seconds of all ranks together to seconds of the job
    seconds = {entry: spent * scale for entry, spent in seconds.items()}
    seconds[TimeUse.STOPPED] += max(wall - known, 0.0)
    return Ledger(wall_seconds=wall, seconds=seconds)


def _kept(pieces: Sequence[WindowPiece], history: TrainingHistory) -> list[float]:
    """The share of each piece's steps that was not taken again later.

    From the last piece to the first, ``lowest`` is the lowest step from which training went on later, on any rank. Of a
    piece in which training went from step 10 to step 20, all is kept where ``lowest`` is 20 or more, half where it is
    15, and nothing where it is 10 or less. A piece that ends at its first step is lost where ``lowest`` is before that,
    and one in which training went back counts as kept.
    """
    kept = [1.0] * len(pieces)
    lowest = float("inf")
    begun = sorted(history.begun, reverse=True)
    number = 0
    for index in range(len(pieces) - 1, -1, -1):
        window, process, first = pieces[index].window, pieces[index].process, pieces[index].first_step
        while number < len(begun) and begun[number][0] > process.end:
            lowest = min(lowest, begun[number][1])
            number += 1
        if window.step > first:
            kept[index] = min(max((lowest - first) / (window.step - first), 0.0), 1.0)
        elif window.step == first and lowest < first:
            kept[index] = 0.0
        lowest = min(lowest, first, window.step)
    return kept


def _division(window: StepWindow) -> dict[str, float]:
    """The shares by which a window's typical step divides ``Phase.STEP``; empty where there is no typical step."""
    found = {label: window.typical.get(label, 0.0) for label in _DIVIDING_STEP}
    total = sum(found.values())
    return {label: part / total for label, part in found.items() if part > 0} if total > 0 else {}


def _slice_of(piece: WindowPiece, kept: float, division: Mapping[str, float], *, is_restart: bool) -> Slice:
    """The slice of a window's piece: the window's seconds by entry, scaled to the length of the piece."""
    length = piece.end - piece.begin
    phases = {label: spent for label, spent in piece.window.seconds.items() if label in _OF_PHASE and spent > 0}
    total = sum(phases.values())
    if total < LEAST_SECONDS:
        return Slice(begin=piece.begin, end=piece.end, seconds={TimeUse.UNSEEN: length}, piece=piece, kept=kept)
    seconds: dict[TimeUse, float] = {}

    def add(entry: TimeUse, spent: float) -> None:
        seconds[entry] = seconds.get(entry, 0.0) + spent

    for label, spent in phases.items():
        spent = spent / total * length
        for part, share in division.items() if label == _STEP and division else ((label, 1.0),):
            entry = _OF_PHASE[part]
            if entry is TimeUse.STARTUP and is_restart:
                entry = TimeUse.RESTART
            is_lost = entry in _LOST_WITH_STEP
            add(entry, spent * share * (kept if is_lost else 1.0))
            if is_lost and kept < 1:
                add(TimeUse.LOST_STEPS, spent * share * (1 - kept))
    return Slice(begin=piece.begin, end=piece.end, seconds=seconds, piece=piece, kept=kept)


def _gap(before: WindowPiece, after: WindowPiece, history: TrainingHistory) -> list[Slice]:
    """The time between two processes, as slices: unseen, a restart, or stopped."""
    begin, end = before.end, after.begin
    if end <= begin:
        return []
    if not after.process.is_whole and after.process.restart == before.process.restart:
        return [Slice(begin=begin, end=end, seconds={TimeUse.UNSEEN: end - begin})]  # lines that could not be read
    is_restart = history.has_launcher or after.process.restart > before.process.restart
    return _slices_without_process(begin, end, history, default=TimeUse.RESTART if is_restart else TimeUse.STOPPED)


def _slices_without_process(begin: float, end: float, history: TrainingHistory, *, default: TimeUse) -> list[Slice]:
    """Time without a process: up to a failure it is unseen, then the job restarts, unless no launcher runs."""
    marks = [(begin, default)]
    failed = [each for each in history.failures if begin < each < end]
    if failed:
        marks = [(begin, TimeUse.UNSEEN), (min(failed), TimeUse.RESTART)]
    for first, last in history.stopped:
        first, last = max(first, begin), min(last, end)
        if first < last:
            after = [entry for moment, entry in marks if moment <= last][-1]
            marks = [each for each in marks if not first <= each[0] <= last] + [(first, TimeUse.STOPPED), (last, after)]
            marks.sort(key=lambda each: each[0])
    ends = [moment for moment, _ in marks[1:]] + [end]
    return [
        Slice(begin=moment, end=until, seconds={entry: until - moment})
        for (moment, entry), until in zip(marks, ends, strict=True)
        if until > moment
    ]


def _union_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """How many seconds at least one of these spans covers."""
    total, covered_until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, covered_until), 0.0)
        covered_until = max(covered_until, end)
    return total
