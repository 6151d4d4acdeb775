"""What was staged on all nodes is made a checkpoint, when no worker of a round lives any more and before others start.

Every agent of a round does the same: they say what is staged, choose alike, write, and one commits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastic_ext.errors import ElasticError
from elastic_ext.fsdp.checkpoint.saving.rescue import Choice, Completion, Outcome, choose, clear, complete, rows_in
from elastic_ext.fsdp.checkpoint.saving.shared_memory import Row
from elastic_ext.ranks.node_board import RoundBoard

__all__ = ["persist"]

_Exchange = Callable[[str, Any], list[Any]]
"""What this node says of something, and then what all do."""


def persist(folder: Path, board: RoundBoard | None, *, name: str, timeout_seconds: float) -> list[Outcome]:
    """Make checkpoints of what workers have staged in ``folder`` and on the other nodes, and clear it; what came of it.

    Without a board this node is on its own; ``name`` tells one such meeting of a round from another. Nothing is raised
    that storage or another run has done. BoardGone where another node is lost: what is staged here stays.
    """

    def exchange(what: str, row: Any) -> list[Any]:
        assert board is not None
        return board.exchange(f"{name}/{what}", row, timeout_seconds=timeout_seconds)

    is_alone = board is None or board.num_nodes == 1
    outcomes = complete(folder) if is_alone else _persist_together(folder, exchange)
    clear(folder)
    return outcomes


def _persist_together(folder: Path, exchange: _Exchange) -> list[Outcome]:
    own = [asdict(row) for row in rows_in(folder)]
    rows = [Row(**row) for each in exchange("staged", own) for row in each]
    return [_completed(folder, exchange, choice) for choice in choose(rows)]


def _completed(folder: Path, exchange: _Exchange, choice: Choice) -> Outcome:
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
        why = _first(exchange(f"begun/{run}", trouble))
        if not why:
            try:
                written = completion.write()
            except (ElasticError, OSError) as error:
                trouble = str(error)
            told = exchange(f"written/{run}", [trouble, written])
            why = _first([each for each, _ in told])
            if not why and completion.has_first:
                try:
                    path = completion.commit([one for _, ranks in told for one in ranks])
                except (ElasticError, OSError) as error:
                    why = str(error)
            why = _first(exchange(f"committed/{run}", why))
    if why:
        return Outcome(run_id=run, path=None, why=f"what was staged is not completed: {why}")
    return Outcome(run_id=run, path=path, why=f"{choice.why}, and was completed")


def _first(troubles: list[str]) -> str:
    return next((trouble for trouble in troubles if trouble), "")
