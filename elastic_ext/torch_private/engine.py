"""Backward passes while they run: which one, what it adds to, when it ends; by private parts of torch's engine.

Tried first with a small graph: where this torch answers otherwise than it should, or not at all, every pass is taken
for one that adds to gradients, as nearly all do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

__all__ = ["Engine", "above", "after_pass", "at_end_of_pass", "current_pass", "is_running", "tells_of_passes"]

_logger = logging.getLogger(__name__)

_NONE = -1


def is_running() -> bool:
    """Whether this is called from within a backward pass; False where torch does not tell."""
    return current_pass() != _NONE


def current_pass() -> int:
    """The number of the backward pass within which this is called; -1 outside, or where torch does not tell."""
    number = getattr(torch._C, "_current_graph_task_id", None)
    return _NONE if number is None else int(number())


def above(node: Any) -> list[Any]:
    """The nodes of a graph that a backward pass comes to after ``node``. A hook of the node may keep them, and not the
    node itself: that would keep the graph until garbage is collected."""
    return [edge[0] for edge in node.next_functions]


class Engine:
    """Tells backward passes that add to parameters' ``grad`` from those of ``torch.autograd.grad``."""

    def __init__(self) -> None:
        self._leaf: Any = None  # the node of a parameter whose gradient was added to
        self._answers = _engine_answers()

    def is_adding(self, above: Sequence[Any]) -> bool:
        """Whether the running pass adds to a leaf's ``grad`` by way of ``above``, nodes or None. Called in hooks."""
        if not self._answers or (self._leaf is not None and _will_execute(self._leaf)):
            return True
        waiting: list[Any] = list(above)
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node.next_functions:
                waiting += [edge[0] for edge in node.next_functions]
            elif _will_execute(node):
                self._leaf = node
                return True
        return False


def tells_of_passes() -> bool:
    """Whether this torch numbers backward passes and calls back at their end, as ``current_pass`` and others need."""
    return hasattr(torch._C, "_current_graph_task_id") and _queue() is not None


def _queue() -> Any:
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    return getattr(engine, "queue_callback", None)


def after_pass(act: Callable[[], None]) -> None:
    """Call ``act`` when the running pass has ended, DDP's and FSDP's work at its end included; called within a hook.

    Where this torch has no such callbacks, nothing happens.
    """
    queue = _queue()
    if queue is not None:
        queue(lambda: queue(act))  # at the end of those that wait, which is where others may queue as well


def at_end_of_pass(before: Callable[[], None], after: Callable[[], None]) -> bool:
    """Call ``before`` when the running pass has computed all, and ``after`` once DDP and FSDP are done with it.

    To come before theirs it has to be called within the first hook of the pass. False where this torch has no such
    callbacks.
    """
    queue = _queue()
    if queue is None:
        return False

    def at_end() -> None:
        before()
        queue(after)

    queue(at_end)
    return True


def _will_execute(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # so it says of a leaf whose gradient goes to the caller of autograd.grad
        return False


def _engine_answers() -> bool:
    """Whether this torch tells passes that add to ``grad`` from others, tried with a small graph; warns if not."""
    answers: list[bool] = []
    with torch.enable_grad():
        leaf, other = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        node = get_gradient_edge(leaf).node
        try:
            for run in (torch.autograd.backward, lambda result: torch.autograd.grad(result, other)):
                result = leaf * other
                result.register_hook(lambda gradient: answers.append(_will_execute(node)))  # type: ignore[no-untyped-call]
                run(result)
        except AttributeError:
            answers.clear()
    if answers == [True, False]:
        return True
    _logger.warning(
        "torch %s does not tell whether a backward pass adds to gradients (torch._C._will_engine_execute_node): "
        "gradients that torch.autograd.grad computes within a step are multiplied by the weight of the micro-batch too",
        torch.__version__,
    )
    return False
