"""Which part of a checkpoint stands under which key of a torch.distributed.checkpoint folder, and the record by which
such a folder is converted back. Pure.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from elastic_ext.errors import CheckpointDamaged, CheckpointError
from elastic_ext.fsdp.checkpoint.contents import GROUPS, VALUES, FileKind
from elastic_ext.fsdp.checkpoint.folder.commit import Commit
from elastic_ext.fsdp.checkpoint.format.metadata import MOST_RANKS, StateMeta, TensorMeta
from elastic_ext.fsdp.pickled_values import tensors_in
from elastic_ext.records.json import object_of, record_of

__all__ = [
    "EXTRA",
    "METAS",
    "OWN",
    "RECORD",
    "STATE",
    "ConversionRecord",
    "Keys",
    "Leaf",
    "OutTensor",
    "Outgoing",
    "Refusals",
    "joined",
    "leaves_of",
    "owner_and_key",
    "runs_of",
]


# --- what of a checkpoint stands under which key of a torch.distributed.checkpoint folder, and in which pieces -------
# Keys are those of a state dict ``{"model": ..., "optim": ...}``, with what torch's ``get_model_state_dict`` and
# ``get_optimizer_state_dict`` give, flattened as ``dcp.save`` does: ``model.<name>``, ``optim.state.<name>.<key>``,
# ``optim.param_groups.<number>.<key>``. What torch has no place for stands under ``elastic_ext.``.

Leaf: TypeAlias = "tuple[str | int, ...]"
"""The path to a value in nested dicts and lists: keys and numbers, the outermost first."""

OWN = "elastic_ext"
RECORD: Leaf = (OWN, "record")
STATE: Leaf = (OWN, "state")
METAS: Leaf = (OWN, "metas")
EXTRA: Leaf = (OWN, "extra")


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """The keys under which a state dict holds the state dicts of the model and of the optimizers.

    With "" for ``model`` there is no such key: the model's tensors stand at the top level.
    """

    model: str = "model"
    optim: str = "optim"

    def __post_init__(self) -> None:
        is_text = isinstance(self.model, str) and isinstance(self.optim, str)
        if not is_text or not self.optim or self.model == self.optim or OWN in (self.model, self.optim):
            raise ValueError(
                f"model_key is {self.model!r} and optim_key {self.optim!r}; allowed: two different texts, neither of "
                f'them {OWN!r}, of which model_key may be ""'
            )

    def of_model(self, name: str) -> Leaf:
        """The path of a model's tensor or extra state."""
        return (self.model, name) if self.model else (name,)

    def of_state(self, parameter: str, key: str) -> Leaf:
        """The path of a parameter's optimizer state."""
        return (self.optim, "state", parameter, key)

    def of_group(self, number: int, key: str) -> Leaf:
        """The path of a value of an optimizer's parameter group."""
        return (self.optim, "param_groups", number, key)


