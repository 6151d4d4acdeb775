"""Formats: what is said of a file whose format this library does not know: it is neither damaged nor absent."""

from __future__ import annotations

from elastic_ext.errors import CheckpointError

__all__ = ["unknown_format"]


def unknown_format(where: object, number: object, known: object, saved_with: object = None) -> CheckpointError:
    """The error of whoever meets one, which nobody passes over; ``saved_with`` are the versions that COMMIT tells."""
    versions = saved_with.items() if isinstance(saved_with, dict) else ()
    told = ", ".join(f"{name} {version}" for name, version in versions)
    which = f" (it was saved with {told})" if told else ""
    return CheckpointError(
        f"{where} has format {number}, and this elastic_ext reads formats up to {known}: it is not damaged. Use a "
        f"newer elastic_ext{which}, or move the checkpoint's folder away to go on without it"
    )
