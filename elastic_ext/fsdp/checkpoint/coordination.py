"""Acting on a checkpoint on all ranks together: results are gathered, and all ranks raise where one fails."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from traceback import walk_tb
from typing import Any

from elastic_ext import errors
from elastic_ext.errors import (
    CheckpointError,
    CheckpointFenced,
    CheckpointMismatch,
    PeerLostError,
    RanksDisagreeError,
    in_words,
)
from elastic_ext.ranks.group import Ranks

__all__ = ["agree_and_gather", "agree_on", "failure_of", "first_says", "gather_or_raise", "joined_failure"]

_logger = logging.getLogger(__name__)


def gather_or_raise(ranks: Ranks, act: Callable[[], object], doing: str) -> list[Any]:
    """Run ``act`` on every rank; gives its results, which are JSON, by rank. Where one fails, all raise the same error.

    Every rank calls this. The words of an error go to all, its traceback to this rank's log. PeerLostError is raised
    as it is.
    """
    answer: dict[str, object] = {}
    raised = _add_what_it_gives(answer, ranks, act, doing)
    return _given(_exchanged(ranks, answer, doing), raised, doing)


def agree_on(ranks: Ranks, ask: Callable[[], str]) -> None:
    """Check that all ranks were called for the same thing, which ``ask`` says in words. Every rank calls this first.

    ValueError on all ranks where an argument on one is wrong, for which ``ask`` raises a ValueError or TypeError;
    RanksDisagreeError where they were called for different things, and would wait for one another in vain.
    """
    answer: dict[str, object] = {}
    _add_what_it_asks(answer, ask)
    _raise_unless_asked_alike(_exchanged(ranks, answer, "comparing what is asked for"))


def agree_and_gather(ranks: Ranks, ask: Callable[[], str], act: Callable[[], object], doing: str) -> list[Any]:
    """``agree_on(ask)`` and ``gather_or_raise(act)`` in one exchange; gives the results of ``act`` by rank.

    So ``act`` runs before it is known whether the other ranks were called for the same thing.
    """
    answer: dict[str, object] = {}
    _add_what_it_asks(answer, ask)
    raised = _add_what_it_gives(answer, ranks, act, doing) if "asks" in answer else None
    answers = _exchanged(ranks, answer, doing)
    _raise_unless_asked_alike(answers)
    return _given(answers, raised, doing)


def first_says(ranks: Ranks, opinion: bool, doing: str) -> bool:
    """The ``opinion`` of rank 0, on all ranks. Every rank calls this."""
    return ranks.sum([int(opinion and ranks.rank == 0)], doing)[0] > 0


def _add_what_it_asks(answer: dict[str, object], ask: Callable[[], str]) -> None:
    try:
        answer["asks"] = ask()
    except (ValueError, TypeError) as error:
        answer["refuses"] = str(error)


def _add_what_it_gives(
    answer: dict[str, object], ranks: Ranks, act: Callable[[], object], doing: str
) -> Exception | None:
    try:
        answer["gives"] = act()
    except PeerLostError:
        raise
    except Exception as error:  # whatever it is, the others are to hear of it
        if not _says_all(error):
            _logger.warning("%s failed on rank %d", doing, ranks.rank, exc_info=error)
        answer["failed"] = failure_of(error)
        return error
    return None


def _exchanged(ranks: Ranks, answer: Mapping[str, object], doing: str) -> list[dict[str, Any]]:
    return [json.loads(data) for data in ranks.gather(json.dumps(answer).encode(), doing)]


def _raise_unless_asked_alike(answers: Sequence[Mapping[str, Any]]) -> None:
    refused = {rank: each["refuses"] for rank, each in enumerate(answers) if "refuses" in each}
    if refused:
        raise ValueError(_told(refused, len(answers))) from None
    asked = {rank: each.get("asks", "another operation") for rank, each in enumerate(answers)}
    if len(set(asked.values())) > 1:
        raise RanksDisagreeError(
            f"the ranks are asked for different things ({_told(asked, len(answers))}); call the same on all of them, "
            "in the same order, with the same arguments"
        )


def _given(answers: Sequence[Mapping[str, Any]], raised: Exception | None, doing: str) -> list[Any]:
    failed = {rank: each["failed"] for rank, each in enumerate(answers) if "failed" in each}
    if failed:
        failure, cause = joined_failure(failed, doing, len(answers)), _cause_of(raised)
        if failure.says_all and cause is not None:  # its line alone is shown; programs read its number
            cause.with_traceback(None).__suppress_context__ = True
        raise failure from cause
    return [each["gives"] for each in answers]


def failure_of(error: Exception) -> dict[str, object]:
    """An error as JSON, for the other ranks; ``joined_failure`` makes an error of it there."""
    return {
        "kind": type(error).__name__,
        "text": in_words(error),
        "mismatch": _parts_of(error),
        "says_all": _says_all(error),
    }


def joined_failure(failed: Mapping[int, Mapping[str, Any]], doing: str, num_ranks: int) -> CheckpointError:
    """One error that tells of the failures of several ranks, given by rank as ``failure_of`` made them.

    Where some ranks were fenced by another run, it tells of these alone: the other failures follow from that.
    """
    if any(each["kind"] == CheckpointFenced.__name__ for each in failed.values()):
        failed = {rank: each for rank, each in failed.items() if each["kind"] == CheckpointFenced.__name__}
    error = _joined(failed, doing, num_ranks)
    error.says_all = all(each["says_all"] for each in failed.values())
    return error


def _joined(failed: Mapping[int, Mapping[str, Any]], doing: str, num_ranks: int) -> CheckpointError:
    kinds = {each["kind"] for each in failed.values()}
    kind: object = getattr(errors, kinds.pop(), None) if len(kinds) == 1 else None
    if kind is CheckpointMismatch:
        return _joined_mismatch({rank: each["mismatch"] for rank, each in failed.items()}, num_ranks)
    told = _told({rank: each["text"] for rank, each in failed.items()}, num_ranks)
    if isinstance(kind, type) and issubclass(kind, CheckpointError) and kind is not CheckpointError:
        return kind(told)
    return CheckpointError(f"{doing} failed: {told}")


def _says_all(error: Exception) -> bool:
    """Whether an error's message says all there is to know: it is a refusal, or what the system told this library."""
    cause = _cause_of(error)
    return cause is None or (isinstance(cause, OSError) and cause.errno is not None and _is_of_library(cause))