class Refusals:
    """Collects what cannot be converted, by reason, so that one error tells of all of it."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, reason: str, name: str) -> None:
        """Note that ``name`` cannot be converted; ``reason`` is what it is one of, such as "tensors of <dtype>"."""
        self._names.setdefault(reason, []).append(name)

    def raise_if_any(self, what: object) -> None:
        """CheckpointError with all reasons and names, if anything was refused."""
        if self._names:
            told = "; ".join(f"{reason}: {', '.join(sorted(names))}" for reason, names in self._names.items())
            raise CheckpointError(f"{what} cannot be converted, and nothing was written. {told}")


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A checkpoint's tensor, and all paths under which a DCP folder is to have it."""

    kind: FileKind
    meta: TensorMeta
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A checkpoint as a DCP folder is to hold it, but for the extra states of modules."""

    tensors: Sequence[OutTensor]
    values: Mapping[Leaf, Any] = field(default_factory=dict)
    """Values that are no tensors, packed as the checkpoint has them, by their paths."""

    @classmethod
    def of(
        cls,
        metas: Mapping[FileKind, StateMeta],
        state: Mapping[str, Any],
        *,
        keys: Keys,
        first_names: Collection[str],
        refusals: Refusals,
    ) -> Outgoing:
        """Where in a DCP folder each tensor and value of a checkpoint goes; what cannot go is added to ``refusals``.

        torch keeps the optimizer state of a tied parameter under whichever of its names comes first in the model; a
        checkpoint does not know which does, so ``first_names`` has it.
        """
        model = metas["model"]
        names: dict[str, list[str]] = {name: [name] for name in model.tensors}
        for alias, name in model.aliases.items():
            names[name].append(alias)
        for name in set(first_names).difference(*names.values()):
            refusals.add("names in first_names (--first) that no parameter has", name)
        own = _Names(names, first_names, refusals)
        tensors = [
            OutTensor("model", model.tensors[name], tuple(keys.of_model(one) for one in all_names))
            for name, all_names in names.items()
        ]
        for name, meta in metas["optim"].tensors.items():
            leaf = own.state_leaf(name, keys)
            if meta.kind == "opaque":
                refusals.add("optimizer state that is bound to the sharding in which it was saved", name)
            elif leaf is not None:
                tensors.append(OutTensor("optim", meta, (leaf,)))
        tensors += [OutTensor("extra", meta, ((*EXTRA, name),)) for name, meta in metas["extra"].tensors.items()]
        values = {}
        for name, value in state[VALUES].items():
            leaf = own.state_leaf(name, keys)
            if tensors_in(value):
                refusals.add("optimizer state that is a list of tensors, or the like", name)
            elif leaf is not None:
                values[leaf] = value
        groups = itertools.chain.from_iterable(optimizer["groups"] for optimizer in state[GROUPS])
        for number, group in enumerate(groups):
            for key, value in group["values"].items():
                values[keys.of_group(number, key)] = value
            values[keys.of_group(number, "params")] = [own.first(name) for name in group["params"]]
        return cls(tensors, values)


class _Names:
    """The names that torch has for parameters in optimizer state, where a tied parameter has several."""

    def __init__(self, names: Mapping[str, Sequence[str]], first_names: Collection[str], refusals: Refusals) -> None:
        self._names = names
        self._first_names = first_names
        self._refusals = refusals
        self._refused: set[str] = set()

    def first(self, own: str) -> str:
        names = self._names.get(own, [own])
        if len(names) == 1:
            return own
        chosen = [name for name in names if name in self._first_names]
        if len(chosen) != 1 and own not in self._refused:
            self._refused.add(own)
            self._refusals.add(
                "trained parameters with several names, of which exactly one is to be in first_names (--first), the "
                "one that model.named_parameters() has",
                " = ".join(sorted(names)),
            )
        return chosen[0] if chosen else own

    def state_leaf(self, name: str, keys: Keys) -> Leaf | None:
        found = owner_and_key(name, self._names, "/")
        if found is None:
            self._refusals.add("optimizer state of parameters that the model does not have", name)
            return None
        return keys.of_state(self.first(found[0]), found[1])


def owner_and_key(name: str, parameters: Collection[str], separator: str) -> tuple[str, str] | None:
    """A name of optimizer state, split into its parameter, the longest that fits, and its key; None if none fits."""
    cut = len(name)
    while (cut := name.rfind(separator, 0, cut)) >= 0:
        if name[:cut] in parameters:
            return name[:cut], name[cut + len(separator) :]
    return None


def joined(leaf: Leaf) -> str:
    """The key that ``dcp.save`` gives a value at a path: its parts, joined by dots."""
    return ".".join(map(str, leaf))


def leaves_of(leaf: Leaf, value: object) -> Iterator[tuple[Leaf, object]]:
    """The values that ``dcp.save`` makes of one, with paths: it goes into dicts, and into lists that have dicts."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves_of((*leaf, str(key)), inner)
    elif isinstance(value, list) and not _is_flat(value):
        for number, inner in enumerate(value):
            yield from leaves_of((*leaf, number), inner)
    else:
        yield leaf, value


def _is_flat(values: Sequence[object]) -> bool:
    return not any(isinstance(each, Mapping) or (isinstance(each, list) and not _is_flat(each)) for each in values)


def runs_of(shape: Sequence[int], most_elements: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A tensor cut into blocks of at most so many elements, each (offsets, sizes) and one run of elements, in order."""
    size = math.prod(shape)
    if size <= most_elements or not shape:
        yield (0,) * len(shape), tuple(shape)
        return
    inner = math.prod(shape[1:])
    if inner <= most_elements:
        step = most_elements // inner
        for row in range(0, shape[0], step):
            yield (row, *[0] * (len(shape) - 1)), (min(step, shape[0] - row), *shape[1:])
        return
    for row in range(shape[0]):
        for offsets, sizes in runs_of(shape[1:], most_elements):
            yield (row, *offsets), (1, *sizes)


# --- what a converted checkpoint has to say of itself, so that the folder of DCP's can be converted back -------------

_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionRecord:
    """What a DCP folder keeps of a converted checkpoint's COMMIT, and how it was converted, to convert it back."""

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
    def of(cls, commit: Commit, keys: Keys, first_names: Collection[str]) -> ConversionRecord:
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
    def from_json(cls, data: bytes, *, where: str) -> ConversionRecord:
        """The record that ``to_json`` gave; CheckpointDamaged, naming ``where``, where it cannot be one."""
        try:
            said = object_of(data.decode())
            number = said.get("format")
            if type(number) is int and number != _FORMAT:
                raise CheckpointError(
                    f"{where} was converted in format {number}, and this elastic_ext reads format {_FORMAT}; use the "
                    "elastic_ext that has converted it"
                )
            record = record_of(cls, said)
        except ValueError as error:
            raise CheckpointDamaged(f"{where} does not say what was converted: {error}") from None
        if not 1 <= record.num_ranks <= MOST_RANKS or record.global_step < 0 or record.epoch < 0:
            raise CheckpointDamaged(
                f"{where} tells of step {record.global_step}, epoch {record.epoch} and {record.num_ranks} ranks; "
                f"allowed: from 0 on, and 1 to {MOST_RANKS} ranks"
            )
        return record
