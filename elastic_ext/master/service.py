"""MasterService: what the master answers over gRPC. What it knows, and what follows from it, is in job.py.

All of it runs on one event loop, and calls that change the config follow one another: what they write is on disk before
anybody hears of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from .admission import Refused
from .configs import Page
from .guard import ANSWERED, Guard, Peer
from .job import Job, Moment
from .shown import Shown
from .status import config_history, event_message, job_status, newest_events, tuning_report
from .store import Store
from .watchers import Unacknowledged, Watchers
from .wire import master_pb2 as wire
from .wire.master_pb2_grpc import MasterServicer

__all__ = ["MasterService", "moment"]

_MOST_FOLLOWERS = 64
_MOST_CHANGES = 1_000
_MOST_GENERATED = 8
"""One after another; what is refused may call for the next."""
_Result = TypeVar("_Result")


def moment() -> Moment:
    """Now."""
    return Moment(clock=time.monotonic(), time=time.time())


class MasterService(MasterServicer):
    """The methods of the service Master, under their names there."""

    def __init__(self, job: Job, store: Store, executor: Executor, guard: Guard) -> None:
        """``executor`` has one thread, the store's."""
        self._job = job
        self._store = store
        self._executor = executor
        self._guard = guard
        self._watchers = Watchers(job.settings.acknowledge_seconds)
        self._writing = asyncio.Lock()
        self._news = asyncio.Event()  # set, and another one put in its place, as events come
        self._shown = Shown(
            lambda request: job_status(job, moment(), request), lambda num: newest_events(job, num), time.monotonic
        )
        self._pushed = wire.ConfigPush()
        self._num_followers = 0
        self.counts: Counter[str] = Counter()
        """Of what was answered."""

    # ---- agents ----

    async def Join(self, request: wire.JoinRequest, peer: Peer) -> wire.JoinReply:
        try:
            reply = self._job.join(moment(), request)
        except ANSWERED as error:
            self._guard.refuse(error)
        self.counts["joins"] += 1
        self.tell_followers()
        return reply

    async def Beat(self, request: wire.BeatRequest, peer: Peer) -> wire.BeatReply:
        try:
            reply, page = self._job.beat(moment(), request)
            if page is not None:
                await self._take(page)
                reply.config_version = self._job.book.version
        except ANSWERED as error:
            self._guard.refuse(error)
        self._watchers.acknowledge(request.node_id, request.held.version)
        self.counts["beats"] += 1
        if request.events:
            self.tell_followers()
        return reply

    async def Watch(self, request: wire.WatchRequest, peer: Peer) -> AsyncIterator[wire.ConfigPush]:
        node_id = request.node_id
        watcher = None
        try:
            self._job.watches(moment(), request)
            watcher = self._watchers.begin(node_id, request.config_version)
            while not watcher.is_over:
                if watcher.has_news(self._job.book.version):
                    yield self._push()
                    self.counts["pushes"] += 1
                else:
                    await watcher.rung()
        except Unacknowledged as error:
            self.counts["unacknowledged"] += 1
            self._guard.refuse(Refused("late", str(error)))
        except Refused as error:
            self._guard.refuse(error)
        finally:
            if watcher is not None:
                self._watchers.forget(node_id, watcher)

    async def Leave(self, request: wire.LeaveRequest, peer: Peer) -> wire.LeaveReply:
        try:
            self._job.leave(moment(), request)
        except ANSWERED as error:
            self._guard.refuse(error)
        self._watchers.end(request.node_id)
        self.tell_followers()
        return wire.LeaveReply()

    # ---- people ----

    async def GetStatus(self, request: wire.GetStatusRequest, peer: Peer) -> wire.JobStatus:
        return self._shown.status(request)

    async def ReadEvents(self, request: wire.ReadEventsRequest, peer: Peer) -> AsyncIterator[wire.JobEvent]:
        if request.follow and self._num_followers >= _MOST_FOLLOWERS:
            self._guard.refuse(Refused("limits", f"{_MOST_FOLLOWERS} others follow already"))
        self._num_followers += request.follow
        try:
            number, most = request.after, request.most
            while True:
                news = self._news
                for event in self._job.log.after(number, most=most):
                    number = event.number
                    yield event_message(event)
                if not request.follow:
                    return
                most = 0
                await news.wait()
        finally:
            self._num_followers -= request.follow

    async def SetConfig(self, request: wire.SetConfigRequest, peer: Peer) -> wire.ConfigWritten:
        if len(request.changes) + len(request.remove) > _MOST_CHANGES:
            self._guard.refuse(Refused("invalid", f"more than {_MOST_CHANGES} keys are changed at once"))
        return await self._written(lambda: self._job.changed(moment(), request), peer)

    async def UndoConfig(self, request: wire.UndoConfigRequest, peer: Peer) -> wire.ConfigWritten:
        return await self._written(lambda: self._job.undone(moment(), request), peer)

    async def GetConfigs(self, request: wire.GetConfigsRequest, peer: Peer) -> wire.ConfigHistory:
        return config_history(self._job.book)

    async def ReportPairs(self, request: wire.ReportPairsRequest, peer: Peer) -> wire.ReportPairsReply:
        try:
            recommendations = self._job.take_pairs(moment(), request)
        except ANSWERED as error:
            self._guard.refuse(error)
        self.tell_followers()
        return wire.ReportPairsReply(recommendations=recommendations)

    async def GetMetrics(self, request: wire.GetMetricsRequest, peer: Peer) -> wire.MetricHistory:
        return self._job.collector.history(request.since)

    async def GetTuning(self, request: wire.GetTuningRequest, peer: Peer) -> wire.TuningReport:
        return tuning_report(self._job.tuning, most=request.most)

    async def ControlTuning(self, request: wire.ControlTuningRequest, peer: Peer) -> wire.TuningReport:
        newest = max((each.number for each in self._job.tuning.decisions), default=0)
        try:
            self._job.control_tuning(moment(), request)
            is_answered = asyncio.Event()
            self._job.tuning.after(is_answered.set)
            await is_answered.wait()
            await self.tune()
        except ANSWERED as error:
            self._guard.refuse(error)
        self.tell_followers()
        return tuning_report(self._job.tuning, after=newest)

    # ---- how ----

    async def tune(self) -> None:
        """Write what the tuner has decided as versions of the config."""
        tuning = self._job.tuning
        if tuning.due is None:
            return
        async with self._writing:
            for _ in range(_MOST_GENERATED):
                decision = self._job.decided(moment())
                if decision is None:
                    break
                try:
                    page = self._job.generated(moment(), decision)
                    written = replace(decision, version=page.config.version)
                    await self._stored(partial(self._store.enter_page, page, written))
                except ANSWERED as error:
                    tuning.refuse_due(moment().time, decision.number, f"it could not be written: {error}")
                else:
                    self._enter(page, decision.number)
                    self.counts["generated"] += 1
        self.tell_followers()

    def tell_followers(self) -> None:
        """Events have come."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def end_streams(self) -> None:
        """The master ends: nobody is told of anything any more."""
        self._watchers.end_all()

    def _push(self) -> wire.ConfigPush:
        """The newest config for a stream; the same message for all of them."""
        version, spread = self._job.book.version, self._job.spread_seconds
        if (self._pushed.version, self._pushed.acknowledge_within_seconds) != (version, spread):
            text = self._job.book.text
            self._pushed = wire.ConfigPush(
                epoch=self._job.epoch, version=version, text=text, acknowledge_within_seconds=spread
            )
        return self._pushed

    async def _written(self, make: Callable[[], Page], peer: Peer) -> wire.ConfigWritten:
        try:
            async with self._writing:
                before = self._job.book.newest
                page = make()
                await self._stored(lambda: self._store.enter_page(page))
                self._enter(page)
        except ANSWERED as error:
            self._guard.refuse(error)
        return wire.ConfigWritten(
            version=page.config.version,
            text=page.config.to_json(),
            before=before.config.to_json() if before is not None else "",
        )

    async def _take(self, page: Page) -> None:
        """A page of a node's file, unless a newer one has come while others were stored."""
        async with self._writing:
            if page.config.version > self._job.book.version:
                await self._stored(lambda: self._store.enter_page(page))
                self._enter(page)

    def _enter(self, page: Page, decision: int | None = None) -> None:
        self._job.enter(moment(), page, decision=decision)
        self._watchers.tell(page.config.version)
        self.tell_followers()

    async def _stored(self, write: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, write)
