"""Version: this library's own. It is written here alone: setup.cfg reads it, and so does whoever tells it."""

from __future__ import annotations

__all__ = ["VERSION"]

VERSION = "0.1.0"
