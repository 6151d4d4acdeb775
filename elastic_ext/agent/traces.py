"""Traces: stacks as faulthandler writes them, read, and told in a line: pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

__all__ = ["Frame", "Thread", "Where", "parse_stacks", "told_apart", "where_of"]

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "/elastic_ext/", "<frozen ")
_TOGETHER = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/torch/autograd/graph.py",  # a backward pass, in which gradients are shared
    "/torch/cuda/__init__.py",
    "/elastic_ext/ranks/group.py",
    "/elastic_ext/fsdp/reshard/exchange.py",
)


@dataclass(frozen=True, slots=True)
class Frame:
    """A function that is being run."""

    file: str
    line: int | None
    function: str

    @property
    def is_in_a_library(self) -> bool:
        """Whether it is of torch, say, or ours, and not the script's."""
        return any(part in self.file for part in _LIBRARIES)

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{'?' if self.line is None else self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread of a process; the innermost function comes first."""

    ident: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Where a rank is."""

    rank: int
    thread: str
    frame: Frame | None
    """The innermost one of the script, or the innermost of all; None where it runs no Python."""
    within: Frame | None
    """The innermost of all, where that is another."""

    @property
    def is_together(self) -> bool:
        """Whether it is in what all ranks do together: where one that waits for others is, as a rule."""
        innermost = self.within or self.frame
        return innermost is not None and any(part in innermost.file for part in _TOGETHER)

    def __str__(self) -> str:
        told = "no Python function" if self.frame is None else str(self.frame)
        return f"rank {self.rank}, {self.thread}: {told}" + (f" ({self.within})" if self.within else "")


def parse_stacks(text: str) -> tuple[Thread, ...]:
    """The threads of the last dump in ``text``, in its order; what is none of a dump is passed over."""
    threads: list[tuple[int, list[Frame]]] = []
    seen: set[int] = set()
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head is not None:
            ident = int(head[1], 16)
            if ident in seen:  # another dump begins
                threads, seen = [], set()
            seen.add(ident)
            threads.append((ident, []))
        elif threads and (found := _FRAME.fullmatch(line)) is not None:
            threads[-1][1].append(Frame(found[1], None if found[2] == "???" else int(found[2]), found[3]))
    return tuple(Thread(ident, tuple(frames)) for ident, frames in threads)


def where_of(rank: int, threads: Sequence[Thread], thread: int) -> Where | None:
    """Where a rank is whose training goes on in ``thread``; None if that is not among them."""
    found = next((each for each in threads if each.ident == thread), None)
    if found is None:
        return None
    name = "MainThread" if found is threads[-1] else f"thread 0x{thread:x}"  # the oldest comes last
    frames = found.frames
    own = next((each for each in frames if not each.is_in_a_library), None) or (frames[0] if frames else None)
    within = frames[0] if frames and frames[0] is not own else None
    return Where(rank=rank, thread=name, frame=own, within=within)


def told_apart(found: Sequence[Where]) -> str:
    """Whom to look at first, in words: who is not in what all do together, while others are; empty where none is."""
    apart = [each for each in found if not each.is_together]
    if not apart or len(apart) == len(found):
        return ""
    others = [each for each in found if each.is_together]
    told = "; ".join(str(each) for each in apart)
    verb = "is" if len(others) == 1 else "are"
    return f"{told}, while {_ranks(others)} {verb} in what ranks do together"


def _ranks(found: Sequence[Where]) -> str:
    numbers = [str(rank) for rank in sorted(each.rank for each in found)]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
