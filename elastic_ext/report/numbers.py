"""Times and amounts in words, for the page. Pure."""

from __future__ import annotations

from datetime import datetime, timezone

__all__ = ["amount", "elapsed_in_words", "moment", "percent", "seconds_in_words"]

_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def seconds_in_words(seconds: float) -> str:
    """A length of time with three digits or two units, such as ``49.9 ms``, ``12.3 s`` and ``2 h 5 min``."""
    if seconds < 0.9995:
        return f"{amount(seconds * 1e6)} µs" if 0 < seconds < 0.9995e-3 else f"{amount(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{amount(seconds)} s"
    return _in_units(round(seconds))


def elapsed_in_words(seconds: float) -> str:
    """As a mark on an axis: ``0``, ``30 s``, ``1 h 30 min``."""
    if seconds <= 0:
        return "0"
    return seconds_in_words(seconds) if seconds < 1 else _in_units(round(seconds))


def amount(value: float) -> str:
    """Three digits, or all of those before the point, such as ``0.0123``, ``12.3`` and ``12,345``."""
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3g}"
    return f"{value:.3g}" if abs(value) >= 1e-4 else f"{value:.2g}"


def percent(share: float) -> str:
    """Such as ``41.6%``; what is there, however little, is not 0."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share:.1%}"


def moment(seconds: float) -> str:
    """Seconds since 1970 as a date and time, which are Greenwich's."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # which no clock has shown
        return "a time that cannot be"


def _in_units(seconds: int) -> str:
    for place, (unit, length) in enumerate(_UNITS):
        if seconds >= length:
            whole, rest = divmod(seconds, length)
            if place + 1 < len(_UNITS):
                lower, its_length = _UNITS[place + 1]
                if rest // its_length:
                    return f"{whole} {unit} {rest // its_length} {lower}"
            return f"{whole} {unit}"
    return "0 s"
