"""Record: what a converted checkpoint has to say of itself, so that the folder of DCP's can be converted back."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elastic_ext.errors import CheckpointDamaged, CheckpointError
from elastic_ext.records.json import object_of, record_of

from .commit import Commit
from .dcpplan import Keys
from .meta import MOST_RANKS

__all__ = ["Record"]

_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Of the checkpoint, what stands in its COMMIT; and how it was converted."""

    global_step: int
    epoch: int
    num_ranks: int
    versions: Mapping[str, str]
    about: Mapping[str, Any]
    model_key: str
    optim_key: str
    first_names: tuple[str, ...]
    format: int = _FORMAT

    @classmethod
    def of(cls, commit: Commit, keys: Keys, first_names: Collection[str]) -> Record:
        return cls(
            global_step=commit.global_step,
            epoch=commit.epoch,
            num_ranks=commit.num_ranks,
            versions=commit.versions,
            about=commit.about,
            model_key=keys.model,
            optim_key=keys.optim,
            first_names=tuple(sorted(first_names)),
        )

    @property
    def keys(self) -> Keys:
        return Keys(model=self.model_key, optim=self.optim_key)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), allow_nan=False).encode()

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> Record:
        """What ``to_json`` gave; CheckpointDamaged, naming ``where``, where it cannot be."""
        try:
            said = object_of(data.decode())
            number = said.get("format")
            if type(number) is int and number != _FORMAT:
                raise CheckpointError(f"{where} was converted in format {number}; this version reads {_FORMAT}")
            record = record_of(cls, said)
        except ValueError as error:
            raise CheckpointDamaged(f"{where} does not say what was converted: {error}") from None
        if not 1 <= record.num_ranks <= MOST_RANKS or record.global_step < 0 or record.epoch < 0:
            raise CheckpointDamaged(
                f"{where} tells of step {record.global_step}, epoch {record.epoch} and {record.num_ranks} ranks; "
                f"allowed: from 0 on, and 1 to {MOST_RANKS} ranks"
            )
        return record
