"""Private parts of torch's elastic agent and rendezvous: each is looked for, and done without where it is missing."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from types import FrameType
from typing import Any

import torch.numa.binding
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.rendezvous import RendezvousHandler, dynamic_rendezvous

__all__ = [
    "bound_command",
    "bound_function",
    "complete_once",
    "handling_signals_by",
    "judge_silence_here",
    "leave",
    "participants",
    "serve_workers_by",
    "stop_heartbeats",
    "waiting",
]

_logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 10.0


def participants(handler: RendezvousHandler) -> dict[str, int] | None:
    """The nodes of the present rendezvous round with their places, as last read; None where torch does not tell."""
    state = getattr(getattr(handler, "_state_holder", None), "state", None)
    found = getattr(state, "participants", None)
    return None if found is None else {str(node): place for node, place in found.items()}


def waiting(handler: RendezvousHandler) -> frozenset[str]:
    """The nodes that wait for the next rendezvous round, as last read; none where torch does not tell."""
    state = getattr(getattr(handler, "_state_holder", None), "state", None)
    return frozenset(map(str, getattr(state, "wait_list", ())))


def complete_once(handler: RendezvousHandler, expected: Callable[[], frozenset[str]]) -> bool:
    """Have a dynamic rendezvous complete a round as soon as all nodes that ``expected`` names have come to it; False
    where torch has no such rendezvous.

    It would wait for more of them until its last call is over. Where ``expected`` names none, it does.
    """
    holder = getattr(handler, "_state_holder", None)
    look = getattr(holder, "_sanitize", None)
    if holder is None or look is None:
        return False

    def look_and_complete() -> None:
        look()
        state, names = holder.state, expected()
        if names and state.deadline is not None and names <= {str(node) for node in state.participants}:
            now = datetime.fromtimestamp(time.time(), timezone.utc)
            state.deadline = min(state.deadline, now - timedelta(seconds=1))

    holder._sanitize = look_and_complete
    return True


def serve_workers_by(handler: RendezvousHandler, make_store: Callable[[], object]) -> None:
    """Have a dynamic rendezvous get its store for workers from ``make_store``; its own listens on all addresses."""
    if hasattr(handler, "_create_tcp_store_server"):
        handler._create_tcp_store_server = lambda address, port: make_store()


def judge_silence_here(handler: RendezvousHandler, *, clock: Callable[[], float] = time.monotonic) -> bool:
    """Have a dynamic rendezvous judge by ``clock``, which is monotonic, whether a node's heartbeats are too old; False
    where it does not compare times of day, or torch does so in another way.

    torch compares the times of day that nodes tell with the one here. Where the clock of a node is put back or forward,
    the others would take it for lost, or it the others; and it would tell no heartbeat until its clock had caught up.
    """
    holder, node = getattr(handler, "_state_holder", None), getattr(handler, "_this_node", None)
    remove_lost, last_call = getattr(holder, "_sanitize", None), _last_call_of(handler)
    if holder is None or node is None or remove_lost is None or last_call is None:
        return False
    heard: dict[object, tuple[datetime, float]] = {}  # of each node: what it told last, and when that was new here

    def remove_lost_by_clock() -> None:
        state, now, here = holder.state, clock(), datetime.fromtimestamp(time.time(), timezone.utc)
        told = dict(state.last_heartbeats)
        before = dict(heard)
        heard.clear()
        for each, at in told.items():
            heard[each] = before[each] if each in before and before[each][0] == at else (at, now)
        state.last_heartbeats.update({each: here - timedelta(seconds=now - at) for each, (_, at) in heard.items()})
        remove_lost()
        state.last_heartbeats.update({each: told[each] for each in state.last_heartbeats if each != node})
        if state.deadline is not None:  # for more nodes, by the clock of the one that came last
            state.deadline = min(state.deadline, here + last_call)

    holder._sanitize = remove_lost_by_clock
    return True


def stop_heartbeats(handler: RendezvousHandler) -> None:
    """Stop this node's heartbeats to a rendezvous that is gone."""
    stop = getattr(handler, "_stop_heartbeats", None)
    if stop is not None:
        stop()


def leave(handler: RendezvousHandler) -> bool:
    """Take this node out of the rendezvous round, so that others need not wait for it; False if torch cannot."""
    operation = getattr(dynamic_rendezvous, "_RendezvousExitOp", None)
    executor, stop = getattr(handler, "_op_executor", None), getattr(handler, "_stop_heartbeats", None)
    if operation is None or executor is None or stop is None:
        return False
    stop()
    executor.run(operation(), time.monotonic() + _LEAVE_SECONDS)
    return True


@contextmanager
def handling_signals_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """A context in which torch, which sets a handler for stop signals as it starts a worker, sets this one.

    torch's own raises at once: of a worker that was started just then nobody would know. It stays in workers that are
    forked, and where torch has it under another name.
    """
    module: Any = api
    its_own = getattr(module, "_terminate_process_handler", None)
    if its_own is None:
        yield
        return
    pid = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        act = handler if os.getpid() == pid else its_own
        act(number, frame)

    module._terminate_process_handler = handle
    try:
        yield
    finally:
        module._terminate_process_handler = its_own


def bound_command(command: Sequence[str], local_rank: int, options: Any) -> tuple[str, ...]:
    """A worker's command, bound to the processors near its device as torch's NUMA ``options`` say."""
    bind = _named("_maybe_wrap_command_args_with_numa_binding", options)
    return tuple(command) if bind is None else tuple(bind(tuple(command), gpu_index=local_rank, numa_options=options))


def bound_function(function: Callable[..., Any], local_rank: int, options: Any) -> Callable[..., Any]:
    """A worker's function, bound to the processors near its device as torch's NUMA ``options`` say."""
    bind = _named("_maybe_wrap_with_numa_binding", options)
    return function if bind is None else bind(function, gpu_index=local_rank, numa_options=options)


def _last_call_of(handler: RendezvousHandler) -> timedelta | None:
    """How long a dynamic rendezvous waits for more nodes once there are enough."""
    return getattr(getattr(getattr(handler, "_settings", None), "timeout", None), "last_call", None)


def _named(name: str, options: Any) -> Callable[..., Any] | None:
    """The function of torch's NUMA binding of this name; None without ``options``, or where torch has none."""
    if options is None:
        return None
    module = torch.numa.binding
    found = getattr(module, name, None) or getattr(module, name.removeprefix("_"), None)
    if found is None:
        _logger.warning(
            "torch %s has no %s in torch.numa.binding: workers start without the NUMA binding that was asked for",
            torch.__version__,
            name,
        )
    return found
