"""Units, which fully_shard gathers at once: what is known of a model's units, and which units a plan asks for.

Words: a *unit* is what one call of fully_shard made, some modules whose parameters are gathered together. A *place* is
a module and the name that it has a parameter under; tied parameters have several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from elastic_ext.fsdp.plan import ParallelPlan, units_of_blocks

__all__ = [
    "Ahead",
    "EarlierUnits",
    "Modules",
    "ParameterSlot",
    "Place",
    "Survey",
    "Unit",
    "UnitSettings",
    "modules_by_unit",
    "prefetching",
    "units_for",
]

Place: TypeAlias = tuple[nn.Module, str]

Modules: TypeAlias = tuple[nn.Module, ...]
"""The modules of one unit, in order."""


Ahead: TypeAlias = Mapping[nn.Module, tuple[frozenset[int], frozenset[int]]]
"""The hooks of a module that are called before those of fully_shard, by number: ahead of a pass, and after it."""


@dataclass(frozen=True)
class UnitSettings:
    """Settings of an FSDP unit that users may make besides its plan."""

    divide_factor: float | None = None
    """What gradients are divided by; None: as fully_shard does by itself."""
    sums_only: bool = False
    """Whether collectives only sum gradients, which are scaled separately."""
    shares_unused: bool = False
    """Whether gradients of unused parameters are shared too."""
    reshards_after_backward: bool = True
    """Whether gathered parameters are given back after the backward pass."""
    num_scatter_buffers: int = 1
    """How many units' gradients may be on their way at once."""


@dataclass(frozen=True, eq=False)
class Unit:
    """The modules that one call of fully_shard has made a unit of, and what is set on it."""

    modules: Modules
    mesh: DeviceMesh | None
    """The mesh over which the unit's parameters are sharded; None where it has none of its own."""
    reshard_after_forward: bool | int | None
    """Whether the unit is resharded after a forward pass; None: all but the outermost are, as by torch itself."""
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    settings: UnitSettings
    forward_prefetch: tuple[Modules, ...]
    """The units that this one has gathered ahead in the forward pass, by their modules."""
    backward_prefetch: tuple[Modules, ...]


@dataclass(frozen=True, eq=False)
class ParameterSlot:
    """Where fully_shard keeps one parameter: its own object for it, and the modules that have the parameter."""

    parameter: nn.Parameter
    places: tuple[Place, ...]
    keeper: Any
    """fully_shard's private object for the parameter."""


@dataclass(frozen=True, eq=False)
class Survey:
    """All that fully_shard has made of a model."""

    units: tuple[Unit, ...]
    """The units of the model, innermost first, so that they can be made again in this order."""
    slots: tuple[ParameterSlot, ...]
    ahead: Ahead
    """The hooks that are called before fully_shard's, for each module that fully_shard has put hooks on."""


@dataclass(frozen=True, eq=False)
class EarlierUnits:
    """The units of an earlier plan, for the settings on them that no plan says, such as those that a user has made."""

    plan: ParallelPlan
    units: tuple[Unit, ...]


def modules_by_unit(
    plan: ParallelPlan, root: nn.Module, blocks: Sequence[nn.Module], survey: Survey | None
) -> list[Modules]:
    """The modules of each unit of a plan, innermost first; the outermost keeps the modules that it has."""
    outer = [] if survey is None else [unit.modules for unit in survey.units if root in unit.modules]
    inner = [tuple(blocks[at] for at in unit) for unit in units_of_blocks(len(blocks), plan.unit)]
    return [*inner, outer[0] if outer else (root,)]


def units_for(
    plan: ParallelPlan, groups: Sequence[Modules], survey: Survey | None, earlier: EarlierUnits | None = None
) -> list[Unit]:
    """The units that fully_shard is to make of these modules; ValueError where it is not clear what to set on them."""
    like = _like(survey)
    keeps = None if plan.reshards_after_forward else False
    units = [replace(like(modules), modules=modules, mesh=None, reshard_after_forward=keeps) for modules in groups]
    if earlier is not None and plan.reshards_after_forward and earlier.plan.reshards_after_forward:
        units = _resharding(units, earlier)
    if earlier is not None and plan.prefetch is None and earlier.plan.prefetch is None:
        return _gathering(units, earlier)
    return prefetching(units, plan.prefetch)


