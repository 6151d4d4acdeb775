"""The one place where process groups are taken down and formed anew, as the members of a plan find each other.

A generation's groups have names of their own in the store that its plan names, so that nothing of another generation is
taken for theirs. The same store has the board on which ranks that train and workers that join tell each other things.
"""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from elastic_ext.errors import ElasticError
from elastic_ext.ranks.board import Board
from elastic_ext.ranks.group import Ranks

from .plan import MembershipPlan
from .store import GO, GROUPS, GROUPS_BEFORE, prefix_of

__all__ = ["FORM_SECONDS", "Generation", "present_backend"]

_CONNECT_SECONDS = 10.0
_PAUSE_SECONDS = 0.02  # of a joiner that waits to be called, between two looks into the store
FORM_SECONDS = 30.0
"""How long ranks wait for each other where they form groups, by default."""
_BACKEND = "gloo"


def present_backend() -> str:
    """The backend of the default process group; gloo where there is none, since that is what would be formed."""
    return dist.get_backend() if dist.is_available() and dist.is_initialized() else _BACKEND


class Generation:
    """The process groups of a plan's members, formed in the place of those that are there: a ``Regroup`` of a model."""

    def __init__(
        self,
        ranks: Ranks,
        plan: MembershipPlan,
        *,
        old: int | None,
        new: int | None,
        form_seconds: float = FORM_SECONDS,
    ) -> None:
        """``old`` and ``new`` are this process's ranks, None where it has none. ElasticError without the store."""
        host, _, port = plan.store.rpartition(":")
        try:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                host.strip("[]"), int(port), is_master=False, timeout=timedelta(seconds=_CONNECT_SECONDS)
            )
        except (RuntimeError, ValueError) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise ElasticError(
                f"the store {plan.store} of membership {plan.version} does not answer ({first_line})"
            ) from None
        self._ranks = ranks
        self._prefix = prefix_of(plan.generation, plan.version)
        self._new = None if new is None else (new, plan.world_size)
        self._old = None if old is None else (old, ranks.world_size)
        self._form_seconds = form_seconds
        self._timeout = _timeout_now()
        self.board = Board(self._store, self._prefix, what=f"the store {plan.store}", pause_seconds=_PAUSE_SECONDS)
        """What ranks that train and workers that join tell each other by."""
        self.quick_board = Board(self._store, self._prefix, what=f"the store {plan.store}", pause_seconds=0.002)
        """The same, for what others wait for, and which comes within a step or so."""

    def form(self) -> None:
        """Form the default group, and the control group, of the plan's members, in place of those that are there.

        The first of them has the joiners do so too.
        """
        assert self._new is not None, "who leaves forms nothing"
        place = self._new
        if place[0] == 0:  # one of those who stay, and the others of them have come as far
            self.board.post(GO, {"why": ""})
        self._ranks.regroup(lambda: self._form(GROUPS, place))

    def form_again(self) -> None:
        """Form the groups of the members of before anew."""
        assert self._old is not None, "who joins has no world to go back to"
        place = self._old
        self._ranks.regroup(lambda: self._form(GROUPS_BEFORE, place))

    def leave(self) -> None:
        """Leave all groups: this process is a member no more."""
        self._ranks.leave()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _form(self, name: str, place: tuple[int, int]) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        rank, size = place
        store = dist.PrefixStore(f"{self._prefix}/{name}", self._store)  # type: ignore[attr-defined]
        hook = sys.excepthook  # torch puts one of its own around it, each time
        seconds = timedelta(seconds=self._form_seconds)
        dist.init_process_group(_BACKEND, store=store, rank=rank, world_size=size, timeout=seconds)
        sys.excepthook = hook
        if self._timeout is not None:
            _set_timeout(self._timeout)


# Private to torch, as of 2.13, for want of a public way: the time that collectives of the default group may take.


def _timeout_now() -> timedelta | None:
    """The timeout of the default group's collectives; None where there is no group, or this torch does not say."""
    with contextlib.suppress(AttributeError, RuntimeError):
        if dist.is_initialized() and dist.group.WORLD is not None:
            timeout: timedelta = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
            return timeout
    return None


def _set_timeout(timeout: timedelta) -> None:
    from torch.distributed import distributed_c10d

    setting = getattr(distributed_c10d, "_set_pg_timeout", None)
    if setting is not None:
        setting(timeout)
