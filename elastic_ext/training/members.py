"""How members come to a training, and leave it, while its processes go on: from a plan to the new world.

Words: a *survivor* is a rank that is in the old world and in the new one; a *joiner* comes to the new one, a *leaver*
is in the old one alone. What happens, in order:

    at a boundary       all ranks hold the plan (agreement.py), and decide on it: each says what it has against it, and
                        the first one calls the joiners, who say what they have. Batches are cut for the new world from
                        here on; until the next step begins, the loop is still among the ranks of before
    as a step begins    or an epoch, where that was the last step: leavers give what they have, the groups of the new
                        world are formed, and joiners get what they lack. The batch in hand is one of the new world

Where something fails before anything has moved, ranks go on as before, and the batch in hand comes again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from elastic_ext.config.agreement import JoinedAgreement
from elastic_ext.config.control_word import Purpose
from elastic_ext.errors import ElasticError, RanksFailedError
from elastic_ext.fsdp.checkpoint.contents import REGISTERED
from elastic_ext.fsdp.checkpoint.saving.collect import Comparable
from elastic_ext.fsdp.plan import ParallelPlan
from elastic_ext.fsdp.reshard.change import Change, ChangeCost
from elastic_ext.fsdp.worlds import Worlds
from elastic_ext.members.checks import (
    Answer,
    decide,
    differences,
    digest_of,
    seconds_to_settle,
    why_not_members,
)
from elastic_ext.members.plan import JOINS, Member, MembershipPlan
from elastic_ext.members.regroup import FORM_SECONDS, Generation
from elastic_ext.members.store import CALL, GO, here
from elastic_ext.members.watcher import PlanWatcher
from elastic_ext.ranks.board import Board, BoardGone
from elastic_ext.ranks.heartbeat import Activity
from elastic_ext.ranks.world import World
from elastic_ext.records.agent import MEMBERSHIP_FILE
from elastic_ext.records.member import MemberRecord
from elastic_ext.records.text import counted, size_in_words
from elastic_ext.torch_private.module_hooks import is_compiled
from elastic_ext.torch_private.sockets import TcpSocket, open_sockets

from .checkpoints.signals import EXIT_STATUS
from .checks import SamplersOfBefore
from .joining import check_all_are_shared, facts_of, why_not_these_rates, why_restart

if TYPE_CHECKING:
    from .training import Training

__all__ = ["MembersChange", "TrainingMembers", "plan_until_joined", "version_to_join"]

_logger = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0  # joiners do nothing but wait to be called
_SLICE_SECONDS = 0.5  # of a joiner's waits, between two looks at its membership.json
_HALF = (
    "a change of members failed halfway, and parts of the model lie by either world: start the job again, which "
    "resumes from a checkpoint"
)
_KINDS = "joining the ranks that train"
_CALLING = "calling the workers that join"


def version_to_join(environ: Mapping[str, str]) -> int:
    """The version of the membership plan that this process was started to join; 0 where it begins a training."""
    text = environ.get(JOINS, "")
    if text and not text.isdecimal():
        raise ValueError(f"{JOINS} is {text!r}; allowed: the version of a membership plan")
    return int(text or 0)


def plan_until_joined(plan: ParallelPlan, num_ranks: int) -> ParallelPlan:
    """A plan by which a model lies on the ranks of a node that is to join others, where ``plan`` may not fit so few."""
    if plan.shard_degree is None or num_ranks % plan.shard_degree == 0:
        return plan
    return replace(plan, shard_degree=num_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class MembersChange:
    """A change of members that was made, as ``trainer.on_members`` is told of it."""

    version: int
    """The version of the membership plan that is in force now."""
    step: int
    """How many steps had been taken when it came into force."""
    rank: int
    """This process's rank now."""
    world_size: int
    """The number of ranks now."""
    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pending:
    """A plan that all ranks have agreed on, and that is not applied yet."""

    plan: MembershipPlan
    groups: Generation
    worlds: Worlds
    holder: int
    """This process's number among those of both worlds."""
    drawn: Sequence[Mapping[str, Any]]
    """States of random generators by old rank, as ``TrainingState.drawn`` gives them: of all, or of the first alone
    where there are more or fewer ranks now."""
    seats: Sequence[int]
    """The seats of the old world, in the order of ranks."""
    seconds: float
    """How long ranks took to decide; on those that join, 0."""
    parallel: ParallelPlan | None
    """How the model was sharded as the plan was agreed on."""
    tells: bool
    """Whether the scripts of some ranks are to be told of the change; on those that join not known before they come."""

    @property
    def new_rank(self) -> int | None:
        return self.worlds.new[self.holder]


