"""Versions: this library's own, and those of torch that it was tested with. They are written here alone: setup.cfg
reads the library's, and whoever tells one asks here."""

from __future__ import annotations

import re

__all__ = ["TESTED_TORCH", "TESTED_TORCH_IN_WORDS", "VERSION", "why_torch_is_untested"]

VERSION = "0.2.0"

TESTED_TORCH = ((2, 11), (2, 13))
"""The versions of torch that the library was tested with, oldest first. One is added once its tests have passed:
CONTRIBUTING.md says how, and which line of setup.cfg goes with it."""
TESTED_TORCH_IN_WORDS = " and ".join(".".join(map(str, version)) for version in TESTED_TORCH)


def why_torch_is_untested(torch: str) -> str | None:
    """A sentence that says that this version of torch was never tested; None where it was."""
    numbers = re.match(r"(\d+)\.(\d+)", torch)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) in TESTED_TORCH:
        return None
    return f"torch {torch} was never tested with elastic_ext {VERSION}; tested: {TESTED_TORCH_IN_WORDS}"
