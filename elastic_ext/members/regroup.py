"""The one place where process groups are taken down and formed anew, as the members of a plan find each other.

A generation's groups have names of their own in the store that its plan names, so that nothing of another generation is
taken for theirs. The same store has the board on which ranks that train and workers that join tell each other things.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from elastic_ext.errors import ElasticError
from elastic_ext.ranks.board import Board
from elastic_ext.ranks.group import Ranks
from elastic_ext.torch_private.groups import destroy_groups, limit_of_default_group, set_limit, store_of_default_group

from .plan import MembershipPlan
from .store import GO, GROUPS, GROUPS_BEFORE, here, prefix_of

__all__ = ["FORM_SECONDS", "Generation", "answer_for", "present_backend"]

_logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_SHORT_PAUSE_SECONDS = 0.001  # where training waits, or soon goes on
_PAUSE_SECONDS = 0.005  # of a joiner that waits to be called, between two looks into the store
FORM_SECONDS = 30.0
"""How long ranks wait for each other where they form groups, by default."""
_LATER_SECONDS = 10.0  # how much later than the first rank the last one may fail, beside the time that it waits
_BACKEND = "gloo"


def present_backend() -> str:
    """The backend of the default process group; gloo where there is none, since that is what would be formed."""
    return dist.get_backend() if dist.is_available() and dist.is_initialized() else _BACKEND


def _store_of(plan: MembershipPlan) -> Any:
    """A connection to the store that a plan names; ElasticError where it does not answer."""
    host, _, port = plan.store.rpartition(":")
    try:
        # torch tries for long to connect to where nobody listens.
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        return dist.TCPStore(  # type: ignore[attr-defined]
            host.strip("[]"), int(port), is_master=False, timeout=timedelta(seconds=_CONNECT_SECONDS)
        )
    except (OSError, RuntimeError, ValueError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ElasticError(
            f"the store {plan.store} of membership {plan.version} does not answer ({first_line})"
        ) from None


def answer_for(plan: MembershipPlan, seats: Sequence[int], why: str) -> None:
    """Tell the ranks that train why workers in these seats do not come: their agent does, since they are no more.

    Nobody hears of it where the store of the plan is gone.
    """
    try:
        board = Board(_store_of(plan), prefix_of(plan.generation, plan.version), what=f"the store {plan.store}")
        for seat in seats:
            board.post(here(seat), {"why": why, "restarts": False})
    except ElasticError as error:
        _logger.debug("the ranks that train are not told that workers do not join: %s", error)


class Generation:
    """The process groups of a plan's members, formed in the place of the present ones: a ``Regroup`` (fsdp/reshard).

    Until their ranks have all met in ``agree``, collectives of these groups fail where they take over ``form_seconds``.
    """

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
        self._store = _store_of(plan)
        self._ranks = ranks
        self._prefix = prefix_of(plan.generation, plan.version)
        self._new = None if new is None else (new, plan.world_size)
        self._old = None if old is None else (old, ranks.world_size)
        self._version, self._members_before = plan.version, ranks.world.members
        self._form_seconds = form_seconds
        self._limit = limit_of_default_group() or default_pg_timeout  # for the groups to come, too
        self._store_before: Any = store_of_default_group() if dist.is_initialized() else None
        self._is_limited = False
        self.board = Board(self._store, self._prefix, what=f"the store {plan.store}", pause_seconds=_PAUSE_SECONDS)
        """The board by which ranks that train and workers that join tell each other things."""
        self.quick_board = Board(
            self._store, self._prefix, what=f"the store {plan.store}", pause_seconds=_SHORT_PAUSE_SECONDS
        )
        """The same board, looked at more often: for values that come within about a step and hold others up."""

    @property
    def can_go_back(self) -> bool:
        """Whether this process is one of the previous members, who can form their groups anew."""
        return self._old is not None

    def form(self) -> None:
        """Form the default group, and the control group, of the plan's members, in place of those that are there.

        The first of them has the joiners do so too.
        """
        assert self._new is not None, "who leaves forms nothing"
        if self._new[0] == 0:  # one of those who stay, and the others of them have come as far
            self.board.post(GO, {"why": ""})
        store = dist.PrefixStore(f"{self._prefix}/{GROUPS}", self._store)  # type: ignore[attr-defined]
        self._form(store, self._new, self._version, self._form_seconds)

    def form_again(self) -> None:
        """Form the groups of the previous members anew, in the store that they had: that of the plan may be lost.

        A rank that failed at once waits here for ranks that notice the failure only as their own time runs out.
        """
        assert self._old is not None, "who joins has no world to go back to"
        store = self._store if self._store_before is None else self._store_before
        if self._old[1] == 1:
            store = dist.HashStore()  # type: ignore[attr-defined]
        store = dist.PrefixStore(f"{self._prefix}/{GROUPS_BEFORE}", store)  # type: ignore[attr-defined]
        self._form(store, self._old, self._members_before, 2 * self._form_seconds + _LATER_SECONDS)

    def agree(self, error: BaseException | None) -> None:
        """Return where no rank brings an error, and raise on all where one does; lifts the limit of ``have_met``."""
        self._ranks.all_or_raise(error, "changing members")
        self.have_met()

    def have_met(self) -> None:
        """Give collectives their usual limit of time again: all ranks of the world that was formed are there."""
        if self._is_limited:
            self._is_limited = False
            self._ranks.lift_limit()
            set_limit(self._limit)

    def leave(self) -> None:
        """Leave all groups: this process is a member no more, and alone in a group that its script may end."""
        self._ranks.leave()
        if dist.is_initialized():
            dist.destroy_process_group()
            dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

    def _form(self, store: Any, place: tuple[int, int], members: int, seconds: float) -> None:
        def form() -> None:
            hook = sys.excepthook  # torch puts one of its own around it, each time
            self._ranks.end_beside(destroy_groups())
            rank, size = place
            limit = timedelta(seconds=seconds)
            dist.init_process_group(_BACKEND, store=store, rank=rank, world_size=size, timeout=limit)
            sys.excepthook = hook

        self._is_limited = True
        self._ranks.regroup(form, members=members, seconds=seconds)
