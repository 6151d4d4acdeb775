"""Terminal: where a command's findings go, each in words or as one line of JSON, and bars for those who look."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from elastic_ext.records.text import Progress, on_one_line

__all__ = ["Terminal"]


class Terminal:
    """The output of one command, and what it says beside that."""

    def __init__(self, out: TextIO, err: TextIO, *, as_json: bool) -> None:
        self.as_json = as_json
        self._out = out
        self._err = err

    def tell(self, record: Mapping[str, object], words: str) -> None:
        """One finding: ``record`` on a line of its own where JSON is asked for, else ``words``."""
        self._write(json.dumps(record, allow_nan=False) if self.as_json else words)

    def say(self, words: str) -> None:
        """What is only for people: a heading, a sum."""
        if not self.as_json:
            self._write(words)

    def complain(self, words: str) -> None:
        """What went wrong, beside the output."""
        self._out.flush()
        self._err.write(_printable(f"elastic-ext: {words}\n", self._err))

    def flush(self) -> None:
        """Have all that was said seen, as of what goes on."""
        self._out.flush()

    @contextlib.contextmanager
    def bar(self, description: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
        """A bar of so many bytes while a ``with`` lasts, on a terminal alone; what it gives is told of bytes done."""
        progress = Progress(is_shown=self._err.isatty(), unit="B")
        progress.begin(description, num_bytes)
        try:
            yield progress.advance
        finally:
            progress.end()

    @contextlib.contextmanager
    def total_bar(self, description: str) -> Iterator[Callable[[int, int], None]]:
        """The same where the number of bytes is not known before; what it gives is told of bytes done, and of all."""
        told = 0
        with contextlib.ExitStack() as stack:
            advance: list[Callable[[int], None]] = []

            def tell(done: int, total: int) -> None:
                nonlocal told
                if not advance:
                    advance.append(stack.enter_context(self.bar(description, total)))
                advance[0](done - told)
                told = done

            yield tell

    def _write(self, words: str) -> None:
        self._out.write(_printable(f"{words}\n", self._out))


def _printable(words: str, stream: TextIO) -> str:
    """``words`` with what the stream cannot hold escaped, and without what would steer a terminal."""
    encoding = stream.encoding or "utf-8"
    words = "\n".join(map(on_one_line, words.split("\n")))
    return words.encode(encoding, "backslashreplace").decode(encoding)
