"""ElasticAgent: torch's elastic agent, with its hooks (rendezvous, start, monitor, stop, restart of workers) wrapped.

    a round        from one rendezvous of all nodes to the next; its workers are started once
    a failure      a worker that ended badly; it is counted, and --max-restarts is the number allowed
    a change       of membership: a node came, left or was lost; it is not counted

After a failure the agent stops its workers, nodes meet (the rendezvous), what was staged becomes a checkpoint, and new
workers start. At a change that leaves all workers well, as when a node joins, nodes meet first, and training goes on
meanwhile. Then they decide (members/decision.py) whether all workers are started anew, or go on (members.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from elastic_ext.members.decision import MeetingDecision, NodeWords, RoundStart, decide_members, settle
from elastic_ext.members.plan import MembershipPlan
from elastic_ext.members.regroup import answer_for
from elastic_ext.ranks.board import BoardGone
from elastic_ext.ranks.node_board import RoundBoard
from elastic_ext.training.checkpoints.signals import EXIT_STATUS

from .folder import NodeFolders
from .journal import FailedNode, Failure, Journal, ProcessEnd, failure_of, first_of, hung, is_consequence, told
from .losses import LostWorkers, gone_in_words, lost_in_words
from .members import Membership, NotTaken
from .node_tasks import NodeTasks
from .orphan_guard import Warden
from .rendezvous import NodeRendezvous, judge, persist
from .workers.hangs import Hang
from .workers.monitor import Watched
from .workers.workers import Launch, StopSignals, Workers, environments, place_workers, workers_of

__all__ = ["ElasticAgent"]

_EXCHANGE_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_POLL_SECONDS = 0.1
_MOST_MEETINGS = 5
_PART_SECONDS = 5.0
_HURT_SECONDS = 5.0  # for workers that hang, or have lost others, to end by themselves


class ElasticAgent(LocalElasticAgent):
    """The elastic agent of one node: it starts the node's workers, watches them, and restarts them with other nodes.

    It is long, as torch's agent calls hooks of one object, and what happens in one of them others have to know.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        meeting: NodeRendezvous,
        launch: Launch,
        folders: NodeFolders,
        warden: Warden,
        journal: Journal,
        tasks: NodeTasks,
        signals: StopSignals,
    ) -> None:
        super().__init__(
            spec,
            logs_specs,
            start_method=launch.start_method,
            log_line_prefix_template=launch.log_line_prefix_template,
        )
        self.is_over = False
        """Whether a failure has ended the job, here or on another node."""
        self.final_failures: list[Failure] = []
        """The failures of workers on all nodes that have ended the job; empty until then."""
        self.is_change_pending = False
        self.is_drained = False
        """Whether this node has left as somebody has asked it to."""
        self._meeting = meeting
        self._launch = launch
        self._folders = folders
        self._warden = warden
        self._journal = journal
        self._tasks = tasks
        self._signals = signals
        self._node = FailedNode(host=launch.host, node_id=launch.node_id)
        self._ranks: dict[int, int] = {}  # of the workers that run, by local rank, as they were started
        self._members = Membership(folders.run_dir, journal, meeting, launch)
        self._losses = LostWorkers(min_nodes=launch.min_nodes, node_id=launch.node_id, open_store=meeting.open_store)
        self._num_failures = 0
        self._has_failed = self._is_planned = self._is_finished = self._is_waiting = False
        self._hung_until = 0.0  # the plan without workers that hang is waited for
        self._lost_here: list[Failure] = []  # the failures for which workers of this node were taken for lost
        self._goes_on = False  # whether workers of before do, in a round that nodes have met for
        self._stop_by: float | None = None
        self._told_at: float | None = None  # that this node is to leave, where that waits for a change of members
        self._left: RoundBoard | None = None  # of the round that others have ended without this node
        self._look_at = 0.0
        self._num_rounds = 0
        self._drains = tasks.drains
        self._has_told_drain = False

    @property
    def calls_meeting(self) -> bool:
        """Whether this node wants all nodes to meet again."""
        return self.is_change_pending or self._members.wants_meeting

    @property
    def workers(self) -> Workers | None:
        """The worker processes of the present round on this node; None before the first round."""
        found: Workers | None = self._pcontext  # type: ignore[assignment]
        return found

    @property
    def watched(self) -> tuple[Watched, ...]:
        """The workers of the present round on this node, each with its rank, its process and its present state."""
        return () if self.workers is None else self._tasks.with_present_ranks(self.workers.watched(self._ranks))

    @property
    def _board(self) -> RoundBoard:
        board = self._meeting.board
        assert board is not None, "nodes have met"
        return board

    # ---- torch's hooks, wrapped ----

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Begin a new round: stop workers, meet, start workers; where all workers are well, nodes meet first."""
        self._signals.let_through()
        board = self._board
        if (plan := self._members.settle()) is not None:
            self._take_plan(plan)
        if self._is_replaced_by_restart():
            self.is_drained = True
            self._leave(signal.SIGTERM, "another node joins", patience_seconds=_EXCHANGE_SECONDS)
        board.tell_quietly("meeting", True)
        gone = self._meeting.departed() - board.who_told("meeting")
        lost = [place for place in gone - board.who_told("leaving") if self._members.has_member_at(place)]
        is_hurt = self._has_failed or self.is_change_pending or lost or board.who_told("failed")
        self._is_planned = not is_hurt
        if self._is_planned:
            if not self._members.why_restart():
                self._meeting.expect(gone=gone | board.who_told("leaving"))
            words = "nodes join or leave: all nodes meet in a rendezvous, and training goes on meanwhile"
            self._journal.tell("membership-changing", words)
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop this node's workers after a failure, within a short time; in a planned change `_meet` stops them later.

        Workers that train with this library have staged what can be kept by then, and can do no more without others.
        """
        if self._is_planned:
            return
        if self._stop_by is None and self._tasks.note_end(self.watched):
            self._stop_by = time.monotonic() + min(_HURT_SECONDS, self._launch.shutdown_seconds)
        self._end_workers(worker_group)

    def _end_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, after noting how far training was, for the cost of the restart."""
        self._tasks.note_end(self.watched)
        super()._stop_workers(worker_group)
        self._stop_by = None

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other nodes and begin the next round; meet again where a node is lost in the middle of that."""
        for _ in range(_MOST_MEETINGS):
            try:
                return self._meet(worker_group)
            except (BoardGone, DistStoreError) as error:
                self._journal.tell("meeting-failed", f"a node was lost while nodes met, and they meet again: {error}")
        raise RendezvousTimeoutError(
            f"a node was lost in each of {_MOST_MEETINGS} rendezvous; look at the logs of the other nodes"
        )

    def _meet(self, worker_group: WorkerGroup) -> None:
        members = self._members
        earlier = [*members.leavers, *([] if self._meeting.board is None else [self._meeting.board])]
        super()._rendezvous(worker_group)
        board, spec = self._board, worker_group.spec
        is_finished = self._have_succeeded()
        if self._is_planned and not is_finished:
            self._note_failures()
        words = self._exchange_words(board, spec, earlier, is_finished=is_finished)
        decision = decide_members(words)
        store = self._store_by(decision, board)
        settled = settle(words, max_restarts=spec.max_restarts, store=store)
        members.see(words, settled)
        for each in earlier:
            each.post_quietly("met-again", decision.kind)
        self._num_failures, self._journal.restart = settled.num_failures, settled.restart
        self._remaining_restarts = spec.max_restarts - settled.num_failures
        self._has_failed = self.is_change_pending = self._is_waiting = False
        self._goes_on = decision.kind != "start" and members.plan is not None
        if self._goes_on:
            self._tasks.go_on(board, together=members.member_places())
            if not settled.is_as_before:
                members.change_to(settled, board, earlier)
        elif decision.kind == "start":
            if self._is_planned and not is_finished:
                self._is_planned = False
                self._end_workers(worker_group)
            self._meeting.forget_earlier(but=store)
            self._begin_round(board, settled)
            if decision.spares and members.plan is not None:  # torch has counted their ranks, too
                self._place(members.plan)
                self._meet_in(store)
            if decision.left:  # a node that leaves may have the store of this round, and waits until all have begun it
                board.exchange("begun", True, timeout_seconds=_EXCHANGE_SECONDS)
            for each in earlier:
                each.post_quietly("begun", True)
        else:
            self._join(worker_group, board, settled)
        self._is_planned = False
        self._meeting.holds_back_joins = members.change is not None or members.choice == "live" or members.is_spare

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._signals.hold()
        if self._is_finished:  # as nodes met all workers came to their end
            return {} if self.workers is None else self.workers.pids()
        members, change = self._members, self._members.change
        if members.is_spare:
            self._pcontext = None  # those of before have ended
            return {}
        if self._goes_on and self.workers is not None:
            if members.plan is not None:
                self._place(members.plan)
            else:
                self._place_alone(self.workers.pids())
            return self.workers.pids()
        seats: Sequence[int] = ()
        if change is not None and members.plan is None:  # it joins: until then its workers are among themselves
            self._place_alone({})
            self._meet_in(self._meeting.open_store(is_here=True))
            seats = members.seats_in(change.plan)
        joins = change.plan.version if change is not None and seats else 0
        envs = environments(self._launch, worker_group, restart_count=self._journal.restart, joins=joins, seats=seats)
        self._setup_local_watchdog(envs=envs)
        self._setup_healthcheck()
        workers = workers_of(self._launch, worker_group, envs, self._logs_specs, round_number=self._num_rounds)
        members.forget_workers()
        self._losses.forget()
        self._pcontext = workers
        self._ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        self._num_rounds += 1
        with self._signals.in_torchs_place():
            workers.start()
        self._warden.watch(workers.processes.values())
        ranks = ", ".join(
            f"{worker.global_rank} (pid {workers.pids()[worker.local_rank]})" for worker in worker_group.workers
        )
        among = ", among themselves until they join" if joins else ""
        self._journal.tell("workers-started", f"workers started{among}: rank {ranks}")
        return workers.pids()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._is_finished:
            values = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
        if self._signals.told is not None and not self._puts_off(self._signals.told):
            self._leave(self._signals.told)
        if self._members.is_spare:
            return self._monitor_waiting()
        result: RunResult = super()._monitor_workers(worker_group)
        if self._members.is_joining:
            return self._monitor_joining(result)
        if result.state == WorkerState.FAILED and not self._do_without(self._failures_of(result.failures.values())):
            return self._judged(worker_group, result)
        if result.state == WorkerState.FAILED:
            result = RunResult(state=WorkerState.HEALTHY)
        if result.state == WorkerState.HEALTHY and not self._follow_losses():
            self._has_failed = True
            return RunResult(state=WorkerState.FAILED)
        if result.state == WorkerState.SUCCEEDED and not self._are_all_finished():
            result = RunResult(state=WorkerState.HEALTHY)
        hang = self._look() if result.state == WorkerState.HEALTHY else None
        if hang is not None and not self._do_without_hung(hang):
            return self._hung(hang)
        if result.state == WorkerState.HEALTHY and (plan := self._members.follow()) is not None:
            self._take_plan(plan)
            if self._members.plan is None:
                return result
        if result.state == WorkerState.HEALTHY and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            self._tell_of_others()
            self._members.tell_how()
            if (why := self._members.why_restart_at_loss()) is not None:
                self._losses.tell(self._board, why)
            self._members.hold_back_joins(self._board)
            self._members.look_for_spares()
            self._look_for_drains()
            if (over := self._board.read_quietly("over")) is not None:
                self._journal.tell("over", f"the job is over: {over}", is_bad=True)
                self._remaining_restarts, self.is_over = 0, True
                return RunResult(state=WorkerState.FAILED)
        return result

    def _look(self) -> Hang | None:
        """Do the tasks that are due; gives a hang where there is one."""
        return self._tasks.look(self.watched, waiting=self._members.waiting)

    def _exit_barrier(self) -> None:
        """Part from the other nodes, which are all finished. Torch's own barrier would wait for nodes that are gone."""
        places = self._members.member_places() | self._members.places_of(self._members.spares)
        self._board.part(timeout_seconds=_PART_SECONDS, places=places or None)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Stop the workers as the agent ends, in the time that is left; stop signals are held back meanwhile."""
        self._signals.hold()
        self._signals.take()
        seconds = self._launch.shutdown_seconds
        if self._stop_by is not None:
            seconds = max(self._seconds_left(), 1.0)
        if self.workers is not None:
            self.workers.patience_seconds = seconds
        super()._shutdown(death_sig)
        if self._left is not None:  # the store of the others' new round may be on this node
            self._wait_until(self._left, "begun", seconds=max(self._seconds_left(), 1.0))

    # ---- rounds ----

    def _exchange_words(
        self, board: RoundBoard, spec: WorkerSpec, earlier: Sequence[RoundBoard], *, is_finished: bool
    ) -> list[NodeWords]:
        """What all nodes of a new round say of themselves, in the order of their places; all of them call it."""
        own = NodeWords(
            node_id=self._launch.node_id,
            host=self._launch.host,
            num_workers=spec.local_world_size,
            num_failures=self._num_failures,
            has_failed=self._has_failed,
            is_finished=is_finished,
            restart=self._journal.restart,
            keeps_workers=self._is_planned and not is_finished and not self._are_all_lost,
            time=time.time(),
        )
        seconds = _EXCHANGE_SECONDS + 2 * self._launch.shutdown_seconds  # some stop their workers before they say it
        rows = board.exchange("nodes", self._members.words(own, earlier).to_row(), timeout_seconds=seconds)
        return [NodeWords.from_row(row) for row in rows]

    def _store_by(self, decision: MeetingDecision, board: RoundBoard) -> str:
        """The address of the store for workers of the next plan, which one node starts; empty where it needs none."""
        if not decision.holder:
            return ""
        if decision.holder == self._launch.node_id:
            board.post("live-store", self._meeting.open_store())
        address: str = board.take("live-store", seconds=_EXCHANGE_SECONDS)
        return address

    def _begin_round(self, board: RoundBoard, settled: RoundStart) -> None:
        """Take the plan by which all workers are started, tell of it, and complete staged checkpoints.

        All nodes of the new round call it, after the rendezvous and before any worker starts.
        """
        is_new = self._members.plan is None and settled.is_old and not self._members.was_spare
        self._is_finished = settled.is_finished
        self._members.begin(settled)
        self._tasks.begin_round(
            board,
            membership_version=settled.plan.version,
            world_size=settled.plan.world_size,
            together=self._members.member_places(),
            is_new=is_new,
        )
        seconds = _EXCHANGE_SECONDS + 2 * self._launch.shutdown_seconds  # others may be stopping their workers
        for outcome in persist(self._folders.staging, board, name="begin", timeout_seconds=seconds):
            self._journal.tell_staged(outcome.why, outcome.path)

    # ---- changes in which workers go on ----

    def _join(self, group: WorkerGroup, board: RoundBoard, settled: RoundStart) -> None:
        """Begin a round in which the workers of this node are to join those of others; NotTaken where they are not.

        Those that warm up already go on with that where the plan has the same seats for them.
        """
        members, plan = self._members, settled.then or settled.plan
        if self._launch.node_id in settled.decision.kept_out:
            super()._stop_workers(group)
            self._drop_out(settled.decision.why)
        warm = [each.seat for each in self.watched if each.state == "running"]
        self._goes_on = not members.is_spare and warm == members.seats_in(plan)
        if not self._goes_on:
            super()._stop_workers(group)
        if members.is_spare:
            members.write(plan)  # for who asks this agent, and for no worker
        else:
            members.change_to(settled, board, ())
        if self._goes_on:
            self._tasks.go_on(board, together=members.member_places())
        else:
            self._tasks.begin_round(
                board,
                membership_version=plan.version,
                world_size=group.spec.local_world_size,
                together=members.member_places(),
                is_new=not members.was_spare,
            )

    def _take_plan(self, plan: MembershipPlan) -> None:
        """Take a plan that the workers of this node have come to, or the others without them."""
        if plan.lost:
            self._num_failures += 1
            self._remaining_restarts -= 1
        if not self._members.seats_in(plan):
            self._members.come_back()
            return
        self._members.take(plan)
        self._place(plan)
        self._tasks.take_plan(
            membership_version=plan.version, world_size=plan.world_size, together=self._members.member_places()
        )

    def _place(self, plan: MembershipPlan) -> None:
        """Give the workers of this node their ranks by a plan."""
        place = [node.node_id for node in plan.nodes].index(self._launch.node_id)
        ranks = plan.nodes[place].ranks
        pids = {} if self.workers is None else self.workers.pids()
        self._ranks = dict(enumerate(ranks))
        place_workers(
            self._worker_group,
            ranks,
            world_size=plan.world_size,
            place=place,
            num_nodes=len(plan.nodes),
            pids=pids,
        )

    def _place_alone(self, pids: Mapping[int, int]) -> None:
        """Give the workers of this node ranks of a world of their own; ``pids`` are of those that run."""
        group = self._worker_group
        number = group.spec.local_world_size
        place_workers(group, range(number), world_size=number, place=0, num_nodes=1, pids=pids)

    def _meet_in(self, store: str) -> None:
        """Have the workers of this node meet in the store with an address, HOST:PORT, that an agent has."""
        group: Any = self._worker_group  # whose types have no address for good
        host, _, port = store.rpartition(":")
        group.master_addr, group.master_port = host.strip("[]"), int(port)

    def _monitor_joining(self, result: RunResult) -> RunResult:
        """The torch result of workers that warm up to join; NotTaken where they fail, hang, or nobody takes them in."""
        change = self._members.change
        assert change is not None, "it joins"
        if self._have_others_ended():
            return self._monitor_workers(self._worker_group)
        if result.state == WorkerState.FAILED:
            self._drop_out(told(first_of(self._failures_of(result.failures.values()))))
        if result.state == WorkerState.SUCCEEDED:
            self._drop_out("its workers have ended before they were in")
        if (hang := self._look()) is not None:
            self._drop_out(f"its workers hang: {hang.reason}")
        plan = self._members.follow()
        if plan is not None:
            self._take_plan(plan)
        elif change.end is not None and change.end.kind == "failed":  # else all nodes meet again
            self._drop_out(change.end.why)
        return result

    def _monitor_waiting(self) -> RunResult:
        """The torch result of a node that waits as a spare and has no workers; NotTaken where it waits in vain."""
        if self._have_others_ended():
            return self._monitor_workers(self._worker_group)
        if self._meeting.is_lost:
            self._drop_out("the rendezvous does not answer any more")
        self._look()
        return RunResult(state=WorkerState.HEALTHY)

    def _have_others_ended(self) -> bool:
        """Whether those who train have ended well, before this node was in, which ends too; NotTaken if they failed."""
        board = self._board
        if (over := board.read_quietly("over")) is not None:
            self._drop_out(f"the job is over: {over}")
        if not self._members.trains <= board.who_told("finished"):
            return False
        self._end_workers(self._worker_group)
        self._is_finished = True
        board.tell_quietly("finished", True)
        self._journal.tell("left-out", "the workers of the other nodes have ended well before this node was in")
        return True

    def _drop_out(self, why: str) -> NoReturn:
        """Leave the nodes that this one was to join, which go on without it; always raises NotTaken."""
        if (change := self._members.change) is not None:
            change.tell_failed(why)
            answer_for(change.plan, self._members.seats_in(change.plan), why)
        self._meeting.leave()
        raise NotTaken(why)

    # ---- failures ----

    @property
    def _are_all_lost(self) -> bool:
        """Whether this node has no worker any more, as those of other nodes go on without them."""
        return self.workers is not None and self.workers.are_lost

    def _do_without(self, failures: Sequence[Failure]) -> bool:
        """Have the workers of other nodes go on without those that have failed here; gives whether they do.

        All workers of this node end with them, and start anew to join the others.
        """
        if self._members.plan is None or self._is_changing or not self._follow_losses():
            return False
        if any(each.exit_code == EXIT_STATUS or is_consequence(each) for each in failures):
            return False  # who has lost others, and has failed by that, could not go on without them
        assert self.workers is not None
        seats = self._members.seats_in(self._members.newest_plan)
        if seats and (why := self._members.why_restart_at_loss()) is not None:  # its workers had begun to train
            self._losses.tell(self._board, why)
            if not why:
                self._losses.wait_for_words(self._board, self._members.member_places(), seconds=2 * _LOOK_SECONDS)
        if self.workers.are_lost or not seats or self._why_restart_without(seats):
            return self.workers.are_lost
        self._tell_failed(failures)
        self._lost_here = [*failures]
        self.workers.lose()
        words = dict.fromkeys(seats, "")
        self._losses.add(words | {each.seat: lost_in_words(each) for each in failures})
        return True

    def _do_without_hung(self, hang: Hang) -> bool:
        """Have the workers of other nodes go on without those that hang, and end those here; gives whether they do.

        Called on all nodes with the same hang, again and again until a plan is without them.
        """
        plan, change = self._members.newest_plan, self._members.change
        if change is not None and change.plan.lost:  # to which they come within a limit of its own
            return True
        nodes = {member.node_id for member in plan.members if member.rank in hang.ranks}
        lost = [member.seat for member in plan.members if member.node_id in nodes]
        if time.monotonic() < self._hung_until or self._losses.pending(plan):  # who waits for them seems to hang too
            return True
        if self._is_changing or hang.may_be_elsewhere or not lost or self._why_restart_without(lost):
            return False
        self._hung_until = time.monotonic() + _EXCHANGE_SECONDS
        self._journal.tell("hang", f"training hangs: {hang.reason}", is_bad=True, ranks=list(hang.ranks))
        self._tasks.capture(self.watched, hang.reason)
        own = self._hung_here(hang)
        if own:
            assert self.workers is not None
            self._lost_here = own
            self.workers.lose()
            words = dict.fromkeys(self._members.seats_in(plan), "")
            self._losses.add(words | {each.seat: lost_in_words(each) for each in own})
        return True

    def _hung_here(self, hang: Hang) -> list[Failure]:
        """The failures of the workers of this node that hang."""
        return [
            hung(each.rank, each.local_rank, each.process.pid, hang.reason, seat=each.seat, node=self._node)
            for each in self.watched
            if each.rank in hang.ranks
        ]

    @property
    def _is_changing(self) -> bool:
        """Whether workers have been told of a change of members, other than one without those that are lost."""
        change = self._members.change
        return change is not None and change.is_told and not change.plan.lost

    def _why_restart_without(self, lost: Iterable[int]) -> str:
        """Why all workers are started anew as those in these seats are lost, a sentence; empty where others go on."""
        places = {place: self._members.places[place] for place in self._members.member_places()}
        plan, change = self._members.newest_plan, self._members.change
        num_left = self._remaining_restarts - (change is not None and bool(change.plan.lost))  # counted once in force
        return self._losses.why_restart(self._board, plan, lost, places, num_left)

    def _follow_losses(self) -> bool:
        """Go on without workers that are lost, as soon as a node has made the plan without them.

        Gives whether that can be: else those that were taken for lost here have failed, and all workers are started
        anew.
        """
        if self._members.plan is None:
            return True
        self._look_for_gone()
        pending = self._losses.pending(self._members.newest_plan)
        if pending and (self._is_changing or self._why_restart_without(pending)):
            self._everyone(self._lost_here)
            self._losses.forget()
            return False
        plan = self._losses.next_plan(self._board, self._members.newest_plan, self._members.version + 1)
        if plan is None:
            return True
        if self.workers is not None and not self._members.seats_in(plan):  # others have taken them for lost
            self.workers.lose()
        lost = ", ".join(map(str, plan.lost))
        self._hung_until = 0.0
        self._journal.tell("worker-lost", f"{plan.reason}; the others go on without", is_bad=True, seats=lost)
        self._members.lose(plan, self._board)
        return True

    def _look_for_gone(self) -> None:
        """Have the workers of nodes that are gone count as lost, where the others can go on without them."""
        if len(self._members.places) == 1 or self._is_changing:
            return
        self._meeting.num_nodes_waiting()  # which looks
        board, plan = self._board, self._members.newest_plan
        places = self._meeting.departed() - self._meeting.passed_over
        places -= board.who_told("meeting") | board.who_told("leaving") if places else frozenset()
        lost = gone_in_words(plan, {self._members.places[place] for place in places})
        if lost and not self._why_restart_without(lost):
            self._meeting.passed_over |= places
            self._losses.add(lost)

    def _judged(self, group: WorkerGroup, result: RunResult) -> RunResult:
        """The torch result for workers that failed: FAILED for a failure, HEALTHY where it was a change of membership.

        It waits until the nodes' failures, or the silence of a lost node, tell which of the two it was.
        """
        own = self._failures_of(result.failures.values())
        own = [
            replace(each, message=self._tasks.words_of_leaving([each.seat])) if each.exit_code == EXIT_STATUS else each
            for each in own
        ]
        self._tell_failed(own)
        self._tasks.tell_workers({failure.seat: failure.ending for failure in own})
        began = time.monotonic()
        while True:
            everyone = self._everyone(own)
            verdict = judge(
                everyone,
                departed=self._gone(),
                num_nodes=group.group_world_size or 1,
                num_left=self._remaining_restarts,
                waited_seconds=time.monotonic() - began,
                silence_seconds=self._launch.silence_seconds,
            )
            if verdict.kind != "wait":
                break
            time.sleep(_POLL_SECONDS)
        if verdict.kind == "membership":
            self._journal.tell("membership-changing", verdict.reason)
            self.is_change_pending = True
            return RunResult(state=WorkerState.HEALTHY)
        self._has_failed = True
        if self._remaining_restarts <= 0:
            self.is_over, self.final_failures = True, everyone
            self._board.post_quietly("over", f"on {self._launch.host} {told(first_of(everyone))}")
        return result

    def _note_failures(self) -> None:
        """Note workers that failed during the rendezvous, unmonitored; those that were told to end have not failed."""
        result = None if self.workers is None else self.workers.wait(0)
        if result is not None:
            failed = [each for each in self._failures_of(result.failures.values()) if each.exit_code != EXIT_STATUS]
            self._tell_failed(failed)
            self._has_failed = bool(failed)

    def _failures_of(self, ends: Iterable[ProcessEnd]) -> list[Failure]:
        """The failures of this node's workers whose processes have ended so."""
        workers = {each.local_rank: each for each in self.watched}
        ended = [(workers[end.local_rank], end) for end in ends]
        return [failure_of(each.rank, end, seat=each.seat, node=self._node) for each, end in ended]

    def _tell_failed(self, failures: Sequence[Failure]) -> None:
        for each in failures:
            self._journal.tell("worker-failed", told(each), is_bad=True, rank=each.rank, exit_code=each.exit_code)

    def _hung(self, hang: Hang) -> RunResult:
        """The FAILED result for hung workers, once the stacks of all workers are written."""
        self._journal.tell("hang", f"training hangs: {hang.reason}", is_bad=True, ranks=list(hang.ranks))
        self._tasks.capture(self.watched, hang.reason)
        everyone = self._everyone(self._hung_here(hang))
        self._has_failed = True
        self._stop_by = time.monotonic() + min(_HURT_SECONDS, self._launch.shutdown_seconds)
        if self._remaining_restarts <= 0:
            self.is_over, self.final_failures = True, everyone
            self._board.post_quietly("over", f"training hangs: {hang.reason}")
        return RunResult(state=WorkerState.FAILED)

    def _everyone(self, own: list[Failure]) -> list[Failure]:
        """The failures of all nodes that have reported theirs in this round; this node's ``own`` are reported first."""
        try:
            if own:
                self._board.tell("failed", [failure.to_row() for failure in own])
                self._board.post("any-failed", True)  # of many nodes all look at this one key
            return [Failure.from_row(row) for rows in self._board.values_of("failed").values() for row in rows]
        except BoardGone:
            return own

    def _gone(self) -> list[str]:
        """The ids of the nodes that are lost, or that leave: this round, or by the change that is under way."""
        self._meeting.num_nodes_waiting()  # which looks
        board, members = self._board, self._members
        places = self._meeting.departed() - board.who_told("meeting") | board.who_told("leaving")
        gone = [members.places[place] for place in sorted(places)]
        known = [] if members.plan is None else [node.node_id for node in members.plan.nodes]
        return gone + [node for node in known if node not in members.places]

    def _tell_of_others(self) -> None:
        """Tell the workers of this node of workers that have failed on other nodes."""
        if self._board.read_quietly("any-failed"):
            self._tasks.tell_workers({failure.seat: failure.ending for failure in self._everyone([])})

    def _wait_until(self, board: RoundBoard, name: str, *, seconds: float) -> bool:
        """Whether the other nodes announce ``name`` on a round's board within ``seconds``; False if all are leaving."""
        end = time.monotonic() + seconds
        with contextlib.suppress(BoardGone):
            while time.monotonic() < end and len(board.who_told("leaving")) < board.num_peers:
                if board.read(name) is not None:
                    return True
                time.sleep(_POLL_SECONDS)
        return False

    def _seconds_left(self) -> float:
        """How long the workers have to end by themselves; 0 where no time for that was set."""
        return 0.0 if self._stop_by is None else self._stop_by - time.monotonic()

    def _are_all_finished(self) -> bool:
        """Whether the workers of all nodes have ended well; called once this node's have.

        While workers of other nodes run, this node stays: if one of them fails, all nodes meet, and start all workers.
        """
        board = self._board
        try:
            if not self._is_waiting:
                board.tell("finished", True)
            is_over = board.has(*board.of_peers("finished", self._members.member_places()))
        except BoardGone:
            return True  # there is nobody left to meet
        if not is_over and not self._is_waiting:
            self._is_waiting = True
            self._journal.tell("waiting", "all workers of this node have ended well; it waits for those of other nodes")
        return is_over

    def _have_succeeded(self) -> bool:
        if self.workers is None:
            return False
        result = self.workers.wait(0)
        return result is not None and not result.failures

    # ---- leaving ----

    def _look_for_drains(self) -> None:
        """Hand on requests that nodes leave, and follow one that this node does: SignalException is raised then."""
        plan, board = self._members.plan, self._board
        assert plan is not None, "it trains"
        self._drains.tell(board, plan)
        drain = self._drains.of(self._launch.node_id, board)
        if self._members.change is not None or drain is None:
            return
        node_id = self._launch.node_id
        spares = self._members.spares_for([node_id])
        is_due = drain.is_due(plan, spares)
        if is_due and self._drains.are_enough_without(
            node_id, board, plan, min_nodes=self._launch.min_nodes, gone=self._gone()
        ):
            self.is_drained = True
            why = "a spare takes its place" if spares else "another node has joined"
            why = why if drain.after_join else "elastic-ext members drain"
            self._leave(signal.SIGTERM, why, patience_seconds=_EXCHANGE_SECONDS if spares else 0.0)
        if not self._has_told_drain:
            self._has_told_drain = True
            why = f", as the job needs {self._launch.min_nodes} nodes (--nnodes), and others leave" if is_due else ""
            words = f"elastic-ext members drain: this node leaves once another one has joined{why}"
            self._journal.tell("leaving", words)

    def _is_replaced_by_restart(self) -> bool:
        """Whether this node leaves now that another joins, so that the workers of all are started anew but once."""
        is_replaced = self._has_told_drain and self._meeting.held_back() and self._board.num_peers > 1
        return bool(is_replaced and self._members.why_restart())

    def _puts_off(self, number: signal.Signals) -> bool:
        """Whether leaving waits until members have changed, for which workers are about to come to a plan, or have.

        That takes a step, as a rule; where the loop is between two epochs, say, it is not waited for for long.
        """
        change = self._members.change
        is_soon = change is not None and (change.is_told or (change.is_joining and change.has_come))
        if number != signal.SIGTERM or not is_soon:
            return False
        now = time.monotonic()
        if self._told_at is None:
            self._told_at = now
        return now < self._told_at + self._launch.shutdown_seconds / 3

    def _leave(self, number: signal.Signals, why: str = "", *, patience_seconds: float = 0.0) -> None:
        """Leave the job after a stop signal, or for another reason; always raises SignalException.

        At SIGTERM the other nodes meet while the workers here still train with theirs; then the workers here are ended.
        With ``patience_seconds`` another node waits to join, and that is how much longer its meeting may take.
        """
        is_term = number == signal.SIGTERM
        joins = self._members.is_joining or self._members.is_spare
        if (plan := self._members.settle()) is not None:
            self._take_plan(plan)
            joins = False
        told_at = time.monotonic() if self._told_at is None else self._told_at
        self._stop_by = told_at + self._launch.shutdown_seconds + patience_seconds
        how = "told to end" if is_term else f"sent {number.name} too"
        if is_term and self._tasks.saves_on_signals(each.seat for each in self.watched):
            how = "told to save a checkpoint and to end"
        how = "it has waited as a spare" if self._members.is_spare else f"its workers are {how}"
        self._journal.tell("leaving", f"{why or number.name}: this node leaves the job; {how}")
        board = self._board
        if joins:
            self._meeting.leave()
        elif board.num_peers > 1:
            self._members.leave(board, is_live=is_term)
            are_enough = board.num_peers > self._launch.min_nodes or patience_seconds > 0
            if self._meeting.leave() and is_term and are_enough:
                seconds = self._launch.shutdown_seconds / 3 + patience_seconds
                has_met = self._wait_until(board, "met-again", seconds=seconds)
                self._left = board if has_met else None
                if has_met:
                    self._leave_live(board)
                self._stop_by = min(self._stop_by, time.monotonic() + self._launch.shutdown_seconds)
        raise SignalException(f"process {os.getpid()} got {number.name}", sigval=number)

    def _leave_live(self, board: RoundBoard) -> None:
        """Wait until the workers of this node have left those of others, which go on, and have ended by themselves.

        It gives up, and they are ended, where all workers are started anew, some fail, or the time runs out.
        """
        end = time.monotonic() + self._seconds_left() - self._launch.shutdown_seconds / 3
        is_told = False
        while time.monotonic() < end and board.read_quietly("met-again") == "live" and self.workers is not None:
            self.workers.wait(0)
            states = {each.state for each in self.watched}
            if "failed" in states:
                return
            if "running" not in states:
                self._journal.tell("left", "the workers of this node have left those of others, which go on")
                return
            if not is_told and (text := board.read_quietly("plan")) is not None:
                self._members.write(MembershipPlan.from_json(text))
                is_told = True
            time.sleep(_POLL_SECONDS)
