"""What was staged on all nodes is made a checkpoint, when no worker of a round lives any more and before others start.

Every agent of a round does the same: they say what is staged, choose alike, write, and one commits.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastic_ext.errors import ElasticError
from elastic_ext.fsdp.checkpoint.complete import Choice, Completion, Outcome, choose, clear, complete, rows_in
from elastic_ext.fsdp.checkpoint.shelved import Row

from .board import BoardGone, RoundBoard

__all__ = ["persist"]

_logger = logging.getLogger(__name__)


def persist(folder: Path, board: RoundBoard | None, *, timeout_seconds: float) -> list[Outcome]:
    """Make checkpoints of what workers have staged in ``folder`` and on the other nodes, and clear it; what came of it.

    Without a board this node is on its own. Nothing is raised that storage, another run or another node has done.
    """
    try:
        if board is None or board.num_nodes == 1:
            outcomes = complete(folder)
        else:
            outcomes = _persist_together(folder, board, timeout_seconds)
    except BoardGone as error:
        outcomes = []
        _logger.warning(
            "what was staged on this node is not made a checkpoint, as the others are not heard of: %s", error
        )
    clear(folder)
    return outcomes


def _persist_together(folder: Path, board: RoundBoard, timeout_seconds: float) -> list[Outcome]:
    own = [asdict(row) for row in rows_in(folder)]
    rows = [Row(**row) for each in board.exchange("staged", own, timeout_seconds=timeout_seconds) for row in each]
    return [_completed(folder, board, choice, timeout_seconds) for choice in choose(rows)]


def _completed(folder: Path, board: RoundBoard, choice: Choice, timeout_seconds: float) -> Outcome:
    """One run's newest save: each node writes its part, between two meetings of all."""
    if choice.generation is None:
        return Outcome(run_id=choice.run_id, path=None, why=choice.why)
    run, path = choice.run_id, None
    with Completion(folder, choice) as completion:
        trouble, written = "", []
        try:
            if completion.has_first:
                completion.begin()
        except (ElasticError, OSError) as error:
            trouble = str(error)
        why = _first(board.exchange(f"begun/{run}", trouble, timeout_seconds=timeout_seconds))
        if not why:
            try:
                written = completion.write()
            except (ElasticError, OSError) as error:
                trouble = str(error)
            told: list[Any] = board.exchange(f"written/{run}", [trouble, written], timeout_seconds=timeout_seconds)
            why = _first([each for each, _ in told])
            if not why and completion.has_first:
                try:
                    path = completion.commit([one for _, ranks in told for one in ranks])
                except (ElasticError, OSError) as error:
                    why = str(error)
            why = _first(board.exchange(f"committed/{run}", why, timeout_seconds=timeout_seconds))
    if why:
        return Outcome(run_id=run, path=None, why=f"what was staged is not completed: {why}")
    return Outcome(run_id=run, path=path, why=f"{choice.why}, and was completed")


def _first(troubles: list[str]) -> str:
    return next((trouble for trouble in troubles if trouble), "")
