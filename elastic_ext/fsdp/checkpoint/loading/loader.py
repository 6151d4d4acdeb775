"""A checkpoint put into a model and its optimizers on one rank, and compared with what a rank holds."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elastic_ext.errors import CheckpointMismatch
from elastic_ext.fsdp.checkpoint.contents import (
    EXTRA_STATES,
    GROUPS,
    VALUES,
    Contents,
    FileKind,
    own_prefix,
    own_registered_prefix,
)
from elastic_ext.fsdp.checkpoint.format.metadata import TensorMeta
from elastic_ext.fsdp.checkpoint.format.tensor_bytes import bytes_of, part_of
from elastic_ext.fsdp.optimizers import (
    are_same_kinds,
    held_of_optimizers,
    make_missing,
    matching_groups,
    put_groups,
    put_values,
)
from elastic_ext.fsdp.pickled_values import tensors_in
from elastic_ext.fsdp.state import (
    LocalShard,
    Trained,
    by_name_of,
    extra_states,
    held_of_model,
    place_of,
    put_extra_states,
    trained_by,
)
from elastic_ext.fsdp.value_encoding import name_of, unpack

from .source import Opened, Wanted

__all__ = ["Loader", "first_change"]


# --- puts an opened checkpoint into a model and its optimizers, on one rank ------------------------------------------
# First everything is compared, by names and shapes, so that nothing is touched where something does not fit.

_OPTIMIZERS = "the optimizers' state and the checkpoint's do not go together"
_GROUPS = "values of optimizers' groups"  # as ``Opened.touched`` has them
_STATES = "optimizers' state"
_STATE = "optimizer state "
_OF_MODULE = "extra state "


class Loader:
    """Loads a checkpoint into a model and its optimizers on one rank, between two steps.

    ``check`` tells what does not fit, and changes nothing. The loads put in what fits, and leave the rest as it is.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], *, rank: int, num_ranks: int) -> None:
        self._model = model
        self._optimizers = optimizers
        self._rank, self._num_ranks = rank, num_ranks
        of_model = held_of_model(model)
        self._held = of_model.tensors
        self._parameters = of_model.parameters if optimizers else []
        self._by_name = by_name_of(trained_by(optimizers, self._parameters))

    def check(self, opened: Opened) -> None:
        """CheckpointMismatch, with all names, where the checkpoint's tensors are not the model's and optimizers'."""
        _, missing, misshaped = _fit(opened, "model", self._held)
        own = {each.name for each in self._held}
        meta = opened.metas["model"]
        known = {name for name in meta.tensors if name in own}
        known |= {meta.aliases[name] for name in own & meta.aliases.keys()}
        extra = sorted(meta.tensors.keys() - known)
        states, saved = extra_states(self._model).keys(), opened.state.get(EXTRA_STATES, {}).keys()
        missing += sorted(states - saved)
        extra += sorted(saved - states)
        if missing or extra or misshaped:
            what = "the model and the checkpoint do not go together"
            raise CheckpointMismatch(what, missing=missing, extra=extra, misshaped=misshaped)
        if self._optimizers:
            self._check_optimizers(opened)

    def load_model(self, opened: Opened) -> None:
        """Put the saved parameters and buffers in place.

        Where buffers differed between ranks, a rank gets its own if there are as many ranks as there were, else the
        first rank's.
        """
        whole = [name for name in opened.names("extra") if name.startswith(f"{EXTRA_STATES}/")]
        tensors = {name: opened.read_whole("extra", name) for name in whole}  # first: damage has then touched nothing
        opened.read("model", self._fit_of_model(opened))
        if self._num_ranks == opened.num_ranks:
            names = {each.name: f"{own_prefix(self._rank)}{each.name}" for each in self._held}
            kept = [each for each in self._held if opened.tensor("extra", names[each.name]) is not None]
            opened.read("extra", [Wanted(names[each.name], each.tensor, each.box, _what(each)) for each in kept])
        packed = opened.state.get(EXTRA_STATES, {})
        opened.touched |= {_OF_MODULE + name for name in packed}
        put_extra_states(self._model, {name: unpack(value, tensors) for name, value in packed.items()})

    def load_optimizers(self, opened: Opened) -> None:
        """Put the saved optimizer state and the groups' values in place; state is made where an optimizer has none.

        State that is made has the dtype that was saved, or its parameter's where it had that of its parameter. State of
        the kind `opaque` is loaded only by as many ranks as have saved it.
        """
        optimizers, parameters, by_name = self._optimizers, self._parameters, self._by_name
        if not are_same_kinds(optimizers, opened.state[GROUPS]):  # nothing of it means the same here
            return
        saved, values = self._state_that_fits(opened)
        opened.touched |= {_STATES, _GROUPS} | {_STATE + name for name in {*saved, *values}}
        with contextlib.suppress(CheckpointMismatch):
            put_groups(optimizers, parameters, opened.state[GROUPS])
        in_lists = _in_lists(values)
        make_missing(
            optimizers,
            parameters,
            {name: meta for name, meta in saved.items() if name not in in_lists},
            rank=self._rank,
        )
        put_values(optimizers, parameters, values, saved)
        _drop_unsaved({*saved, *values}, by_name)
        held = held_of_optimizers(optimizers, parameters, rank=self._rank).tensors
        opened.read("optim", _fit(opened, "optim", held)[0])

    def refilled(self, opened: Opened, touched: Collection[str]) -> set[str]:
        """The names in ``touched``, all that a damaged checkpoint has changed, which loading this one overwrites."""
        filled = {each.what for each in self._fit_of_model(opened) if each.what is not None}
        filled |= {_OF_MODULE + name for name in opened.state.get(EXTRA_STATES, {})}
        if self._optimizers and are_same_kinds(self._optimizers, opened.state[GROUPS]):
            filled.add(_STATES)
            with contextlib.suppress(CheckpointMismatch):
                matching_groups(self._optimizers, self._parameters, opened.state[GROUPS])
                filled.add(_GROUPS)
            tensors, values = self._state_that_fits(opened)
            names = {*tensors, *values}
            owners = {_owner(name, self._by_name) for name in names}
            dropped = {
                name
                for name in _names_after(_STATE, touched)
                if _owner(name, self._by_name) not in owners or any(name.startswith(f"{value}/") for value in values)
            }  # a list is another one, however long it was
            filled |= {_STATE + name for name in names | dropped}
        return filled & set(touched)

    def _fit_of_model(self, opened: Opened) -> list[Wanted]:
        return _fit(opened, "model", self._held)[0]

    def _state_that_fits(self, opened: Opened) -> tuple[dict[str, TensorMeta], dict[str, Any]]:
        """The saved tensors and values of optimizer state that fit the optimizers here, by name."""
        by_name = self._by_name
        odd = {each.parameter.name for each in _misshaped(opened, by_name).values()}
        tensors = {
            name: _as_here(opened, meta, by_name)
            for name, meta in opened.metas["optim"].tensors.items()
            if _owner(name, by_name) not in odd and (meta.kind != "opaque" or self._num_ranks == opened.num_ranks)
        }
        values = {name: value for name, value in opened.state[VALUES].items() if _owner(name, by_name) not in odd}
        return tensors, values

    def _check_optimizers(self, opened: Opened) -> None:
        saved = opened.metas["optim"].tensors
        bound = sorted(name for name, meta in saved.items() if meta.kind == "opaque")
        if bound and self._num_ranks != opened.num_ranks:
            raise CheckpointMismatch(
                f"{_OPTIMIZERS}: some of it is bound to how {opened.num_ranks} ranks held it, and this job has "
                f"{self._num_ranks}; load the checkpoint on {opened.num_ranks} ranks",
                extra=bound,
            )
        matching_groups(self._optimizers, self._parameters, opened.state[GROUPS])
        by_name = self._by_name
        names = {*saved, *opened.state[VALUES]}
        extra = sorted(name for name in names if _owner(name, by_name) is None)
        filled = {_owner(name, by_name) for name in names}
        held = held_of_optimizers(self._optimizers, self._parameters, rank=self._rank)
        known = {*names, *_in_lists(held.values)}  # lists may have been of any length
        missing = [
            each.name for each in held.tensors if each.name not in known and _owner(each.name, by_name) in filled
        ]
        misshaped = {
            name: f"{each.parameter.box.shape} here, {saved[name].layout.shape} in the checkpoint"
            for name, each in _misshaped(opened, by_name).items()
        }
        if missing or extra or misshaped:
            raise CheckpointMismatch(_OPTIMIZERS, missing=missing, extra=extra, misshaped=misshaped)