def prefetching(units: Sequence[Unit], depth: int | None) -> list[Unit]:
    """These units with ``depth`` others gathered ahead by each; as torch does by itself where ``depth`` is None."""
    *inner, outermost = units
    chosen: list[Unit] = []
    for at, unit in enumerate(inner):
        if depth is None:
            chosen.append(replace(unit, forward_prefetch=(), backward_prefetch=()))
            continue
        ahead = tuple(other.modules for other in inner[at + 1 : at + 1 + depth])
        behind = tuple(other.modules for other in reversed(inner[max(0, at - depth) : at]))
        # One that names itself gathers nothing ahead; an empty list would leave it to torch.
        chosen.append(replace(unit, forward_prefetch=ahead, backward_prefetch=behind or (unit.modules,)))
    first = tuple(unit.modules for unit in inner[: depth or 0])
    last = tuple(unit.modules for unit in reversed(inner[len(inner) - (depth or 0) :]))
    back = () if depth is None else last or (outermost.modules,)
    return [*chosen, replace(outermost, forward_prefetch=first, backward_prefetch=back)]


def _resharding(units: Sequence[Unit], earlier: EarlierUnits) -> list[Unit]:
    """Units that keep what they gather for the backward pass where the user had it so.

    ValueError where a unit of these is not there any more.
    """
    *inner, outermost = units
    by_modules = {unit.modules: unit.reshard_after_forward for unit in earlier.units}
    within = {part for unit in inner for module in unit.modules for part in module.modules()}
    kept = {unit.modules for unit in inner} | {outermost.modules}
    for unit in earlier.units:
        if unit.reshard_after_forward is False and unit.modules not in kept and within & {*unit.modules}:
            raise ValueError(
                "some units were told reshard_after_forward=False and others were not, and the plan makes other units; "
                "keep their number of blocks (unit), call model.set_reshard_after_forward() for all of them alike, or "
                'choose the strategy "shard_grad_op"'
            )
    return [replace(unit, reshard_after_forward=by_modules.get(unit.modules)) for unit in units]


def _gathering(units: Sequence[Unit], earlier: EarlierUnits) -> list[Unit]:
    """Units that gather ahead what the user had them gather; ValueError where one is not there any more."""
    known = {unit.modules for unit in units}
    by_modules = {unit.modules: unit for unit in earlier.units if unit.forward_prefetch or unit.backward_prefetch}
    named = {each for unit in by_modules.values() for each in (*unit.forward_prefetch, *unit.backward_prefetch)}
    if not {*by_modules, *named} <= known:
        raise ValueError(
            "units have others gathered ahead, as set_modules_to_forward_prefetch() or "
            "set_modules_to_backward_prefetch() was told, and the plan makes other units; give it a prefetch depth "
            "(prefetch=0 for none), or keep the number of blocks in a unit"
        )
    plain = prefetching(units, None)
    ahead = [by_modules.get(unit.modules, unit) for unit in plain]
    return [
        replace(unit, forward_prefetch=each.forward_prefetch, backward_prefetch=each.backward_prefetch)
        for unit, each in zip(plain, ahead, strict=True)
    ]


def _like(survey: Survey | None) -> Callable[[Modules], Unit]:
    """Gives, for the modules of a new unit, a unit whose settings it is to take over."""
    if survey is None:
        plain = Unit((), None, None, MixedPrecisionPolicy(), OffloadPolicy(), UnitSettings(), (), ())
        return lambda modules: plain
    own = [unit for unit in survey.units if unit.mesh is not None]
    if all(
        (unit.precision, unit.settings) == (own[0].precision, own[0].settings)
        and type(unit.offload) is type(own[0].offload)
        for unit in own
    ):
        return lambda modules: own[0]
    by_modules = {unit.modules: unit for unit in survey.units}

    def found(modules: Modules) -> Unit:
        if modules not in by_modules:
            raise ValueError(
                "units of the model differ in mixed precision, offloading or how gradients are divided; their number "
                "of blocks has to stay"
            )
        return by_modules[modules]

    return found
