"""elastic-ext tuning: what the tuner of a job's master has decided, and what people have it do."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_ext.ckpt.terminal import Terminal
from elastic_ext.errors import MasterError, MasterRefused
from elastic_ext.records.text import on_one_line

from .client import MasterClient
from .job_words import moment_words
from .places import MasterPlace
from .tuning_words import changes_in_words, rates_of
from .wire import master_pb2 as wire
from .wire.plain import as_dict

__all__ = ["decision_record", "decision_words", "run_tuning"]

_DONE = 0
_TROUBLE, _REFUSED = 1, 2


def run_tuning(place: MasterPlace, options: argparse.Namespace, terminal: Terminal) -> int:
    """Do one of the commands; gives the exit status."""
    try:
        with MasterClient(place) as client:
            if options.command == "log":
                report = client.tuning(most=options.last)
            else:
                report = client.control_tuning(options.command, options.reason)
    except (MasterError, ValueError) as error:
        terminal.complain(str(error))
        return _REFUSED if isinstance(error, (MasterRefused, ValueError)) else _TROUBLE
    if options.command == "log":
        for decision in report.decisions:
            terminal.tell(decision_record(decision), decision_words(decision))
        terminal.say(_standing(report.status))
        return _DONE
    decisions = [decision_record(each) for each in report.decisions]
    words = [decision_words(each) for each in report.decisions] or ["nothing follows from that"]
    terminal.tell(
        {"status": as_dict(report.status), "decisions": decisions}, "\n".join([*words, _standing(report.status)])
    )
    return _DONE


def decision_record(decision: wire.TuningDecision) -> dict[str, Any]:
    """One as JSON has it, its changes as values."""
    return {**as_dict(decision), "changes": _changes(decision)}


def decision_words(decision: wire.TuningDecision) -> str:
    """One on a few lines: what, why, what was predicted and measured, what became of it."""
    return "\n".join(on_one_line(line) for line in _lines(decision))


def _lines(decision: wire.TuningDecision) -> Iterator[str]:
    heading = [f"{decision.number:>3}", moment_words(decision.time), f"{decision.kind:<7}"]
    if decision.HasField("version"):
        heading.append(f"version {decision.version}")
    yield "  ".join([*heading, decision.outcome]).rstrip()
    if decision.changes:
        yield f"       {changes_in_words(_changes(decision))}"
    yield f"       {decision.reason}"
    if rates := ", ".join(rates_of(*(_known(decision, name) for name in _RATES))):
        yield f"       {rates}"


_RATES = ("before", "predicted", "measured", "predicted_bytes")


def _known(decision: wire.TuningDecision, name: Any) -> Any:
    return getattr(decision, name) if decision.HasField(name) else None


def _standing(status: wire.TuningStatus) -> str:
    words = f"the tuner's mode is {status.mode}; it is {status.standing}: {status.text}"
    if status.HasField("best"):
        words += f" (best so far: {status.best:.4g} samples/s)"
    return on_one_line(words)


def _changes(decision: wire.TuningDecision) -> Mapping[str, Any]:
    found = {}
    for path, text in sorted(decision.changes.items()):
        try:
            found[path] = json.loads(text)
        except (ValueError, RecursionError):
            found[path] = text
    return found
