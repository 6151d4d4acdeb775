"""MastersConfig: a job's config, looked at and changed by asking its master; the same calls as on ConfigHistory."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from threading import Event

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.history import Entry
from elastic_ext.errors import MasterError

from .client import MasterClient
from .places import MasterPlace
from .wire import master_pb2 as wire
from .wire.plain import as_dict

__all__ = ["MastersConfig"]

_TAKEN_SECONDS = 5.0
_LOOK_SECONDS = 0.05


class MastersConfig:
    """That of one master; calls raise MasterError."""

    def __init__(self, place: MasterPlace) -> None:
        """ValueError if the token or the certificate cannot be used."""
        self.name = f"the config of the master at {place.address}"
        self._client = MasterClient(place)

    def current(self) -> ElasticConfig | None:
        """The newest version; None before the first."""
        entries = self.entries()
        return entries[-1].config if entries else None

    def entries(self) -> list[Entry]:
        """Every version that is kept, the oldest first."""
        return [
            Entry(
                time=each.time,
                config=ElasticConfig.parse(each.text.encode()),
                restores=each.restores if each.HasField("restores") else None,
            )
            for each in self._client.configs()
        ]

    def json_lines(self) -> list[str]:
        """The same as objects, with who wrote each."""
        rows = [as_dict(each) for each in self._client.configs()]
        return [json.dumps({**row, "config": json.loads(row.pop("text"))}) for row in rows]

    def set(
        self, changes: Mapping[str, object], *, remove: Sequence[str] = (), reason: str, at_step: int | None = None
    ) -> ElasticConfig:
        """Have the next version written."""
        values = {key: json.dumps(value) for key, value in changes.items()}
        request = wire.SetConfigRequest(changes=values, remove=remove, reason=reason, at_step=at_step)
        return ElasticConfig.parse(self._client.set_config(request).text.encode())

    def undo(self) -> ElasticConfig:
        """Have the content before the present one written as a new version."""
        return ElasticConfig.parse(self._client.undo_config().text.encode())

    def taken(self, version: int) -> tuple[int, int] | None:
        """How many nodes hold ``version`` or a later one, and how many there are, once all do or some time is over;
        None where that is not told."""
        deadline = time.monotonic() + _TAKEN_SECONDS
        while True:
            try:
                status = self._client.status(without_workers=True, num_events=1)
            except MasterError:  # the version is written all the same
                return None
            present = [each for each in status.nodes if each.state in ("live", "late")]
            num_holding = sum(each.config_version >= version for each in present)
            if num_holding == len(present) or time.monotonic() >= deadline:
                return num_holding, len(present)
            Event().wait(_LOOK_SECONDS)

    def close(self) -> None:
        self._client.close()
