"""COMMIT, the file that makes a checkpoint exist, and the line of runs that a checkpoint comes from."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, TypeAlias

import xxhash

from elastic_ext.errors import CheckpointDamaged, CheckpointNotFound
from elastic_ext.fsdp.checkpoint.format.json_text import unknown_format
from elastic_ext.fsdp.checkpoint.format.shardfile import ShardSummary
from elastic_ext.records.files import NotRegularError, look_afresh, naming, open_regular, read_at_most
from elastic_ext.records.json import object_of

__all__ = [
    "COMMIT",
    "FORMAT",
    "Chain",
    "Commit",
    "FileSummary",
    "Lineage",
    "chain_after",
    "check_chain",
    "check_id",
    "checksum_of",
    "place_in",
    "read_checked",
    "read_commit",
    "read_in_pieces",
]


# --- the runs that a checkpoint comes from, and whether another checkpoint lies on the same line ---------------------
# run       one life of a job's processes, from start to end; it has an id of its own
# chain     the runs that lead to a state of training: each but the first went on from a checkpoint of the one before it
# abandoned what a run saved after the point from which a later run went on, where that point was not its last

_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """One run of a chain, and the checkpoint of the run before it from which it went on."""

    id: str
    from_step: int = 0
    """The global step of the checkpoint from which the run went on; 0 for a run that began from nothing."""
    from_generation: str | None = None
    """The generation of the checkpoint from which the run went on; None for a run that began from nothing."""

    def __post_init__(self) -> None:
        check_id("a run's id", self.id)
        if type(self.from_step) is not int or self.from_step < 0:
            raise ValueError(f"from_step of run {self.id} is {self.from_step!r}; allowed: an integer >= 0")
        if self.from_generation is not None:
            check_id(f"from_generation of run {self.id}", self.from_generation)


Chain: TypeAlias = tuple[Lineage, ...]


def check_id(what: str, given: object) -> None:
    """ValueError unless ``given`` may be an id of a run or a save: short, and fit for any file's name."""
    if not isinstance(given, str) or _ID.fullmatch(given) is None:
        raise ValueError(f"{what} is {str(given)[:80]!r}; allowed: 1 to 64 of the characters 0-9 A-Z a-z _ -")


def check_chain(chain: Sequence[Lineage]) -> None:
    """ValueError unless ``chain`` holds a run, each once, and each went on from where the one before had come."""
    if not chain:
        raise ValueError("a lineage holds no run; allowed: at least the one that saves")
    if len({one.id for one in chain}) < len(chain):
        raise ValueError(f"a lineage holds a run twice: {', '.join(one.id for one in chain)}; allowed: each run once")
    for parent, child in itertools.pairwise(chain):
        if child.from_step < parent.from_step:
            raise ValueError(
                f"run {child.id} goes on from step {child.from_step} of run {parent.id}, which began at step "
                f"{parent.from_step}; allowed: a step not before that"
            )


def place_in(chain: Sequence[Lineage], *, run_id: str, global_step: int) -> int | None:
    """The index of run ``run_id`` in ``chain``; None where it is not there, or was left before ``global_step``."""
    for place, one in enumerate(chain):
        if one.id == run_id:
            is_last = place + 1 == len(chain)
            return place if is_last or global_step <= chain[place + 1].from_step else None
    return None


# --- what makes a checkpoint exist, and what has to be known to trust its other files --------------------------------
# The file COMMIT is JSON. Its last key is the xxh3_128 of everything before that key, so that no bit of it can change
# unseen; through the checksums in it the same goes for every other file of the checkpoint.

