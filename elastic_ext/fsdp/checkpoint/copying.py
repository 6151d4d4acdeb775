"""Copying: tensors that are being copied while the next forward and backward passes run.

They are those that change in ``optimizer.step()`` alone, which waits for the end of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from elastic_ext.errors import CheckpointError
from elastic_ext.torch_private.sharded import version_of

from .memory import Part, put_bytes
from .samples import Samples

__all__ = ["Copying"]


class Copying:
    """Copies of some parts, begun by the training's thread and made by another; ``keep`` is called if all are good."""

    def __init__(self, parts: Sequence[tuple[Part, memoryview]], keep: Callable[[], None]) -> None:
        self._parts = parts
        self._keep = keep
        self._is_whole = False
        self._versions = [version_of(part.tensor) for part, _ in parts]
        self._samples = Samples([part.tensor for part, _ in parts])
        self._has_ended, self._is_judged = threading.Event(), threading.Event()
        self._changed: str | None = None  # the name of a part that was
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for device in {part.tensor.device for part, _ in parts if part.tensor.is_cuda}:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))  # the last step is still being worked on

    def run(self) -> None:
        """Copy all."""
        try:
            for part, into in self._parts:
                stream = self._streams.get(part.tensor.device)
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    put_bytes(part, into)
            self._is_whole = True
        finally:
            self._has_ended.set()

    def wait(self) -> None:
        """Return once what is copied may change; in the training's thread, where no change is half done now."""
        if self._is_judged.is_set():
            return
        self._has_ended.wait()
        self._changed = self._changed or self._find_changed()
        is_good, self._is_whole = self._is_whole and self._changed is None, False  # kept once, if that is interrupted
        if is_good:
            self._keep()
        self._is_judged.set()  # only now: what is committed is kept no more
        self._parts, self._samples = (), Samples([])  # which may be freed while what was copied is written

    def _find_changed(self) -> str | None:
        """The name of a part that is another than when this began; what is written past autograd, by its samples."""
        for (part, _), version in zip(self._parts, self._versions, strict=True):
            if version_of(part.tensor) != version:
                return part.name
        place = self._samples.changed()
        return None if place is None else self._parts[place][0].name

    def end(self) -> None:
        """Nobody is to wait for it any more."""
        self._has_ended.set()
        self._is_judged.set()

    def make_sure(self, seconds: float) -> None:
        """CheckpointError where something was changed meanwhile, or nobody has come to ``wait`` for so long."""
        if not self._is_judged.wait(seconds):
            raise CheckpointError(f"no step has ended within {seconds:g} seconds since this checkpoint was copied")
        if self._changed is not None:
            raise CheckpointError(
                f"{self._changed} was changed in place while it was being copied for this checkpoint; change "
                "parameters and optimizer state within `with trainer.mutate():`, which waits for that, or give "
                "the trainer overlap_saving=False"
            )