class TrainingMembers:
    """Which members train, on one rank: plans are watched, decided on with all ranks, applied, and told of.

    One class, though a long one: a plan that waits, is decided on or fails on the way changes the same few fields, and
    survivors and joiners share most of what they do.
    """

    def __init__(self, training: Training, *, joins: int, on_world: Callable[[World], None]) -> None:
        """``joins`` is the version of the plan that this process was started to join, 0 for none.

        ``on_world`` is called with each world that this process comes to.
        """
        self._training = training
        self._follower = training.follower
        settings = training.follower.settings
        self.joins = joins
        self.version = 0
        """The version of the plan by which this rank trains; 0 where it knows of none."""
        self.watcher: PlanWatcher | None = None
        """Knows the newest plan that the agent has told; None where no agent has given this process a seat."""
        if settings.enabled and settings.seat is not None:
            self.watcher = PlanWatcher(
                settings.run_dir / MEMBERSHIP_FILE,
                poll_seconds=settings.poll_seconds,
                warns=training.follower.warns,
            )
        self.answer_seconds = ANSWER_SECONDS
        """How long joiners are waited for, once they are called."""
        self.form_seconds = FORM_SECONDS
        """How long ranks wait for each other where they form groups."""
        self._why_restart = ""
        self._told_multiple: int | None = None  # None before this worker has written its record
        self._ready = self._agreed = self._refused = 0
        self._why_refused = ""
        self._refused_seats: list[int] = []
        self.wanted = 0
        """The version of a plan that all ranks hold, and have not decided on; 0 for none; the same on all ranks."""
        self._wanted_since = 0.0
        self._considered: tuple[MembershipPlan, Generation] | None = None  # until it is decided on
        self._pending: _Pending | None = None
        self._on_world = on_world
        self._samplers = SamplersOfBefore()
        self.world_before: World | None = None  # of a change since which samplers were not looked at
        self._changed_at = 0  # the step

    # ---- from the start to the end ----

    def start(self) -> None:
        """Begin to watch the plan; with all ranks, before the first boundary."""
        if self.watcher is None:
            return
        self.watcher.on_news = self._hear
        self.watcher.start()
        if self.joins:
            return
        held = self.watcher.newest
        known = held.version if held is not None and self._is_in_force(held) else 0
        versions = self._follower.ranks.gather(str(known).encode(), "comparing membership plans")
        self.version = min(map(int, versions))
        self._follower.agreement.know_members(self.version)
        self._follower.agreement.held_members = self._held_version

    def _hear(self) -> None:
        """Hear, on the watcher's thread, that there is another plan."""
        self._follower.agreement.rouse()
        self._training.losses.hear()

    def tell_how(self) -> None:
        """Write this worker's record, as it is known, or known anew, whether members can change while it trains.

        Who has joined has written it as it came, and does so again where that has changed.
        """
        if self.watcher is None:
            return
        before, self._why_restart = self._why_restart, why_restart(self._training)
        at_loss, why_at_loss = self._training.losses.why_restart, self._training.losses.look()
        if not self.joins or (self._why_restart, why_at_loss) != (before, at_loss):
            self._write()

    def tell_resharded(self) -> None:
        """Write this worker's record anew where the model is sharded so that other numbers of ranks fit."""
        if self._told_multiple not in (None, self._rank_multiple):
            self._write()

    def close(self) -> None:
        """Stop watching."""
        self.drop("training has ended there")
        if self.watcher is not None:
            self.watcher.close()

    # ---- at a boundary ----

    def pass_boundary(self, version: int) -> None:
        """Decide, with all ranks, on a plan that all of them hold, if there is one; ``version`` is 0 for none."""
        if self.world_before is not None:  # the first step among other ranks has ended, and did not wait for this
            before, self.world_before = self.world_before, None
            self._tell_of_samplers(before)
        if version > max(self.version, self._refused):
            self.wanted, self._wanted_since = version, time.monotonic()
        if self.wanted and self._pending is None and not self._follower.agreement.leaving:
            with self._together() as began:
                self._consider(began)

    @contextlib.contextmanager
    def _together(self) -> Iterator[float]:
        """A context in which all ranks that train decide on a plan or apply it, once they know that all are there.

        Gives when this one began to come to the others, by ``time.perf_counter``.
        """
        began = time.perf_counter()
        with self._follower.heartbeat.during(Activity.MEMBERS):
            self._follower.agreement.meet(Purpose.MEMBERS)
            with self._follower.ranks.in_step():
                yield began

    def _consider(self, began: float) -> None:
        ranks = self._follower.ranks
        assert self.watcher is not None
        plan = self.watcher.newest
        assert plan is not None
        groups: Generation | None = None
        why_not, why_later, own = "", self._why_later(plan), ""
        try:
            if not (why_later or self._is_in_force(plan)):
                groups = self._groups_of(plan)
                self._try_out(plan)
                own = self.own_tensors() if plan.world_size == ranks.world_size else ""
        except (ElasticError, ValueError) as error:
            why_not = str(error)
        mine = Answer(
            version=plan.version,
            digest=digest_of(plan),
            why_not=why_not,
            why_later=why_later,
            registered=own,
            tells=bool(self._training.on_members),
        )
        rows = ranks.gather(mine.to_json().encode(), "deciding on other members")
        answers = [Answer.from_json(row.decode()) for row in rows]
        decision = decide(answers, ranks.names)
        if decision.kind == "later":
            return
        self.wanted, self._considered = 0, None
        if decision.kind == "newer":
            return
        if decision.kind == "refuse":
            self.refuse(plan.version, decision.why)
        elif groups is None:
            self.version = plan.version
            self._write()
        else:
            self._agree(plan, groups, began, tells=any(answer.tells for answer in answers))

    def _agree(self, plan: MembershipPlan, groups: Generation, began: float, *, tells: bool) -> None:
        """Call the joiners, and take the plan as agreed unless one of them cannot come; with all old ranks."""
        ranks = self._follower.ranks
        why, absent = self._call(plan, groups) if ranks.rank == 0 else ("", [])
        keeps_own = plan.world_size == ranks.world_size
        drawn = [self._training.saved_state.drawn()] if ranks.rank == 0 and not keeps_own else []
        why, absent, drawn = json.loads(ranks.broadcast(json.dumps([why, absent, drawn]).encode(), 0, _CALLING))
        if why:
            if ranks.rank == 0:
                self._send_away(groups, why)
            self.refuse(plan.version, why, seats=absent)
            return
        worlds = self._worlds(plan)
        self._pending = pending = _Pending(
            plan=plan,
            groups=groups,
            worlds=worlds,
            holder=ranks.rank,
            drawn=self._drawn(plan) if keeps_own else drawn,
            seats=self._seats,
            seconds=time.perf_counter() - began,
            tells=tells,
            parallel=self._training.spread.plan,
        )
        self._cut_for(pending)
        self._training.steps.change_first(self._apply_in_step)
        self._agreed = plan.version
        self._write()

    def _cut_for(self, pending: _Pending) -> None:
        """Cut steps for the world that ranks will be in as the next one begins."""
        if pending.new_rank is not None:
            num_ranks = pending.plan.world_size
            self._training.batches.begin(self._follower.config, num_ranks=num_ranks, rank=pending.new_rank)

    def _drawn(self, plan: MembershipPlan) -> Sequence[Mapping[str, Any]]:
        """The states of random generators from which the ranks of ``plan`` go on; with all old ranks."""
        ranks = self._follower.ranks
        keeps_own = plan.world_size == ranks.world_size
        mine = self._training.saved_state.drawn() if keeps_own or ranks.rank == 0 else None
        rows = [json.loads(row) for row in ranks.gather(json.dumps(mine).encode(), _CALLING)]
        return rows if keeps_own else rows[:1]

    def follow_rewind(self) -> None:
        """Have a plan that was agreed on draw as the checkpoint does to which training went back; with all ranks.

        A config that came into force meanwhile has cut steps for the ranks that are still there.
        """
        if self._pending is not None:
            self._pending = replace(self._pending, drawn=self._drawn(self._pending.plan))
            self._cut_for(self._pending)

    def _try_out(self, plan: MembershipPlan) -> None:
        """Raise where this rank cannot go to the world of a plan, or where no rank can."""
        training = self._training
        self._why_restart = why_restart(training)  # the script may have made groups of its own since
        if plan.mode != "live" or self._why_restart:
            raise ElasticError(self._why_restart or "the plan is one that starts all workers anew")
        worlds = self._worlds(plan)
        why_not = training.batches.why_not_ranks(training.follower.config, plan.world_size)
        if training.batches.num_handed > 0:
            why_not = "the loop takes batches ahead of their steps, and those were cut for the ranks that are here now"
        if why_not:
            raise ElasticError(why_not)
        self.prepared(worlds, self._follower.ranks.rank, None)

    def _why_later(self, plan: MembershipPlan) -> str:
        """What has to end on this rank before members can change, in words; empty for nothing."""
        training = self._training
        if training.batches.loses_rest(training.follower.config, plan.world_size):
            return f"the epoch has a step left that is too small for {plan.world_size} ranks"
        seconds = seconds_to_settle(time.monotonic() - self._wanted_since)
        if training.checkpoints is None or seconds is None:
            return ""  # what is under way is waited for
        return training.checkpoints.why_not_idle(seconds)

    def own_tensors(self) -> str:
        """A digest of what each rank has for itself, and would have again from a checkpoint of as many ranks."""
        training = self._training
        digests = Comparable(training.saved_state.collect(), training.ranks.rank).digests
        is_shared = (
            training.spread.plan is not None and training.spread.plan.is_replicated
        )  # DDP's buffers are rank 0's
        held = {name: digest for name, digest in digests.items() if name.startswith(REGISTERED) or not is_shared}
        return hashlib.blake2b(repr(sorted(held.items())).encode(), digest_size=8).hexdigest()

    def _groups_of(self, plan: MembershipPlan) -> Generation:
        """What forms the groups of a plan, with a connection to its store, which is kept until it is decided on."""
        if self._considered is not None and self._considered[0] is plan:
            return self._considered[1]
        why_not = why_not_members(plan, self._seats)
        if why_not is not None:
            raise ElasticError(why_not)
        ranks = self._follower.ranks
        member = plan.member_at(ranks.seat)
        new = None if member is None else member.rank
        groups = Generation(ranks, plan, old=ranks.rank, new=new, form_seconds=self.form_seconds)
        self._considered = plan, groups
        return groups

    def refuse(self, version: int, why: str, *, seats: Sequence[int] = ()) -> None:
        """Note that all ranks have refused a plan; training goes on as before.

        ``seats`` are of the workers that were to join, where it is refused for the sake of those.
        """
        self._refused, self._why_refused, self._refused_seats = version, why, [*seats]
        self._write()
        text = f"membership {version} was refused, the members stay as they are: {why}"
        if self._follower.ranks.rank == 0:
            _logger.warning("%s", text)
        details = {"version": version, "why": why}
        self._follower.reports.write_event("members-refused", step=self._follower.step, text=text, details=details)

    # ---- the first old rank, and the joiners ----

    def _call(self, plan: MembershipPlan, groups: Generation) -> tuple[str, list[int]]:
        """Call the joiners of a plan; gives why some of them cannot come, and their seats; nothing where all can."""
        spread = self._training.spread
        assert spread.plan is not None
        call = {
            "version": plan.version,
            "seats": self._seats,
            "num_local": self._worlds(plan).num_local,
            "plan": asdict(spread.plan),
            "facts": facts_of(self._training),
            "rates": [each.rates.given_by_hand for each in self._training.prepared.optimizers],
        }
        return _why_not_coming(groups.quick_board, call, self._joiners(plan), self.answer_seconds)

    def _send_away(self, groups: Generation, why: str) -> None:
        """Tell joiners why the ranks do without them."""
        try:
            groups.board.post(GO, {"why": why})
        except BoardGone as error:
            _logger.debug("joiners are not told that they are not to come: %s", error)

    def drop(self, why: str, *, by_all: bool = False) -> None:
        """Forget a plan that was agreed on and not applied, for the reason ``why``, and tell its joiners.

        The first rank tells them; ``by_all`` where that may be lost, also as it was about to be agreed on.
        """
        pending, self._pending = self._pending, None
        considered, self._considered = self._considered, None
        groups = pending.groups if pending is not None else None if considered is None else considered[1]
        if groups is not None and (by_all or (pending is not None and self._follower.ranks.rank == 0)):
            self._send_away(groups, why)

    # ---- as a step or an epoch begins ----

    def apply_between(self) -> None:
        """Apply a plan that was agreed on in the last step of an epoch, as another begins."""
        if self._pending is not None:
            with self._together() as began:
                self._apply(began)

    def _apply_in_step(self) -> bool:
        """Apply a plan that was agreed on in the step before; gives whether all stays, and the step is taken back."""
        if self._pending is None:
            return False
        with self._together() as began:
            return not self._apply(began)

    def _apply(self, began: float) -> bool:
        """Change to the world that was agreed on; gives whether it was, else all is as before. With all old ranks."""
        pending, self._pending = self._pending, None
        assert pending is not None
        training, ranks = self._training, self._follower.ranks
        before = ranks.world
        change, telling = None, b""
        error: Exception | None = None
        why, absent = self._why_not_coming_any_more(pending)
        if why:
            self._stay(pending, why, seats=absent)
            return False
        if training.saving is not None:
            try:
                training.saving.come_to_rest()
            except Exception as failure:  # on all ranks, whose loops may go on after it
                self._stay(pending, str(failure))
                raise
        try:
            training.spread.wait()
            why_not = training.batches.why_not_ranks(training.follower.config, pending.plan.world_size)
            if why_not is None and pending.worlds.has_comers and training.spread.plan != pending.parallel:
                why_not = "the model is sharded otherwise since the workers that join were called"
            if why_not is not None:  # by a config that came into force since
                raise ElasticError(why_not)
            change = self.prepared(pending.worlds, pending.holder, None)
            if pending.worlds.has_comers and pending.new_rank == 0:
                telling = json.dumps(self._to_tell(pending)).encode()  # what cannot be told shows before anything moves
        except Exception as caught:
            error = caught
        try:
            ranks.all_or_raise(error, "preparing a change of members")
        except RanksFailedError as failure:
            self._stay(pending, _told_of(failure))  # whoever would join is the cause, or all would be at a restart
            return False
        assert change is not None
        sockets = open_sockets()
        training.gradients.let_go_of_groups()
        training.guarding.let_go()
        try:
            cost = training.spread.regroup(change, pending.groups.agree, pending.groups)
        except Exception as failure:
            if not change.is_as_before:
                training.steps.give_up(_HALF)
                raise
            training.session.take_up_model()
            training.session.take_world(ranks.world)
            training.steps.weigh_anew()
            self._stay(pending, f"{type(failure).__name__}: {failure}")  # the ranks of before have met since
            return False
        if pending.new_rank is None:
            self._leave(pending)
        pending = self._settle(pending, telling, sockets)
        self._tell_changed(pending, cost, began)
        self.world_before = before if ranks.world.is_first_here else None
        return True

    def _why_not_coming_any_more(self, pending: _Pending) -> tuple[str, list[int]]:
        """Why workers that join cannot come any more, as their agents say, and their seats; with all old ranks."""
        if not pending.worlds.has_comers:
            return "", []
        ranks = self._follower.ranks
        found: tuple[str, list[int]] = "", []
        if ranks.rank == 0:
            with contextlib.suppress(BoardGone):  # as ranks find out that form groups there
                found = _refusals(pending.groups.quick_board, self._joiners(pending.plan))
        why, absent = json.loads(ranks.broadcast(json.dumps(found).encode(), 0, _CALLING))
        return why, absent

    def _stay(self, pending: _Pending, why: str, *, seats: Sequence[int] | None = None) -> None:
        """Go on as before, since a change failed before anything had moved, and without the workers in ``seats``.

        None: without any of those that were to join.
        """
        if self._follower.ranks.rank == 0:
            self._send_away(pending.groups, why)
        self._training.session.cut_as_config_says(self._follower.config)
        joiners = [member.seat for member in self._joiners(pending.plan)]
        self.refuse(pending.plan.version, why, seats=joiners if seats is None else seats)

    def prepared(self, worlds: Worlds, holder: int, plan: ParallelPlan | None) -> Change:
        """The change of how the model is spread over these worlds, for this process's number among their holders."""
        training = self._training
        return training.spread.prepare_regroup(
            worlds, holder, training.optimizers, training.registered_tensors(), plan=plan
        )

    def _settle(self, pending: _Pending, telling: bytes | None, before: Sequence[TcpSocket]) -> _Pending:
        """Have all parts follow the new world, on the ranks of it.

        ``telling`` is what the first of them tells those that join, empty on others; None on those that join. Gives the
        plan with what those who join have been told of it. ``before`` is as ``come_to`` takes it.
        """
        ranks = self._follower.ranks
        self._training.session.take_up_model()
        if pending.worlds.has_comers:
            told = json.loads(ranks.broadcast(telling or b"", 0, _KINDS))
            error: Exception | None = None
            if telling is None:
                try:
                    pending = replace(pending, drawn=told["drawn"], tells=told["tells"])
                    self._take_over(told)
                except Exception as caught:  # of whatever script: all are to hear of it
                    error = caught
            ranks.all_or_raise(error, _KINDS)
        has_own = pending.worlds.num_old == pending.worlds.num_new
        self.come_to(pending.plan, pending.drawn, has_own=has_own, before=before)
        return pending

    def come_to(
        self,
        plan: MembershipPlan,
        drawn: Sequence[Mapping[str, Any]],
        *,
        has_own: bool,
        before: Sequence[TcpSocket],
    ) -> None:
        """Have all parts be in the world of ``plan``, whose groups are formed, with all ranks of it.

        They draw random numbers from ``drawn`` on, as ``TrainingState.draw_as`` does; ``before`` are the sockets that
        this process had before groups were formed.
        """
        training, ranks, session = self._training, self._follower.ranks, self._training.session
        self.version, self.wanted, self._changed_at = plan.version, 0, self._follower.step
        self._follower.agreement.know_members(self.version)
        session.take_world(ranks.world)
        self._on_world(ranks.world)
        if self.watcher is not None:
            self.watcher.warns = self._follower.warns
        training.steps.weigh_anew()
        training.saved_state.draw_as(drawn, has_own=has_own)
        training.losses.note_connections(before)
        self._write()

    def _to_tell(self, pending: _Pending) -> dict[str, Any]:
        """All that a joiner is told, tensors of model and optimizers aside."""
        training = self._training
        return {
            "agreement": asdict(training.follower.agreement.place_to_join),
            "config": training.follower.agreement.tell_config(),
            "backwards": training.steps.num_backwards,
            "schedules": training.state.num_scheduled,
            "boundaries": training.counts.num_boundaries,
            "met": training.losses.num_met,
            "growing": training.growing.tell(),
            "seed": None if training.batches.ordered is None else training.batches.ordered.seed,
            "state": training.saved_state.tell(),
            "saving": None if training.saving is None else training.saving.tell(),
            "drawn": pending.drawn,
            "tells": pending.tells,
        }

    def _take_over(self, told: Mapping[str, Any]) -> None:
        """Be where the ranks are that this one has joined."""
        training = self._training
        if told["seed"] is not None and training.batches.ordered is not None:
            training.batches.ordered.take_seed(told["seed"])
        training.saved_state.join(told["state"])
        training.counts.num_boundaries, training.losses.num_met = told["boundaries"], told["met"]
        training.reports.count_anew()
        training.session.epochs.join(is_within=told["state"]["counts"]["is_in_epoch"])
        agreement = training.follower.agreement
        agreement.join(JoinedAgreement(**told["agreement"]))
        config = agreement.join_config(told["config"], leaves_out=_SECTIONS_OF_PLAN)
        training.session.take_up_config(config)
        training.saved_state.go_on(told["state"])
        training.steps.num_backwards = told["backwards"]
        training.state.num_scheduled = told["schedules"]
        if training.saving is not None:
            training.saving.join(told["saving"])
        training.growing.join(told["growing"])

    def _leave(self, pending: _Pending) -> None:
        """End this process as one that was told to leave, once it has given what it has."""
        if self._training.checkpoints is not None:
            self._training.checkpoints.job.run.leave()  # the first of those who stay waits for the folder
        self.version = pending.plan.version
        self._write()
        text = f"membership {self.version}: this worker has left at step {self._follower.step}"
        details = {"version": self.version, "live": True}
        self._follower.reports.write_event("members-changed", step=self._follower.step, text=text, details=details)
        _logger.info("%s", text)
        pending.groups.leave()
        self._training.session.leave("this worker has left the job")
        raise SystemExit(EXIT_STATUS)

    def _tell_changed(self, pending: _Pending, cost: ChangeCost, began: float) -> None:
        """Tell of a change that was made: an event, on the first rank a line in the log, and the script's functions.

        It was prepared from ``began`` on, in seconds of ``time.perf_counter``.
        """
        plan, step = pending.plan, self._follower.step
        taken = pending.seconds + time.perf_counter() - began
        nodes, ranks = counted(len(plan.nodes), "node"), counted(plan.world_size, "rank")
        text = (
            f"membership {plan.version} at step {step}: {plan.reason}; {nodes}, {ranks}; {taken:.2f} s "
            f"without a step, {size_in_words(cost.sent_bytes)} moved, no process restarted"
        )
        if any(map(is_compiled, self._training.model.modules())):
            text += "; compiled modules are compiled anew where their micro-batches have a size that is new to them"
        more = {"moved_bytes": cost.sent_bytes, "extra_bytes": cost.extra_bytes}
        self.tell_changed(
            plan,
            pending.seats,
            text,
            cost=cost,
            deciding=pending.seconds,
            taken=taken,
            tells=pending.tells,
            more=more,
        )

    def tell_changed(
        self,
        plan: MembershipPlan,
        before: Sequence[int],
        text: str,
        *,
        cost: ChangeCost,
        deciding: float,
        taken: float,
        tells: bool,
        more: Mapping[str, Any],
    ) -> None:
        """Tell of a change from the seats ``before``: an event, on the first rank the log, and the script's functions.

        It took ``taken`` seconds in all, ``deciding`` of them before anything was moved. ``tells`` says whether the
        scripts of some ranks are to be told. ``more`` are details of the event beside those of every change.
        """
        follower, step = self._follower, self._follower.step
        if follower.ranks.rank == 0:
            _logger.info("%s", text)
        details = {
            "version": plan.version,
            "before": list(before),
            "after": [member.seat for member in plan.members],
            "reason": plan.reason,
            "seconds": {
                "deciding": deciding,
                "wiring": cost.wiring_seconds,
                "forming": cost.forming_seconds,
                "moving": cost.moving_seconds,
                "all": taken,
            },
            **more,
            "live": True,
        }
        follower.reports.write_event("members-changed", step=step, text=text, details=details)
        world = follower.ranks.world
        change = MembersChange(
            version=plan.version, step=step, rank=world.rank, world_size=world.size, reason=plan.reason
        )
        error: Exception | None = None
        try:
            for function in self._training.on_members:
                function(change)
        except Exception as caught:  # of the script: all ranks are to hear of it
            error = caught
        if tells:
            follower.ranks.all_or_raise(error, "calling the functions that trainer.on_members() was given")
        elif error is not None:  # of one that was given after the ranks had decided
            raise error

    def _tell_of_samplers(self, before: World) -> None:
        """Warn of samplers of the script that are of the world ``before``: on who joins, and on one rank a machine."""
        training, world = self._training, self._follower.ranks.world
        own = getattr(training.batches.loader, "sampler", None)
        since = f"since membership {self.version} at step {self._changed_at}"
        for text in self._samplers.look(before, world, own=own, since=since):
            training.state.remarks.say(text, text, on_any_rank=True)

    # ---- a joiner ----

    def arrive(self) -> None:
        """Join the ranks that train, instead of beginning or resuming; returns within their run, between two steps."""
        if self.watcher is None:
            raise ElasticError(f"{JOINS} is set, and no agent has given this process a seat (ELASTIC_EXT_SEAT)")
        with self._follower.heartbeat.during(Activity.OUTSIDE):
            self._samplers.find()
            pending, change = self._called()
        training = self._training
        began, before = time.perf_counter(), training.ranks.world
        training.gradients.let_go_of_groups()
        training.guarding.let_go()
        sockets = open_sockets()
        with self._follower.ranks.in_step():
            cost = training.spread.regroup(change, pending.groups.agree, pending.groups)
            self._ready = 0
            pending = self._settle(pending, None, sockets)
            self._tell_changed(pending, cost, began)
        self._tell_of_samplers(before)
        self._follower.agreement.held_members = self._held_version
        self._follower.heartbeat.join(self._follower.step, training.counts.num_boundaries)

    def _called(self) -> tuple[_Pending, Change]:
        """Wait until the ranks that train call this worker, answer, and wait until they tell it to go.

        Gives the change that it makes then.
        """
        after = 0
        while True:
            plan = self._plan_to_join(after)
            ranks = self._follower.ranks
            member = plan.member_at(ranks.seat)
            assert member is not None
            groups = Generation(ranks, plan, old=None, new=member.rank, form_seconds=self.form_seconds)
            self._ready = plan.version
            self._why_restart = why_restart(self._training)
            self._write()
            call = self._awaited(groups.board, CALL, plan)
            if call is None:
                continue
            why_anew = why_not_these_rates(self._training, call["rates"])
            why, pending, change = why_anew, None, None
            try:
                why = why or differences(facts_of(self._training), call["facts"])
                check_all_are_shared(self._training)
                pending = self._pending_of(plan, groups, call)
                change = self.prepared(pending.worlds, pending.holder, pending.parallel)
            except (ElasticError, ValueError, TypeError) as error:
                why = why or str(error)
            groups.board.post(here(ranks.seat), {"why": why, "restarts": bool(why_anew)})
            go = self._awaited(groups.quick_board, GO, None)  # they count on this worker now, whatever comes after
            if not go["why"]:
                assert pending is not None and change is not None
                return pending, change
            _logger.warning("the ranks that train do without this worker in membership %d: %s", plan.version, go["why"])
            after = plan.version

    def _plan_to_join(self, after: int) -> MembershipPlan:
        """The newest plan that this worker is to join, once there is one newer than ``after``."""
        watcher, seat = self.watcher, self._follower.ranks.seat
        assert watcher is not None
        while True:
            plan = watcher.newest
            if plan is not None and plan.version >= max(self.joins, after + 1):
                if plan.mode != "live" or plan.member_at(seat) is None:
                    raise ElasticError(
                        f"membership {plan.version} has no worker in seat {seat} that joins: this one is not needed "
                        f"any more ({plan.reason})"
                    )
                return plan
            watcher.wait_for_version(max(self.joins, after + 1), _SLICE_SECONDS)

    def _awaited(self, board: Board, name: str, plan: MembershipPlan | None) -> Any:
        """What the ranks that train post under a name; None where a plan newer than ``plan`` comes before."""
        watcher = self.watcher
        assert watcher is not None

        def is_old() -> bool:
            return plan is not None and watcher.newest is not plan

        while not board.wait([name], seconds=_SLICE_SECONDS, stop=is_old):
            if is_old():
                return None
        return board.read(name)

    def _pending_of(self, plan: MembershipPlan, groups: Generation, call: Mapping[str, Any]) -> _Pending:
        new = [member.seat for member in plan.members]
        before, after = call["num_local"]
        worlds = Worlds.between(call["seats"], new, num_local=(before, after))
        comers = [seat for seat in new if seat not in call["seats"]]
        holder = len(call["seats"]) + comers.index(self._follower.ranks.seat)
        return _Pending(
            plan=plan,
            groups=groups,
            worlds=worlds,
            holder=holder,
            drawn=[],
            seats=call["seats"],
            seconds=0.0,
            parallel=ParallelPlan(**call["plan"]),
            tells=False,
        )

    # ---- what is known ----

    @property
    def _seats(self) -> list[int]:
        """The seats of the present world, in the order of ranks."""
        return [name.seat for name in self._follower.ranks.names]

    def _joiners(self, plan: MembershipPlan) -> list[Member]:
        return [member for member in plan.members if member.seat not in self._seats]

    def _worlds(self, plan: MembershipPlan) -> Worlds:
        new = [member.seat for member in plan.members]
        return Worlds.between(self._seats, new, num_local=(self._training.spread.num_local, plan.nodes[0].num_workers))

    def _is_in_force(self, plan: MembershipPlan) -> bool:
        """Whether the members of a plan are the ranks of the present world."""
        return [member.seat for member in plan.members] == self._seats

    def _held_version(self) -> int:
        """The version of the newest live plan that this rank holds; 0 where it holds none."""
        held = None if self.watcher is None else self.watcher.newest
        return 0 if held is None or held.mode != "live" else held.version

    @property
    def _rank_multiple(self) -> int:
        """Of what the number of ranks has to be a multiple, as the model is sharded now."""
        spread = self._training.spread
        return 1 if spread.plan is None else spread.plan.rank_multiple(spread.num_local)

    def _write(self) -> None:
        self._told_multiple = self._rank_multiple
        self._follower.reports.write_member(
            MemberRecord(
                seat=self._follower.ranks.seat,
                pid=os.getpid(),
                time=time.time(),
                why_restart=self._why_restart,
                why_restart_at_loss=self._training.losses.why_restart,
                version=self.version,
                ready=self._ready,
                agreed=self._agreed,
                refused=self._refused,
                why_refused=self._why_refused,
                rank_multiple=self._told_multiple,
                refused_seats=tuple(self._refused_seats),
            )
        )


