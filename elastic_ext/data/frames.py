"""Numbered messages over pipes, written and read without ever waiting.

frame:  8 bytes, the length of the payload | 8 bytes, its number | the payload
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections import deque

__all__ = ["Inbox", "Outbox"]

_HEADER = struct.Struct("=Qq")
_INT = struct.Struct("i")
_READ_BYTES = 65536  # what a pipe holds, unless somebody changes that
_COPIED_BYTES = 65536  # payloads up to here are written in one call with their header


class Outbox:
    """The end of a pipe that is written to. What the pipe has no room for stays here until ``flush``."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._left: deque[memoryview] = deque()
        self.num_sent_bytes = 0
        """That it was given to send."""

    def send(self, number: int, payload: memoryview) -> bool:
        """Whether all of it, and of what was sent before, is in the pipe. BrokenPipeError if nobody can read it."""
        header = _HEADER.pack(len(payload), number)
        self.num_sent_bytes += len(header) + len(payload)
        if len(payload) <= _COPIED_BYTES:
            self._left.append(memoryview(b"".join((header, payload))))
        else:
            self._left.extend((memoryview(header), payload))
        return self.flush()

    def flush(self) -> bool:
        """The same of what is left."""
        while self._left:
            first = self._left[0]
            try:
                num_written = os.write(self._descriptor, first)
            except BlockingIOError:
                return False
            if num_written == len(first):
                self._left.popleft()
            else:
                self._left[0] = first[num_written:]
        return True

    def num_read_bytes(self) -> int:
        """How much of it has been read at the other end, also where that is closed by now."""
        (num_in_pipe,) = _INT.unpack(fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(_INT.size)))
        return self.num_sent_bytes - sum(map(len, self._left)) - int(num_in_pipe)


class Inbox:
    """The end of a pipe that is read from."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._partial = bytearray()
        self._missing_bytes = 0  # until the partial frame is whole, as far as that is known

    def read(self) -> list[tuple[int, memoryview]]:
        """The messages that have arrived whole, none where none have. EOFError when nobody can write any more."""
        while True:
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                return []
            if not data:
                raise EOFError
            if self._partial:
                self._partial += data
                if len(data) < self._missing_bytes:
                    self._missing_bytes -= len(data)
                    continue
                whole: bytes | bytearray = self._partial
                self._partial = bytearray()
            else:
                whole = data
            messages = self._taken_apart(whole)
            if messages:
                return messages

    def _taken_apart(self, data: bytes | bytearray) -> list[tuple[int, memoryview]]:
        view = memoryview(data)
        messages = []
        start = 0
        self._missing_bytes = 0
        while start + _HEADER.size <= len(view):
            num_bytes, number = _HEADER.unpack_from(view, start)
            end = start + _HEADER.size + num_bytes
            if end > len(view):
                self._missing_bytes = end - len(view)
                break
            messages.append((number, view[start + _HEADER.size : end]))
            start = end
        if start < len(view):
            self._partial = bytearray(view[start:])
        return messages
