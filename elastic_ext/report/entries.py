"""What a report calls the ledger's entries, and in which order it shows them."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_ext.profile.ledger import ENTRIES, Entry

__all__ = ["HATCHED", "LABELS", "MEANINGS", "ORDER"]

ORDER = ENTRIES
LABELS: Mapping[Entry, str] = {
    Entry.FORWARD: "forward",
    Entry.BACKWARD: "backward",
    Entry.OPTIMIZER: "optimizer",
    Entry.TRANSFER: "to the accelerator",
    Entry.STEP: "steps, not looked at",
    Entry.COMMUNICATION: "exposed communication",
    Entry.OTHER: "the loop's own work",
    Entry.DATA: "waiting for data",
    Entry.AGREEMENT: "agreement",
    Entry.CHECKPOINT: "checkpoints",
    Entry.CHANGE: "changes",
    Entry.ROLLED_BACK: "steps rolled back",
    Entry.AGAIN: "steps taken again",
    Entry.STARTUP: "startup",
    Entry.RESTART: "restarts",
    Entry.UNSEEN: "lost with a process",
    Entry.OUTSIDE: "outside of epochs",
    Entry.STOPPED: "nothing running",
}
MEANINGS: Mapping[Entry, str] = {
    Entry.FORWARD: "the model's forward pass, and the loss",
    Entry.BACKWARD: "the backward pass, as long as gradients are computed",
    Entry.OPTIMIZER: "the optimizer's step",
    Entry.TRANSFER: "batches on their way to the accelerator",
    Entry.STEP: "steps of processes in which none was looked at closely",
    Entry.COMMUNICATION: "waiting for gradients and for other ranks, with nothing left to compute",
    Entry.OTHER: "what the loop does besides: logging, metrics, schedules",
    Entry.DATA: "waiting for a batch",
    Entry.AGREEMENT: "words with the other ranks between steps",
    Entry.CHECKPOINT: "training waits for a checkpoint",
    Entry.CHANGE: "configs coming into force",
    Entry.ROLLED_BACK: "steps that a process took back, as when memory ran out",
    Entry.AGAIN: "steps that came to nothing, as training went on from an earlier one",
    Entry.STARTUP: "from the start of a process to its first step",
    Entry.RESTART: "from a failure or the end of a process to the first step of the next",
    Entry.UNSEEN: "what a process did after its last record, up to its failure",
    Entry.OUTSIDE: "evaluation, and what else lies between epochs and after them",
    Entry.STOPPED: "no process, and no launcher about to start one",
}
HATCHED = frozenset((Entry.AGAIN, Entry.RESTART, Entry.UNSEEN, Entry.STOPPED))
"""Told apart by lines as well, for those to whom colours are alike."""