def _in_lists(values: Mapping[str, Any]) -> set[str]:
    """The names of tensors that are parts of plain values, such as lists of tensors."""
    return {name for value in values.values() for name in tensors_in(value)}


def _owner(name: str, by_name: Mapping[str, Trained]) -> str | None:
    """The name of the parameter that a state's name belongs to, None where there is none here."""
    place = place_of(name, by_name)
    return None if place is None else place[0].parameter.name


def _as_here(opened: Opened, meta: TensorMeta, by_name: Mapping[str, Trained]) -> TensorMeta:
    """Metadata of saved optimizer state, with its parameter's dtype here if it was saved with its parameter's."""
    owner = _owner(meta.name, by_name)
    then = None if owner is None or meta.kind == "scalar" else opened.tensor("model", owner)
    now = None if owner is None else name_of(by_name[owner].parameter.tensor.dtype)
    return meta if then is None or now is None or then.dtype != meta.dtype else replace(meta, dtype=now)


def _misshaped(opened: Opened, by_name: Mapping[str, Trained]) -> dict[str, Trained]:
    """By the name of a saved state whose parameter has another shape here: that parameter."""
    found = {}
    for name, meta in opened.metas["optim"].tensors.items():
        place = place_of(name, by_name)
        if place is not None and meta.kind == "like" and place[0].parameter.box.shape != meta.layout.shape:
            found[name] = place[0]
    return found