_SECTIONS_OF_PLAN = ("parallelism", "communication")


def _why_not_coming(
    board: Board, call: Mapping[str, Any], joiners: Sequence[Member], seconds: float
) -> tuple[str, list[int]]:
    """Call the workers that join, and wait for their answers; gives why some cannot come, and the seats of those.

    The seat of one that could come if all workers were started anew is not among them.
    """
    try:
        board.post(CALL, call)
        deadline = time.monotonic() + seconds
        for member in joiners:
            if not board.wait([here(member.seat)], seconds=max(deadline - time.monotonic(), 0.0)):
                why = f"the worker in seat {member.seat} on {member.host} has not answered in {seconds:g} s"
                return why, [member.seat]
        return _refusals(board, joiners)
    except BoardGone as error:
        return str(error), []


def _refusals(board: Board, joiners: Sequence[Member]) -> tuple[str, list[int]]:
    """Why workers that join cannot come, by their answers, and their seats, as ``_why_not_coming`` has them."""
    answers = {member.seat: board.read(here(member.seat)) for member in joiners}
    reasons = {seat: str(answer["why"]) for seat, answer in answers.items() if answer["why"]}
    seats = [seat for seat in reasons if not answers[seat].get("restarts")]
    return "; ".join(f"the worker in seat {seat}: {why}" for seat, why in reasons.items()), seats


def _told_of(error: RanksFailedError) -> str:
    ends = {rank: text.rstrip().rpartition("\n")[2] for rank, text in error.tracebacks.items()}
    return "; ".join(f"rank {rank} raised {end}" for rank, end in ends.items())
