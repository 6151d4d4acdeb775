"""What a rank's windows say of its processes: which belong together, in which order, where time is missing: pure.

A *life* is one process's windows, as far as they could be read. A *training* is all that was done from a step 0 on;
a run directory holds several where a job was started in it from the beginning more than once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_ext.records.metrics import StepWindow

from .phases import Phase

__all__ = ["Life", "Piece", "in_order", "lives_of", "merged", "pieces_of", "trainings_of", "within"]

_STARTUP = Phase.STARTUP.label
_TOUCHING_SECONDS = 1e-3
_MOST_WINDOWS = 40_000
_SHORT_SECONDS = 1.0
_MOST_AT_ONCE = 8
"""Processes that write into one file at the same time; there should be one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """The windows of one process, one after another without a gap."""

    windows: tuple[StepWindow, ...]
    shift_seconds: float = 0.0
    """How much later than its clock said it is taken to have been, as its clock had been put back."""

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
        """The step that it went on from."""
        return self.windows[0].step - self.windows[0].num_steps

    @property
    def is_whole(self) -> bool:
        """Whether it has the process's first window; otherwise what came before could not be read."""
        return _is_first(self.windows[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A window, or what of it no other window has told already."""

    window: StepWindow
    life: Life
    begin: float
    end: float
    first_step: int
    """The step that training stood at as the window began: later than at its end where it went back."""


def lives_of(windows: Iterable[StepWindow]) -> list[Life]:
    """The processes that have written these into one file, in the order of its lines.

    Of very many windows, neighbours are made one, so that the memory for them stays small.
    """
    found: list[list[StepWindow]] = []
    lines: list[tuple[int, int]] = []  # of each the first and the last
    num_kept, most, longest = 0, _MOST_WINDOWS, _SHORT_SECONDS
    for line, window in enumerate(windows):
        num_kept += 1
        if num_kept > most:
            longest *= 2
            found = [merged(each, longest) for each in found]
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
    lives: list[Life] = []
    ends: list[tuple[int, float]] = []  # the last line of each, and when it had ended
    for each, (first, last) in zip(found, lines, strict=True):
        over = [end for line, end in ends[-_MOST_AT_ONCE:] if line < first]
        lives.append(_on_a_clock_that_goes_on(each, max(over, default=float("-inf"))))
        ends.append((last, lives[-1].end))
    return lives


def merged(windows: Sequence[StepWindow], longest: float) -> list[StepWindow]:
    """The same with neighbours of one config made one, where they are no longer than this together."""
    kept: list[StepWindow] = []
    for window in windows:
        goes_back = len(kept) > 1 and kept[-1].step < kept[-2].step
        if kept and not goes_back and _can_be_one(kept[-1], window) and window.end - kept[-1].begin <= longest:
            kept[-1] = _one(kept[-1], window)
        else:
            kept.append(window)
    return kept


def in_order(lives: Iterable[Life]) -> list[Life]:
    """By their beginnings, whichever file they are from."""
    return sorted(lives, key=lambda each: each.begin)


def pieces_of(lives: Sequence[Life]) -> list[Piece]:
    """The windows of all lives, none overlapping another; ``lives`` as ``in_order`` gives them.

    Where two processes have written for the same time, the one whose window began first counts.
    """
    every = [
        (window.begin + life.shift_seconds, window, life, first_step)
        for life in lives
        for window, first_step in zip(life.windows, _first_steps(life), strict=True)
    ]
    every.sort(key=lambda each: each[0])
    pieces: list[Piece] = []
    told = float("-inf")
    for begin, window, life, first_step in every:
        end = window.end + life.shift_seconds
        if begin < told + _TOUCHING_SECONDS:
            begin = told
        if end > begin:
            pieces.append(Piece(window=window, life=life, begin=begin, end=end, first_step=first_step))
            told = end
    return pieces


def trainings_of(lives: Sequence[Life], launches: Sequence[float] | None) -> list[float]:
    """When each training began, by one rank's lives; ``launches`` is when the launcher was started, None without one.

    A process that begins at step 0 after others had taken steps begins another training, unless a launcher has only
    restarted it.
    """
    begins: list[float] = []
    before: Life | None = None
    num_steps = 0
    for life in lives:
        if before is None or (num_steps > 0 and _is_afresh(life, before, launches)):
            begins.append(life.begin)
            num_steps = 0
        num_steps += sum(each.num_steps for each in life.windows)
        before = life
    return begins


def within(lives: Iterable[Life], begin: float, end: float) -> list[Life]:
    """Those that belong to the training that began at ``begin``, if the next one began at ``end``."""
    return [each for each in lives if begin <= _begun(each) < end]


def _first_steps(life: Life) -> list[int]:
    """Where training stood as each window began. Not every step that has ended in it has committed."""
    return [max(life.first_step, 0), *(each.step for each in life.windows[:-1])]


def _begun(life: Life) -> float:
    """When its first step began: later than what differs between the starts of ranks that belong together."""
    return life.windows[0].end + life.shift_seconds if life.is_whole else life.begin


def _is_afresh(life: Life, before: Life, launches: Sequence[float] | None) -> bool:
    if not life.is_whole or life.first_step != 0 or life.restart > before.restart:
        return False
    return launches is None or any(before.begin < each <= _begun(life) for each in launches)


def _is_first(window: StepWindow) -> bool:
    """Whether it is a process's first, which ends as its first step begins."""
    return window.num_steps == 0 and window.seconds.get(_STARTUP, 0.0) > 0


def _can_be_one(first: StepWindow, second: StepWindow) -> bool:
    return (
        first.step <= second.step
        and first.config_version == second.config_version
        and first.config_revision == second.config_revision
        and not _is_first(first)
    )


def _one(first: StepWindow, second: StepWindow) -> StepWindow:
    """Both as one; what is said of a step in the middle is that of the one with more of them."""
    typical = first if first.num_detailed > second.num_detailed else second
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


def _on_a_clock_that_goes_on(windows: list[StepWindow], until: float) -> Life:
    """What was written after another life had ended, at ``until``, and says that it was before: the clock was put back.

    It is taken to have begun then.
    """
    is_late = windows[0].end < until
    return Life(windows=tuple(windows), shift_seconds=until - windows[0].begin if is_late else 0.0)


def _goes_on(before: StepWindow, window: StepWindow) -> bool:
    """Whether the same process has written both, one after the other."""
    return (
        window.restart == before.restart
        and abs(window.begin - before.end) < _TOUCHING_SECONDS
        and not _is_first(window)
    )
