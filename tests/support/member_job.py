"""Workers that speak of members with their agent by themselves: they stand in for a trainer, and have nothing of one.

    python -m tests.support.member_job FOLDER

Each writes its member record, watches membership.json, and adds up ones with the others again and again. Where all hold
a newer plan that is come to live, they form another gloo group through the store of that plan and go on in it; one that
is in it no more ends as a worker does that was told to leave. A worker that joins gets ready in a world of its own node
and waits for the key `go`. In FOLDER each writes a line into seen-<pid>.txt whenever its world is another one: the
plan's version, its rank, the number of ranks as they add up to, its seat, and the step.

What they do besides is said by files in FOLDER, each with a sentence in it:

    why      members change by a restart alone
    refuse   the ranks refuse every plan
    unlike   the ranks refuse every plan by which somebody joins, for the sake of those
    deaf     they come to none
    agreed   they come to none either, and say that they have agreed on it, as where an evaluation goes on
    quiet    a worker that stays does not say that it has come to a plan, as long as the file is there
    die      a worker that joins ends before it is ready
    multiple  the number of ranks has to be a multiple of the number there, which may change
    hold     it is not ready as long as the file is there
    end      all end well
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic_ext.members.plan import MembershipPlan
from elastic_ext.records.agent import MEMBERSHIP_FILE
from elastic_ext.records.files import write_whole
from elastic_ext.records.member import MemberRecord, member_file
from elastic_ext.training.checkpoints.signals import EXIT_STATUS

__all__: list[str] = []

STEP_SECONDS = 0.05


class Worker:
    """One worker: the plan that it trains by, and what it has said of itself."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        self.run_dir = Path(environ["ELASTIC_EXT_RUN_DIR"])
        self.seat = int(environ["ELASTIC_EXT_SEAT"])
        self.joins = int(environ.get("ELASTIC_EXT_JOINS", "0"))
        self.step = 0
        self.plan = self.held()
        self.store: Any = None
        self.record = MemberRecord(
            seat=self.seat,
            pid=os.getpid(),
            time=time.time(),
            why_restart=self.told("why") or "",
            version=0 if self.joins else self.plan.version,
            rank_multiple=self.multiple(),
        )
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        self.say()
        if self.joins:
            self.join()
        self.see()

    def told(self, name: str) -> str | None:
        file = self.folder / name
        return file.read_text() if file.exists() else None

    def multiple(self) -> int:
        return int(self.told("multiple") or 1)

    def held(self) -> MembershipPlan:
        return MembershipPlan.from_json((self.run_dir / MEMBERSHIP_FILE).read_text())

    def say(self, **changes: object) -> None:
        self.record = replace(self.record, time=time.time(), **changes)  # type: ignore[arg-type]
        write_whole(member_file(self.run_dir, self.seat), self.record.to_json().encode(), durable=False)

    def see(self) -> None:
        ones = torch.ones(1)
        dist.all_reduce(ones)
        with open(self.folder / f"seen-{os.getpid()}.txt", "a") as file:
            print(self.plan.version, dist.get_rank(), int(ones), self.seat, self.step, file=file, flush=True)

    def join(self) -> None:
        assert dist.get_world_size() == int(os.environ["LOCAL_WORLD_SIZE"]), "it is in a world of its own node"
        if (words := self.told("die")) is not None:
            raise ValueError(words)
        while (self.folder / "hold").exists():
            time.sleep(0.02)
        store = None
        while store is None or not store.check(["go"]):
            held = self.held()
            if held.member_at(self.seat) is None:
                raise ValueError(f"membership {held.version} takes back that this worker joins")
            if store is None or held != self.plan:
                self.plan, store = held, self.store_of(held)
                self.say(ready=held.version)
            time.sleep(0.02)
        self.form(self.plan)

    def store_of(self, plan: MembershipPlan) -> Any:
        host, _, port = plan.store.rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False)  # type: ignore[attr-defined]
        return dist.PrefixStore(f"members/{plan.version}", store)  # type: ignore[attr-defined]

    def form(self, plan: MembershipPlan) -> None:
        """Form the group of a plan in place of the one that is there."""
        dist.destroy_process_group()
        member = plan.member_at(self.seat)
        if member is None:
            self.say(version=plan.version)
            sys.exit(EXIT_STATUS)
        self.store = self.store_of(plan)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("groups", self.store),  # type: ignore[attr-defined]
            rank=member.rank,
            world_size=plan.world_size,
            timeout=timedelta(seconds=60),
        )
        steps = torch.tensor([self.step])
        dist.broadcast(steps, 0)
        is_quiet = self.record.version > 0 and self.told("quiet") is not None
        self.step, self.plan = int(steps), plan
        if not is_quiet:
            self.say(version=plan.version)

    def take_step(self) -> bool:
        """Take a step, and come to another plan after it; whether all are to end."""
        held = self.held()
        is_live = held.mode == "live" and self.told("deaf") is None
        if is_live and self.told("agreed") is not None and held.version > self.plan.version:
            self.say(agreed=held.version)
            is_live = False
        if self.record.rank_multiple != self.multiple():
            self.say(rank_multiple=self.multiple())
        if self.record.version < self.plan.version and self.told("quiet") is None:
            self.say(version=self.plan.version)
        newest = held.version if is_live and held.version > self.record.refused else self.plan.version
        versions = torch.tensor([newest, -newest, 0 if self.told("end") is None else -1])
        dist.all_reduce(versions, dist.ReduceOp.MIN)
        self.step += 1
        lowest, highest = int(versions[0]), -int(versions[1])
        if lowest == highest > self.plan.version:
            if held.has_members_of(self.plan):
                self.plan = held
                self.say(version=held.version)
            elif (words := self.told("refuse")) is not None:
                self.say(refused=held.version, why_refused=words)
            elif (words := self.told("unlike")) is not None:
                known = [member.seat for member in self.plan.members]
                seats = tuple(member.seat for member in held.members if member.seat not in known)
                self.say(refused=held.version, why_refused=words, refused_seats=seats)
            else:
                if dist.get_rank() == 0:
                    self.store_of(held).set("go", "1")
                self.form(held)
                self.see()
        time.sleep(STEP_SECONDS)
        return bool(versions[2])


def main() -> None:
    worker = Worker(Path(sys.argv[1]), dict(os.environ))
    while not worker.take_step():
        pass
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
