"""Values in words, for people: sizes, ages, and text that cannot steer a terminal. Pure."""

from __future__ import annotations

__all__ = ["age_in_words", "counted", "not_finite_in_words", "on_one_line", "size_in_words"]

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_STEPS = (("d", 86400), ("h", 3600), ("min", 60))


def size_in_words(num_bytes: int) -> str:
    """Three digits and a unit, such as ``1.50 GiB``."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in _UNITS:
        size /= 1024
        if size < 999.5 or unit == _UNITS[-1]:
            break
    return f"{size:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f} {unit}"


def age_in_words(seconds: float) -> str:
    """The largest unit that fits, rounded down, such as ``3 h``; what lies ahead of this clock is ``0 s`` old."""
    for unit, length in _STEPS:
        if seconds >= length:
            return f"{int(seconds / length)} {unit}"
    return f"{max(int(seconds), 0)} s"


def counted(number: int, noun: str) -> str:
    """How many of what, such as ``1 node`` and ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def not_finite_in_words(number: int, num_skipped: int) -> str:
    """Steps whose gradients or losses were not finite, and how many of them were left out."""
    left_out = f", {num_skipped} left out" if num_skipped else ""
    return f"{counted(number, 'step')} not finite{left_out}"


def on_one_line(text: str) -> str:
    """``text`` without line breaks and other characters that steer a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)
