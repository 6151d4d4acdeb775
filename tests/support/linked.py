"""The parts of an agent that its link with a master needs, in the test's own process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_ext.agent.config_writer import ConfigWriter
from elastic_ext.agent.journal import Journal
from elastic_ext.agent.master.identity import NodeSelf
from elastic_ext.agent.master.link import GivenMaster, MasterFinder, MasterLink
from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.master.address import MasterPlace
from elastic_ext.records.agent import EVENTS_FILE

__all__ = ["LinkedNode", "config", "in_file", "linked"]


class LinkedNode:
    """One of them."""

    def __init__(
        self,
        run_dir: Path,
        place: MasterPlace,
        *,
        incarnation: int = 1,
        node_id: str = "node",
        finder: MasterFinder | None = None,
    ) -> None:
        run_dir.mkdir(exist_ok=True)
        (run_dir / "hardware.json").touch()  # what the machine has is looked for
        self.run_dir = run_dir
        self.tuner = ConfigWriter(run_dir / "config.json", on_foreign=lambda write: None)
        self.journal = Journal(run_dir)
        node = NodeSelf(
            node_id=node_id, incarnation=incarnation, host="here", pid=7, library="1", started_at=0.0, job="job"
        )
        self.link = MasterLink(run_dir, node, finder or GivenMaster(place), self.tuner, self.journal)

    def told(self) -> list[str]:
        """The kinds of what the journal has told of the master."""
        file = self.run_dir / EVENTS_FILE
        lines = file.read_text().splitlines() if file.exists() else []
        return [kind for line in lines if (kind := json.loads(line)["kind"]).startswith("master-")]

    def text_of(self, kind: str) -> str:
        lines = (self.run_dir / EVENTS_FILE).read_text().splitlines()
        return next(str(event["text"]) for line in lines if (event := json.loads(line))["kind"] == kind)


@contextmanager
def linked(run_dir: Path, place: MasterPlace, *, begun: bool = True, incarnation: int = 1) -> Iterator[LinkedNode]:
    node = LinkedNode(run_dir, place, incarnation=incarnation)
    node.tuner.look()
    node.link.start()
    if begun:
        node.link.begin_configs()
    try:
        yield node
    finally:
        node.link.close("the test is over")


def config(version: int, **values: object) -> str:
    return ElasticConfig.from_values(
        {f"user.{name}": value for name, value in values.items()}, version=version
    ).to_json()


def in_file(node: LinkedNode) -> int:
    file = node.run_dir / "config.json"
    return ElasticConfig.parse(file.read_bytes()).version if file.exists() else 0
