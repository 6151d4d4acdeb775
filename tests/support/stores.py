"""A store of keys and values in plain Python, such as torch has them."""

from __future__ import annotations

import threading
from datetime import timedelta

__all__ = ["PlainStore"]


class PlainStore:
    """A store of boards in the memory of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str, /) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str, /) -> bytes:
        return self._values[key]

    def add(self, key: str, value: int, /) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + value
            self.set(key, str(total))
        return total

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError(f"no value of {', '.join(keys)} within {timeout}")

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        with self._changed:
            if self._values.get(key, b"").decode() == expected:
                self.set(key, desired)
            return self._values[key]

    def delete_key(self, key: str, /) -> bool:
        return self._values.pop(key, None) is not None
