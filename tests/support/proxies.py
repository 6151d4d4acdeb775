"""A TCP connection between a test's processes that can be cut and mended, without either end being told."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from types import TracebackType

__all__ = ["Proxy"]

_PIECE_BYTES = 1 << 16


class Proxy:
    """Listens at ``port`` of 127.0.0.1 and leads to another one; while it is cut, nothing passes and nothing ends."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._is_whole = threading.Event()
        self._is_whole.set()
        self._stop = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """From now on what is sent is swallowed up to the mending: as where a switch has failed."""
        self._is_whole.clear()

    def mend(self) -> None:
        """What is sent on connections of before does not arrive any more; new ones are as they should be."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._is_whole.set()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._is_whole.set()
        self._listener.close()
        self.mend()
        for thread in self._threads[1:]:
            thread.join(5)
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._is_whole.wait()
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            self._sockets += [near, far]
            thread = threading.Thread(target=self._pass_on, args=(near, far), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        selector = selectors.DefaultSelector()
        selector.register(near, selectors.EVENT_READ, far)
        selector.register(far, selectors.EVENT_READ, near)
        try:
            while not self._stop.is_set():
                for key, _ in selector.select(0.2):
                    assert isinstance(key.fileobj, socket.socket)
                    piece = key.fileobj.recv(_PIECE_BYTES)
                    if not piece:
                        return
                    if self._is_whole.is_set():
                        key.data.sendall(piece)
        except OSError:
            return
        finally:
            selector.close()
            for each in (near, far):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
