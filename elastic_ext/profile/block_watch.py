"""BlockWatch: what each of a model's blocks keeps from its forward pass for the backward pass.

Hooks tell an account of tensors which block computes. What that block makes is its own: activations that autograd has
saved, and its output, where anybody still holds that. What is left of it as the forward pass ends is what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .tally import Tally

__all__ = ["BlockWatch"]


class BlockWatch:
    """``with`` it around one forward pass. A block may be called several times, within another one, and may raise."""

    def __init__(self, blocks: Sequence[nn.Module], tally: Tally) -> None:
        self._blocks = tuple(blocks)
        self._tally = tally
        self._seen: set[int] = set()
        self._around: list[int | None] = []  # blocks whose calls have not ended, the outermost first
        self._handles: list[RemovableHandle] = []
        self.kept_bytes: tuple[int, ...] = ()
        """Of each block, once the forward pass has ended; empty where one was not seen to compute: it is left out of
        this pass, or compiled, where nobody sees who makes what."""

    def __enter__(self) -> BlockWatch:
        for number, block in enumerate(self._blocks):
            enter, leave = self._hooks_of(number)
            self._handles.append(block.register_forward_pre_hook(enter, prepend=True))
            self._handles.append(block.register_forward_hook(leave, always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._around.clear()
        self._tally.block = None
        if len(self._seen) == len(self._blocks):
            held = self._tally.held_of_blocks
            self.kept_bytes = tuple(held.get(number, 0) for number in range(len(self._blocks)))

    def _hooks_of(self, number: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(module: nn.Module, arguments: Any) -> None:
            if torch.compiler.is_compiling():
                return
            self._seen.add(number)
            self._around.append(self._tally.block)
            self._tally.block = number

        def leave(module: nn.Module, arguments: Any, outputs: Any) -> None:
            if not torch.compiler.is_compiling() and self._around and self._tally.block == number:
                self._tally.block = self._around.pop()

        return enter, leave
