"""How ranks go on without those that are lost: the step under way is undone, and comes again among those that are left.

Words: a rank is *lost* once its process has ended or hangs, or its node is gone: agents decide that, and name its seat
in a membership plan. A rank is *behind* where another one that is left has committed a step that it has not. What
happens, in order:

    an error leaves a step     it tells of a lost peer: this rank undoes its step, and waits for the plan
    all hold the plan          each says on the plan's board what it holds; members/salvage.py decides on the commit
                               from which all go on; groups of those that are left are formed
    who is behind              takes what it lacks from one that is not
    the loop goes on           its next batch is the first one of the same step, cut for the ranks that are there

An error that leaves the loop elsewhere, as in an evaluation, is the script's own.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from elastic_ext.config.agreement import JoinedAgreement
from elastic_ext.errors import ElasticError, PeerLostError
from elastic_ext.fsdp.checkpoint.contents import REGISTERED
from elastic_ext.fsdp.reshard.change import ChangeCost
from elastic_ext.fsdp.worlds import Worlds
from elastic_ext.members.plan import MembershipPlan
from elastic_ext.members.regroup import Generation
from elastic_ext.members.salvage import HeldPiece, Salvage, SurvivorWords, salvage
from elastic_ext.members.store import left
from elastic_ext.ranks.board import BoardGone
from elastic_ext.ranks.heartbeat import Activity
from elastic_ext.records.text import counted
from elastic_ext.torch_private.sockets import (
    GroupSockets,
    TcpSocket,
    candidates,
    make_sure_of_sockets,
    num_connections,
    open_sockets,
    shared_with_others,
    to_tell,
)

from .joining import why_restart
from .steps.state import StepPhase

if TYPE_CHECKING:
    from .training import Training

__all__ = ["Losses"]

_logger = logging.getLogger(__name__)

PLAN_SECONDS = 60.0  # agents see the end of a process within a second, that of a node when its lease has run out
_SLICE_SECONDS = 0.1
_GLOO = "gloo/transport"  # in what gloo says of its connections, with the file and line
_MOST_CAUSES = 5
_DOING = "going on without ranks that are lost"


class Losses:
    """Goes on with the ranks that are left once others are lost, on one of them."""

    def __init__(self, training: Training, *, is_asked_for: bool) -> None:
        """``is_asked_for`` says whether agents have those who are left go on, and do not start all workers anew."""
        self._training = training
        self._is_asked_for = is_asked_for
        self.why_restart = ""
        """Why all workers are started anew where one is lost, a sentence; empty where the others go on."""
        self._owes_save = False
        self.num_met = 0
        """How often all ranks have met between two steps; the same on ranks that have come through the same meetings,
        also on those that have joined since."""
        self._sockets = GroupSockets()
        self._why_not_ended: str | None = None  # a collective that ranks have left; not tried so far
        self.plan_seconds = PLAN_SECONDS
        """How long a rank that has lost others waits for a plan without them."""

    def look(self) -> str:
        """See whether ranks can go on without others, and be ready for it, between two steps; gives ``why_restart``."""
        self.why_restart = self._why_restart()
        is_ready = not self.why_restart
        self._training.ranks.waits_for_accounts = not is_ready  # what others say comes too late then
        if is_ready:
            self._training.steps.keep_everything()
        return self.why_restart

    def _why_restart(self) -> str:
        training = self._training
        if not self._is_asked_for:
            return "nobody has asked for it: elastic-run does, unless it is given --members=restart"
        if self._why_not_ended is None:
            self._why_not_ended = _why_not(make_sure_of_sockets)
        if why_not := why_restart(training) or self._why_not_ended:
            return why_not
        plan = training.spread.plan
        if plan is None or not plan.is_replicated:
            return "each rank has parts of the model that no other has"
        return ""

    def note_connections(self, before: Sequence[TcpSocket] = ()) -> None:
        """Find the connections of the process groups, with all ranks: those that came up since a look ``before``.

        Where there are more of them than groups have, some are the script's own, and none is ever shut down.
        """
        ranks = self._training.ranks
        self._sockets = GroupSockets()
        if self._training.members.watcher is None or ranks.world_size == 1:  # the same on all, whatever each can do
            return
        if not before:
            gc.collect()  # groups that the script has made before, and let go of, have their connections until then
        found = candidates(before, open_sockets())
        shared = shared_with_others(found, ranks.gather(to_tell(found), "finding the connections of process groups"))
        most = num_connections()
        if most is None or len(shared) <= most:
            self._sockets = GroupSockets(shared)
        else:
            _logger.info(
                "ranks have %d connections with each other, and their process groups %d: some are the script's own, "
                "and where a rank hangs all workers may have to be started anew",
                len(shared),
                most,
            )
        self.hear()  # a plan that has come meanwhile

    def hear(self) -> None:
        """End what this rank may wait for for ever, where a plan has come by which ranks are lost; on any thread."""
        members = self._training.members
        plan = None if members.watcher is None else members.watcher.newest
        if plan is not None and plan.lost and plan.version > members.version and not self.why_restart:
            self._sockets.sever()

    # ---- in the loop ----

    def recover(self, error: BaseException, *, is_entering: bool = False) -> bool:
        """Go on without ranks that are lost, where ``error`` is of that; gives whether training does.

        Called as ``error`` leaves a step, which was undone, or has ended; with ``is_entering`` as a step begins, whose
        work the loop does next. Raises what functions of the script raise that are told of it.
        """
        if self.why_restart or not isinstance(error, Exception) or not _tells_of_loss(error):
            return False
        training, members = self._training, self._training.members
        began, after = time.perf_counter(), members.version
        self._sockets.sever()  # so that those who wait for this rank do so no longer
        tell: Callable[[], None] | None = None
        with training.follower.heartbeat.during(Activity.MEMBERS):
            while tell is None and (plan := self._awaited_plan(after)) is not None:
                before = open_sockets()
                try:
                    tell = self._go_on(plan, began, before, is_entering=is_entering)
                except _CannotGoOn as failure:
                    members.refuse(plan.version, str(failure))
                    after = plan.version
                except Exception as failure:  # as where another rank is lost meanwhile, and another plan comes
                    _logger.warning("membership %d does not come: %s", plan.version, failure)
                    after = plan.version
                    self._sever_since(before)
        if tell is not None:
            tell()
            return True
        if after > members.version:
            training.steps.give_up(
                "ranks were lost, and those that are left could not go on together: start the job again, which "
                "resumes from a checkpoint"
            )
        return False

    def with_others(self, meet: Callable[[], object]) -> None:
        """Have ``meet`` called, which takes all ranks, between two steps; where some are lost, again with the others.

        It is not called again where another rank has come through it before: then all have been there.
        """
        number = self.num_met
        while self.num_met == number:
            try:
                meet()
            except Exception as error:
                if not self.recover(error):
                    raise
            else:
                self.num_met += 1

    def _awaited_plan(self, after: int) -> MembershipPlan | None:
        """The newest plan without those who are lost, once there is one newer than ``after``; None where none comes."""
        training = self._training
        watcher, agreement = training.members.watcher, training.follower.agreement
        deadline = time.monotonic() + self.plan_seconds
        while watcher is not None and time.monotonic() < deadline and not agreement.is_leave_wanted:
            plan = watcher.newest
            if plan is not None and plan.version > after and plan.lost and plan.member_at(training.ranks.seat):
                return plan
            watcher.wait_for_version(after + 1 if plan is None else max(plan.version, after) + 1, _SLICE_SECONDS)
        return None

    def _sever_since(self, before: Sequence[TcpSocket]) -> None:
        """Shut down the connections of groups that were formed since, and of which not all ranks have heard yet."""
        found, most = candidates(before, open_sockets()), num_connections()
        if most is not None and len(found) <= most:
            GroupSockets(each.socket for each in found).sever()

    def _go_on(
        self, plan: MembershipPlan, began: float, before: Sequence[TcpSocket], *, is_entering: bool
    ) -> Callable[[], None]:
        """Come to a plan without those who are lost, with all that are left; gives what tells of that."""
        training, ranks = self._training, self._training.ranks
        seats = [name.seat for name in ranks.names]
        member = plan.member_at(ranks.seat)
        assert member is not None
        self._let_go_of_what_is_under_way()
        groups = Generation(ranks, plan, old=None, new=member.rank, form_seconds=training.members.form_seconds)
        rows = self._exchange(groups, plan, self._what_is_left(is_entering=is_entering))
        found = salvage(rows, num_pieces=1)
        if found.why_not:
            raise _CannotGoOn(found.why_not)
        deciding = time.perf_counter() - began
        worlds = Worlds.unchanged(plan.world_size, training.spread.num_local)
        try:
            change = training.members.prepared(worlds, member.rank, None)
        except ValueError as error:
            raise _CannotGoOn(str(error)) from error
        training.gradients.let_go_of_groups()
        training.guarding.let_go()
        cost = training.spread.regroup(change, groups.agree, groups)
        with ranks.in_step():
            training.session.take_up_model()
            drawn = self._take(found, member.rank, are_own_unlike=len({row.own for row in rows}) > 1)
            training.members.come_to(plan, [drawn], has_own=False, before=before)
            if training.saving is not None:
                training.saving.plan_after_loss(owes_save=any(row.owes_save for row in rows))
        if any(row.is_entering for row in rows):  # the next batch of all is one that comes to nothing
            training.steps.change_first(lambda: True)
        training.steps.was_undone = training.state.phase is StepPhase.TAKEN_BACK
        self._owes_save = False
        return partial(self._tell, plan, seats, cost, began, deciding)

    def _let_go_of_what_is_under_way(self) -> None:
        """Forget what is under way with the ranks of before, but that a checkpoint may be owed by that."""
        training = self._training
        training.steps.forget_others()
        training.follower.agreement.forget_others()
        training.members.drop("ranks that train are lost", by_all=True)
        training.spread.wait()
        if training.saving is not None:
            self._owes_save |= training.saving.forget_others()

    # ---- what is left ----

    def _what_is_left(self, *, is_entering: bool) -> SurvivorWords:
        training = self._training
        config, is_whole = training.follower.config, training.steps.torn is None
        piece = HeldPiece(end=training.counts.num_boundaries, piece=0, is_live=True)
        return SurvivorWords(
            seat=training.ranks.seat,
            pieces=(piece,) if is_whole else (),
            config=(config.version, config.revision),
            num_met=self.num_met,
            is_entering=is_entering,
            is_like=hashlib.blake2b(repr([each for each, _ in self._tensors()]).encode(), digest_size=8).hexdigest(),
            own=training.members.own_tensors(),
            owes_save=self._owes_save,
            why_not=self._why_restart(),
        )

    def _exchange(self, groups: Generation, plan: MembershipPlan, own: SurvivorWords) -> list[SurvivorWords]:
        """What all that are left say, in the order of their ranks; ElasticError where a newer plan comes before."""
        board, watcher = groups.quick_board, self._training.members.watcher
        names = [left(member.seat) for member in plan.members]
        board.post(left(own.seat), own.to_json())

        def is_old() -> bool:
            newest = None if watcher is None else watcher.newest
            is_newer = newest is not None and newest.version > plan.version
            return is_newer or self._training.follower.agreement.is_leave_wanted

        if not board.wait(names, seconds=self.plan_seconds, stop=is_old):  # a rank hears of it as its pass has ended
            raise BoardGone("another membership plan has come, or the workers are to end")
        return [SurvivorWords.from_json(board.read(name)) for name in names]

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of this training by name, but for what only this rank has."""
        contents = self._training.saved_state.collect()
        for each in (*contents.model, *contents.optim, *contents.extra):
            if each.is_alias_of is None and each.kind != "opaque":
                yield each.name, each.tensor

    # ---- who is behind ----

    def _take(self, found: Salvage, rank: int, *, are_own_unlike: bool) -> Mapping[str, Any]:
        """Be where the leader is; gives the states of its random generators. With all that are left.

        What each rank may have for itself becomes the leader's, as that of the first rank's in a checkpoint would.
        """
        training, ranks = self._training, self._training.ranks
        telling = json.dumps(self._to_tell(found)).encode() if rank == found.leader else b""
        told = json.loads(ranks.broadcast(telling, found.leader, _DOING))
        error: Exception | None = None
        if rank in found.behind:
            training.steps.begin_behind(is_taken_back=told["is_taken_back"])
        for name, tensor in self._tensors() if found.behind or are_own_unlike else ():
            if found.behind or name.startswith(REGISTERED):
                dist.broadcast(tensor.detach(), found.leader)
        try:
            if rank != found.leader:
                self._take_up(told, is_behind=rank in found.behind)
        except Exception as caught:  # of whatever script
            error = caught
        ranks.all_or_raise(error, _DOING)
        drawn: Mapping[str, Any] = told["drawn"]
        return drawn

    def _to_tell(self, found: Salvage) -> dict[str, Any]:
        training = self._training
        return {
            "agreement": asdict(training.follower.agreement.place_to_join),
            "config": training.follower.agreement.tell_config(),
            "backwards": training.steps.num_backwards,
            "schedules": training.state.num_scheduled,
            "boundaries": training.counts.num_boundaries,
            "samples": training.counts.num_samples,
            "met": self.num_met,
            "is_taken_back": training.state.phase is StepPhase.TAKEN_BACK,
            "should_stop": training.session.should_stop,
            "noise": training.counts.noise_scale.state_dict(),
            "state": training.saved_state.tell() if found.behind else None,
            "saving": None if training.saving is None else training.saving.tell(),
            "drawn": training.saved_state.drawn(),
        }

    def _take_up(self, told: Mapping[str, Any], *, is_behind: bool) -> None:
        """Be where the leader is, by what it tells, on another rank; tensors of a rank that is behind are taken."""
        training, agreement = self._training, self._training.follower.agreement
        if is_behind:
            training.saved_state.join_within(told["state"])
            training.reports.count_anew()
        training.counts.num_boundaries, training.counts.num_samples = told["boundaries"], told["samples"]
        training.counts.noise_scale.load_state_dict(told["noise"])
        self.num_met, training.session.should_stop = told["met"], told["should_stop"]
        training.steps.num_backwards, training.state.num_scheduled = told["backwards"], told["schedules"]
        agreement.join(JoinedAgreement(**told["agreement"]))
        if told["config"] != json.loads(json.dumps(agreement.tell_config())):
            training.session.take_up_config(agreement.join_config(told["config"], leaves_out=()))
        training.session.follow_noise()
        if training.saving is not None:
            training.saving.note_saved(told["saving"])

    # ---- what is told ----

    def _tell(
        self,
        plan: MembershipPlan,
        seats: Sequence[int],
        cost: ChangeCost,
        began: float,
        deciding: float,
    ) -> None:
        """Tell of a loss after which training goes on: an event, and a line in the log of the first rank."""
        taken = time.perf_counter() - began
        step = self._training.counts.global_step
        text = (
            f"membership {plan.version} at step {step}: {plan.reason}; {counted(plan.world_size, 'rank')} "
            f"{'goes' if plan.world_size == 1 else 'go'} on after step {step} without "
            f"{'it' if len(plan.lost) == 1 else 'them'}: {taken:.2f} s without a step, the step is taken "
            "again, no sample is lost or comes twice, no process was restarted"
        )
        self._training.members.tell_changed(
            plan,
            seats,
            text,
            cost=cost,
            deciding=deciding,
            taken=taken,
            tells=True,
            more={"lost": list(plan.lost), "from": "peers"},
        )


class _CannotGoOn(ElasticError):
    """The ranks that are left cannot go on by a plan, and all workers are to be started anew."""


def _why_not(make_sure: Callable[[], None]) -> str:
    try:
        make_sure()
    except ElasticError as error:
        return str(error)
    return ""


def _tells_of_loss(error: BaseException) -> bool:
    """Whether an error, or its cause, is that of process groups whose connections are gone.

    A connection of the script's own, as to a storage, is none of theirs.
    """
    found: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if isinstance(found, PeerLostError):
            return True
        if isinstance(found, RuntimeError) and _GLOO in str(found):
            return True
        found = None if found is None else found.__cause__
    return False
