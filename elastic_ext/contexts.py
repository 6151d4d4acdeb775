"""What ``with trainer.step()`` and ``with trainer.epoch()`` enter, where it is not the steps themselves."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from .errors import ElasticError

if TYPE_CHECKING:
    from .session import Session
    from .steps import Steps

__all__ = ["NOT_PREPARED", "Epoch", "Mutating", "NotPrepared", "OwnStep"]

NOT_PREPARED = "prepare() was not called; call it with the optimizer, on every rank, before the loop"


class OwnStep:
    """``with trainer.step(fix_total_batch_size=False):``."""

    def __init__(self, steps: Steps | NotPrepared) -> None:
        self._steps = steps

    def __enter__(self) -> None:
        self._steps.keep_batch = False
        try:
            self._steps.__enter__()
        finally:
            self._steps.keep_batch = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._steps.__exit__(kind, error, trace)


class NotPrepared:
    """``with trainer.step():`` before ``prepare()``."""

    keep_batch = True

    def __enter__(self) -> None:
        raise ElasticError(NOT_PREPARED)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Epoch:
    """``with trainer.epoch():``."""

    def __init__(self, session: Session, epoch: int) -> None:
        self._session = session
        self._epoch = epoch

    def __enter__(self) -> int:
        self._session.begin_epoch(self._epoch)
        return self._epoch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.end_epoch(error)


class Mutating:
    """``with trainer.mutate():``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._session.fence()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