def _is_of_library(error: BaseException) -> bool:
    """Whether this library's own code ran into an error, be it within Python's library; True where nothing tells.

    Else the script's code did, which was called for what a checkpoint holds: where, its traceback alone says.
    """
    modules = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    others = [module for module in modules if module not in sys.stdlib_module_names]
    return not others or others[-1] == __name__.partition(".")[0]


def _cause_of(error: BaseException | None) -> BaseException | None:
    """What a failure comes from, once: the error itself, or the cause of one that is in the library's words."""
    return error.__cause__ if isinstance(error, CheckpointError) else error


def _joined_mismatch(failed: Mapping[int, Mapping[str, Any]], num_ranks: int) -> CheckpointMismatch:
    """One CheckpointMismatch with the names that any rank has found."""
    return CheckpointMismatch(
        _told({rank: each["message"] for rank, each in failed.items()}, num_ranks),
        missing=list(dict.fromkeys(name for each in failed.values() for name in each["missing"])),
        extra=list(dict.fromkeys(name for each in failed.values() for name in each["extra"])),
        misshaped={name: how for each in failed.values() for name, how in each["misshaped"].items()},
    )


def _told(texts: Mapping[int, str], num_ranks: int) -> str:
    at: dict[str, list[int]] = {}
    for rank, text in texts.items():
        at.setdefault(text, []).append(rank)
    return "; ".join(f"{_of_ranks(ranks)}{text}" if num_ranks > 1 else text for text, ranks in at.items())


def _parts_of(error: Exception) -> dict[str, object] | None:
    """The message and the names of a CheckpointMismatch, as JSON; None for other errors."""
    if not isinstance(error, CheckpointMismatch):
        return None
    return {name: getattr(error, name) for name in ("message", "missing", "extra", "misshaped")}


def _of_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}: " if len(ranks) == 1 else f"{len(ranks)} ranks, the first of them rank {ranks[0]}: "