def _fit(opened: Opened, kind: FileKind, held: Sequence[LocalShard]) -> tuple[list[Wanted], list[str], dict[str, str]]:
    """How the tensors ``held`` here fit the saved ones, by any of their names: those to fill; the names of those that
    were not saved; and of those with another shape, with both shapes."""
    names: dict[str, list[str]] = {each.name: [each.name] for each in held if each.is_alias_of is None}
    for each in held:
        if each.is_alias_of is not None:
            names[each.is_alias_of].append(each.name)
    wanted, missing, misshaped = [], [], {}
    for each in held:
        if each.is_alias_of is not None:
            continue
        name = next((name for name in names[each.name] if opened.tensor(kind, name) is not None), None)
        meta = None if name is None else opened.tensor(kind, name)
        if name is None or meta is None:
            missing.append(each.name)
        elif meta.layout.shape != each.box.shape:
            misshaped[each.name] = f"{each.box.shape} here, {meta.layout.shape} in the checkpoint"
        else:
            wanted.append(Wanted(name, each.tensor, each.box, _what(each)))
    return wanted, sorted(missing), misshaped


def _what(held: LocalShard) -> str:
    """The words for a tensor in ``Opened.touched``."""
    return f"{held.kind} {held.name}" if held.kind in ("parameter", "buffer") else _STATE + held.name


def _names_after(prefix: str, whats: Collection[str]) -> set[str]:
    return {what.removeprefix(prefix) for what in whats if what.startswith(prefix)}


def _drop_unsaved(names: Iterable[str], by_name: Mapping[str, Trained]) -> None:
    """Remove the state of parameters that had none when saved: an optimizer's first step for them is to come."""
    saved = {_owner(name, by_name) for name in names}
    for name, each in by_name.items():
        if name not in saved:  # not even an empty one, which an optimizer may take for a state that it has made
            each.optimizer.state.pop(each.parameter.tensor, None)


# --- whether a rank still holds, bit for bit, what a checkpoint has of it --------------------------------------------

_OF_THE_FIRST = frozenset({"buffer", "scalar"})  # kinds that the first rank alone has saved


def first_change(opened: Opened, contents: Contents, *, rank: int, passes_over: tuple[str, ...]) -> str | None:
    """The name of something in ``contents`` that differs from the checkpoint, None where nothing does.

    One tensor at a time is in memory twice. ``passes_over`` are prefixes of the names of tensors, and of the keys of
    plain values, that are not compared.
    """
    saved, state, values = opened.state, _as_json(contents.state), _as_json(contents.values)
    changed = [f"optimizer state {name}" for name, value in values.items() if value != saved[VALUES].get(name)]
    if rank == 0:
        changed += [key for key, value in state.items() if value != saved.get(key) and not key.startswith(passes_over)]
    if changed:
        return changed[0]
    for kind, held in contents.by_kind():
        for each in held:
            is_anothers = each.is_alias_of is not None or (rank > 0 and each.kind in _OF_THE_FIRST)
            if not (is_anothers or each.name.startswith(passes_over) or _is_saved(opened, kind, each)):
                return each.name
    here = {each.name for each in contents.extra}
    own = own_prefix(rank), own_registered_prefix(rank)
    return min((name for name in opened.names("extra") - here if name.startswith(own)), default=None)  # alike by now


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(values))
    return result


def _is_saved(opened: Opened, kind: FileKind, held: LocalShard) -> bool:
    meta = opened.tensor(kind, held.name)
    if meta is None or meta.layout.shape != held.box.shape or meta.dtype != held.dtype:
        return False
    copy = torch.empty(held.box.num_elements, dtype=held.tensor.dtype, device="cpu")
    opened.read(kind, [Wanted(held.name, copy, held.box)])
    return bytes_of(copy) == part_of(held.tensor, held.box, held.box)