COMMIT = "COMMIT"
FORMAT = 1
_MOST_BYTES = 1 << 28
_PIECE_BYTES = 1 << 20
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_SEAL = re.compile(rb',\n "checksum": "([0-9a-f]{32})"\n}\n')
_SEAL_BYTES = len(b',\n "checksum": ""\n}\n') + 32
_FILE = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,199}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSummary:
    """The size and checksum by which a file is trusted that is checked as a whole, such as one of plain values."""

    num_bytes: int
    checksum: str  # xxh3_128, in hex, of all its contents


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The contents of COMMIT: where training stood at a checkpoint, which runs led there, and its files."""

    generation: str
    """The random id of this one save; every shard file has it too."""
    lineage: Chain
    """The runs that led to the checkpoint, last the one that saved it."""
    global_step: int
    epoch: int
    num_ranks: int
    """How many ranks wrote the checkpoint."""
    metas: Mapping[str, str]
    """Files of tensors' metadata, with the checksum of their contents, by which the job's folder names them too."""
    states: Mapping[str, FileSummary]
    """Files of plain values, with their sizes and checksums."""
    shards: Mapping[str, ShardSummary]
    """Shard files, with their sizes and checksums."""
    saved_at: str
    """When the checkpoint was saved: ISO 8601, by the clock of the rank that committed."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions of python, torch and elastic_ext that saved the checkpoint, by name."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """JSON that whoever resumes from the checkpoint is told of the run that saved it."""

    @property
    def saved_seconds(self) -> float:
        """When the checkpoint was saved, in seconds since 1970."""
        saved = datetime.fromisoformat(self.saved_at)
        return (saved if saved.tzinfo else saved.replace(tzinfo=timezone.utc)).timestamp()

    def __post_init__(self) -> None:
        check_id("generation", self.generation)
        check_chain(self.lineage)
        for name, least in (("global_step", self.lineage[-1].from_step), ("epoch", 0), ("num_ranks", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}; allowed: an integer >= {least}")
        names = [*self.metas, *self.states, *self.shards]
        for file in names:
            if _FILE.fullmatch(file) is None or file == COMMIT:
                raise ValueError(
                    f"a file is named {file[:80]!r}; allowed: letters, digits, '.', '_' and '-', not COMMIT"
                )
        if len(set(names)) < len(names):
            raise ValueError("a file is named twice; allowed: each once among metas, states and shards")
        for file, num_bytes in self.sizes().items():
            if type(num_bytes) is not int or num_bytes < 0:
                raise ValueError(f"num_bytes of {file} is {num_bytes!r}; allowed: an integer >= 0")
        summaries: list[FileSummary | ShardSummary] = [*self.states.values(), *self.shards.values()]
        for checksum in [*self.metas.values(), *(summary.checksum for summary in summaries)]:
            _check_checksum(checksum)
        datetime.fromisoformat(self.saved_at)
        for name, version in self.versions.items():
            if not isinstance(version, str):
                raise ValueError(f"the version of {name} is {version!r}; allowed: text")

    @property
    def run_id(self) -> str:
        """The id of the run that saved the checkpoint."""
        return self.lineage[-1].id

    def sizes(self) -> dict[str, int]:
        """How many bytes each file of the checkpoint has, by name; files in ``metas`` are left out."""
        states = {file: summary.num_bytes for file, summary in self.states.items()}
        return states | {file: summary.num_bytes for file, summary in self.shards.items()}

    def to_json(self) -> bytes:
        """The contents of the file COMMIT; TypeError or ValueError if ``about`` is not JSON."""
        record = {"format": FORMAT, **asdict(self)}
        body = json.dumps(record, indent=1, ensure_ascii=True, allow_nan=False).encode()
        body = body[: -len(b"\n}")]
        return body + b',\n "checksum": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> Commit:
        """The commit that ``to_json`` gave; CheckpointDamaged, naming ``where``, if one bit is another."""
        seal = _SEAL.fullmatch(data, max(0, len(data) - _SEAL_BYTES))
        if seal is None:
            raise CheckpointDamaged(
                f"{where} does not end as a COMMIT does: cut off, or damaged at its end ({len(data)} bytes)"
            )
        if xxhash.xxh3_128_hexdigest(data[: seal.start()]).encode() != seal.group(1):
            raise CheckpointDamaged(f"{where} does not match its own checksum: its contents were changed or damaged")
        try:
            record = object_of(data, once_each=True)
            number = record.pop("format", None)
            if type(number) is int and number > FORMAT:
                raise unknown_format(where, number, FORMAT, record.get("versions"))
            if number != FORMAT:
                raise ValueError(f"format is {number!r}; allowed: {FORMAT}")
            return _commit_of(record)
        except ValueError as error:
            raise CheckpointDamaged(f"{where} is no COMMIT: {error}") from None


def chain_after(commit: Commit | None, *, run_id: str) -> Chain:
    """The chain of a run that goes on from ``commit``, or that begins from nothing."""
    if commit is None:
        return (Lineage(id=run_id),)
    return (
        *commit.lineage,
        Lineage(id=run_id, from_step=commit.global_step, from_generation=commit.generation),
    )


def read_commit(folder: Path) -> Commit:
    """The contents of the file COMMIT in a checkpoint's ``folder``, by which the checkpoint exists.

    CheckpointNotFound where there is none, CheckpointDamaged where it cannot be trusted, CheckpointError where a newer
    library wrote it; OSError is the file system's own, and says nothing of the checkpoint.
    """
    path = folder / COMMIT
    try:
        data = read_at_most(path, _MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(f"{folder} holds no {COMMIT}: no checkpoint was completed there") from None
    except NotRegularError as error:
        raise CheckpointDamaged(f"{error}, as a {COMMIT} is") from None
    if len(data) > _MOST_BYTES:
        raise CheckpointDamaged(f"{path} is larger than any {COMMIT} can be ({_MOST_BYTES} bytes)")
    return Commit.from_json(data, where=str(path))


def checksum_of(data: bytes) -> str:
    """The xxh3_128 of ``data`` in hex, as it stands in COMMIT for whole files."""
    return xxhash.xxh3_128_hexdigest(data)


def read_checked(path: Path, checksum: str) -> bytes:
    """The contents of a file that is checked as a whole; CheckpointDamaged where they are missing or others."""
    with naming(path), _opened(path) as file:
        data = file.read(_MOST_BYTES + 1)
    _check(path, checksum_of(data), checksum)
    return data


def read_in_pieces(path: Path, checksum: str) -> Iterator[bytes]:
    """The contents of a file that is checked as a whole, in pieces; it is read twice, first to check it.

    CheckpointDamaged comes before the first piece.
    """

    def read() -> bytes:
        with naming(path):
            return file.read(_PIECE_BYTES)

    with _opened(path) as file:
        found = xxhash.xxh3_128()
        while piece := read():
            found.update(piece)
        _check(path, found.hexdigest(), checksum)
        file.seek(0)
        while piece := read():
            yield piece


def _opened(path: Path) -> IO[bytes]:
    """A file that COMMIT names, opened; CheckpointDamaged where it is missing or is no regular file."""
    try:
        try:
            return open_regular(path)
        except FileNotFoundError:  # or not known here yet
            look_afresh(path.parent)
            return open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointDamaged(f"{path} is missing, and {COMMIT} names it") from None
    except NotRegularError as error:
        raise CheckpointDamaged(f"{error}, and {COMMIT} names it") from None


def _check(path: Path, found: str, checksum: str) -> None:
    if found != checksum:
        raise CheckpointDamaged(f"{path} is not what was saved: its checksum is {found}, and {COMMIT} says {checksum}")


def _check_checksum(checksum: object) -> None:
    if not isinstance(checksum, str) or _CHECKSUM.fullmatch(checksum) is None:
        raise ValueError(f"a checksum is {str(checksum)[:80]!r}; allowed: 32 hexadecimal digits")


def _as_record(what: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {str(value)[:80]!r}; allowed: an object")
    return value


def _commit_of(record: dict[str, Any]) -> Commit:
    """The commit in a JSON object; unknown keys are refused, unlike by ``record_of``: all of the file is understood."""
    del record["checksum"]
    lineage = record.pop("lineage", None)
    if not isinstance(lineage, list):
        raise ValueError(f"lineage is {str(lineage)[:80]!r}; allowed: a list")
    for name in ("metas", "states", "shards", "versions", "about"):
        _as_record(name, record.get(name))
    if not isinstance(record.get("saved_at"), str):
        raise ValueError("saved_at is no text; allowed: a time as in ISO 8601")
    try:
        return Commit(
            lineage=tuple(Lineage(**_as_record("a run of lineage", one)) for one in lineage),
            states={name: FileSummary(**_as_record(name, one)) for name, one in record.pop("states").items()},
            shards={name: ShardSummary(**_as_record(name, one)) for name, one in record.pop("shards").items()},
            **record,
        )
    except TypeError as error:  # keys that are missing or unknown
        raise ValueError(str(error)) from None
