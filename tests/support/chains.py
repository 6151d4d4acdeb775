"""What Python shows above an error: the errors that it was raised from, or while they were handled."""

from __future__ import annotations

__all__ = ["num_causes"]


def num_causes(error: BaseException) -> int:
    """How many errors Python prints above ``error``."""
    above = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return 0 if above is None else 1 + num_causes(above)
