"""Rates: the learning rates and weight decays of an optimizer's groups, which the config changes while schedules go on.

Words: the *base* rate of a parameter group is what a schedule multiplies; without a schedule it is the group's ``lr``.
The *effective* rate is what a step uses: what the schedule made of the base, times the *factor* that a changed learning
rate and a changed global batch ask for. The factor acts around ``step()`` alone: schedules see their own numbers.

Rates are *by hand* once the loop was seen to write them into the groups. From then on the groups' rates are the loop's,
and the config's rate acts as a factor, as it does with a schedule. It is divided by what the loop's numbers start from:
the script's rate where the loop wrote before its first step, else the config's rate that the groups held by then.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.ranks.world import World

__all__ = ["OptimizerSettings", "Rates"]

_logger = logging.getLogger(__name__)

# In groups, so that every kind of checkpoint keeps them.
_RATE_BY_HAND = "lr_by_hand_over"  # the rate that the loop's numbers start from; None for the script's
_DECAY_BY_HAND = "weight_decay_by_hand"  # True for a group whose decay the loop writes

_FACTOR = (
    "the loop writes learning rates into param_groups by itself, {now:g} for the first group: optimizer.learning_rate "
    "{rate:g} of the config acts on them as a factor of {factor:g} (over {base:g}), so that {effective:g} is used; "
    "this warning is logged once"
)
_OWN_DECAY = (
    "the loop writes weight decay into param_groups by itself, {now:g} of late: optimizer.weight_decay {decay:g} of "
    "the config does not act on it, and a config with another one is refused; this warning is logged once"
)
_REFUSED_DECAY = (
    "the loop writes weight decay into param_groups by itself, {now:g} of late, so that a value of the config would "
    "not act; leave optimizer.weight_decay out, or have the loop not write it"
)


class Rates:
    """The learning rates and weight decays of one optimizer, which the config, a schedule or the loop changes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._rate: float | None = None  # as the config says, where it says other than the script
        self._decay: float | None = None  # likewise
        self.factor = 1.0
        """The factor that groups' rates are multiplied with around ``step()``."""
        self.tell: Callable[[str, str], None] = lambda about, text: None
        """Called with "rates" or "decays", which the loop writes while the config has others, and with a warning."""
        self._rate_factor = self._batch_factor = 1.0
        # The base is what the first group's rate, or its schedule's, goes back to while the config does not change it.
        self._given_rate = self._base = self.base_rate or 0.0
        self._decays = [_decay_of(group) for group in self._groups]
        self._rate_before = 0.0  # that a step would have used before the config's rate was last set
        self._is_fresh = True  # no step was taken with the groups' rates
        self.must_look = True
        """Whether ``look()`` has to be called before the next step: before the first, and while the config sets a rate
        or a decay. While it sets none, what the loop has written is found once the config sets one, or at a save."""
        self._is_loading = False
        self._is_loaded = False  # by the optimizer itself, and the config was not put over it so far
        self._shown_rates: list[_Shown] | None = None  # what the groups held last; None where nobody is to look
        self._rates: list[Any] = []  # the same, without what is known of them
        self._has_tensors = False
        self._shown_decays: list[Any] = []
        optimizer.register_load_state_dict_post_hook(self._note_loaded)
        self._watch()

    @property
    def base_rate(self) -> float | None:
        """The first group's base rate, None for an optimizer without rates."""
        group = self._groups[0]
        rate = group.get("initial_lr", group.get(_RATE_BY_HAND) or group.get("lr"))
        return None if rate is None else float(rate)

    @property
    def base_decay(self) -> float | None:
        """The first group's weight decay, None for an optimizer without."""
        decay = self._groups[0].get("weight_decay")
        return None if decay is None else float(decay)

    @property
    def effective(self) -> list[float]:
        """The learning rate that the next step uses, for each group."""
        self._notice()
        return [float(group["lr"]) * self.factor for group in self._groups if "lr" in group]

    @property
    def scheduled(self) -> list[Any] | None:
        """Values, one for each group, that are others once a schedule has changed the rates; None without a schedule.

        Of a tensor it is the count of its changes, so that its device is not waited for.
        """
        groups = self._groups
        if "initial_lr" not in groups[0]:
            return None
        rates = [group.get("lr") for group in groups]
        return [rate._version if isinstance(rate, torch.Tensor) else rate for rate in rates]

    @property
    def are_by_hand(self) -> bool:
        """Whether the loop was seen to write rates by itself, where there is no schedule."""
        group = self._groups[0]
        return _RATE_BY_HAND in group and "initial_lr" not in group

    @property
    def given_by_hand(self) -> float | None:
        """The script's rate, which the rates that the loop writes start from; None where they do not."""
        return self._given_rate if self.are_by_hand and self._groups[0][_RATE_BY_HAND] is None else None

    @property
    def given(self) -> float:
        """The first group's rate as the script gave it; 0 for an optimizer without rates."""
        return self._given_rate

    @property
    def effect(self) -> str:
        """What the config's rate, set last, makes of the rates that a schedule or the loop writes, in words.

        Empty where the config's rate is the one that steps use.
        """
        now = self.effective[0] if "lr" in self._groups[0] else 0.0
        if self.are_by_hand:
            if self._rate_factor == 1.0:
                return ""
            return f"a factor of {self._rate_factor:g} on the rates that the loop writes: {now:g} is used"
        if "initial_lr" not in self._groups[0]:
            return ""
        step = f"the next step uses {now:g}" + (f", and not {self._rate_before:g}" if now != self._rate_before else "")
        if self._base == float(getattr(self._optimizer, "defaults", {}).get("lr") or 0.0):
            return f"the base that the schedule multiplies: {step}"
        # OneCycleLR and CyclicLR write a base of their own, which few expect to be the one that the key means.
        return (
            f"the base that the schedule multiplies: the schedule began with {self._base:g}, this is "
            f"{self._rate_factor:g} times that, and so are all rates to come; {step}"
        )

    def look(self) -> None:
        """See whether the loop has written rates or decays; called before every step for which ``must_look`` is set."""
        if self._is_fresh or not self._is_as_shown():
            self._notice()
            self._is_fresh = False
        self.must_look = self._rate is not None or self._decay is not None

    def note_written(self) -> None:
        """See whether the loop has written rates or decays, between two steps, before the groups are saved."""
        self._notice()

    def set_rate(self, rate: float) -> None:
        """Have the first group's base rate be ``rate``; other groups keep their ratio to it, schedules go on."""
        self._rate_before = self.effective[0]
        self._rate, self.must_look = rate, True
        self._put_rate(rate)

    def set_decay(self, decay: float) -> None:
        """Have the first group's weight decay be ``decay``; other groups keep their ratio to it."""
        self._notice()
        self._put_decay(decay)

    def set_batch_factor(self, factor: float) -> None:
        """Set the factor that rates are multiplied with because of the global batch's size."""
        self._batch_factor = factor
        self.factor = self._rate_factor * factor

    def why_not_decay(self) -> str | None:
        """Why weight decay cannot be changed here, None where it can."""
        self._notice()
        written = next((_decay_of(group) for group in self._groups if _DECAY_BY_HAND in group), None)
        if written is not None:
            return _REFUSED_DECAY.format(now=written)
        if self.base_decay is None:
            return f"{type(self._optimizer).__name__} has no weight decay"
        if self._decays[0] == 0.0 and any(self._decays):
            return "the first group has no weight decay that others could keep a ratio to; put a decayed group first"
        return None

    def expect_schedule(self) -> None:
        """Keep the base rate of each group, as a schedule will set them; ReduceLROnPlateau does not keep it itself."""
        for group in self._groups:
            if "lr" in group:
                group.setdefault("initial_lr", _copied(group["lr"]))

    def add_group(self, group: dict[str, Any]) -> None:
        """Add a parameter group with the script's rate and decay, which are scaled as the config scaled the others'."""
        rate, decay = self._rate, self._decay
        if rate is not None:
            self.set_rate(self._given_rate)
        if decay is not None:
            self.set_decay(self._decays[0])
        self._optimizer.add_param_group(group)
        if rate is not None:
            self.set_rate(rate)
        if decay is not None:
            self.set_decay(decay)

    def start(self) -> dict[str, Any]:
        """What rates start from besides what the groups hold, as JSON for a rank that joins."""
        return {"given": self._given_rate, "rate": self._rate, "is_fresh": self._is_fresh}

    def load(self, load: Callable[[], object], *, start: Mapping[str, Any] | None = None) -> None:
        """Call ``load``, which loads an optimizer's state; a rate and a decay of the config replace those loaded.

        ``start`` is what ``start()`` gave on a rank that this one joins: the script may give another rate there, which
        grows with the number of ranks.
        """
        groups = self._groups
        bases = [group.get("initial_lr") for group in groups]
        by_hand = [{key: group.pop(key) for key in (_RATE_BY_HAND, _DECAY_BY_HAND) if key in group} for group in groups]
        self._is_loading, has_loaded = True, False
        try:
            load()
            has_loaded = True
        finally:
            self._is_loading = False
            if not has_loaded:
                for group, held in zip(groups, by_hand, strict=True):
                    group.update(held)
        for group, base in zip(self._groups, bases, strict=True):
            if base is not None:  # what was saved without a schedule has none
                group.setdefault("initial_lr", base)
        if start is not None:
            self._given_rate, self._rate = start["given"], start["rate"]
        self._take_base(bases[0])
        if start is not None:
            self._is_fresh = start["is_fresh"]
        self._put_config()

    @contextmanager
    def scaled(self) -> Iterator[None]:
        """Multiply every group's rate by the factor within, and put the rates back afterwards, whatever happens."""
        rates = [(group, _copied(group["lr"])) for group in self._groups if "lr" in group]
        shown_rates, self._shown_rates = self._shown_rates, None
        try:
            for group, rate in rates:
                _put(group, rate * self.factor)
            yield
        finally:
            for group, rate in rates:
                _put(group, rate)
            for shown in shown_rates or ():
                shown.version = _version_of(shown.rate)
            self._shown_rates = shown_rates

    # ---- what the loop writes ----

    def _is_as_shown(self) -> bool:
        """Whether the groups' rates and decays are the objects that they were; called in most steps, so it is brief."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        shown_decays, shown_rates = self._shown_decays, self._shown_rates
        if len(groups) != len(shown_decays):
            return False
        for number, group in enumerate(groups):
            if group.get("weight_decay") is not shown_decays[number]:
                return False
            if shown_rates is not None and group.get("lr") is not self._rates[number]:
                return False
        return not (
            self._has_tensors
            and shown_rates is not None
            and any(shown.version != _version_of(shown.rate) for shown in shown_rates)
        )

    def _notice(self) -> None:
        """Mark rates and decays that the loop has written since ``_watch`` as written by hand."""
        if not (self._is_loaded or not self._is_as_shown()):
            return
        is_loaded, self._is_loaded = self._is_loaded, False
        groups, shown_rates = self._groups, self._shown_rates
        if shown_rates is not None and "initial_lr" not in groups[0]:
            self._notice_rates([not shown.is_in(group) for group, shown in zip(groups, shown_rates, strict=False)])
        decays = zip(groups, self._shown_decays, strict=False)
        written = [group for group, decay in decays if group.get("weight_decay") != decay]
        for group in written:
            group[_DECAY_BY_HAND] = True
        self._watch()
        if written:
            self._tell_decay()
        if is_loaded:
            self._put_config()

    def _notice_rates(self, are_written: Sequence[bool]) -> None:
        """Take the groups' rates as the loop's own from here on, since it has written those of some groups."""
        groups, base = self._groups, self._base
        if not any(are_written):
            # Another float of the same value: a loop whose schedule starts where the script does. While the config says
            # nothing else it makes no difference; when it does, the loop's next number is known for what it is.
            is_put = any(group.get("lr") is not rate for group, rate in zip(groups, self._rates, strict=False))
            if not (is_put and not self._has_tensors and base == self._given_rate and self._rate in (None, base)):
                return
        start = self._given_rate if self._is_fresh else base
        if start != base and base:
            for group, is_written in zip(groups, are_written, strict=False):
                if not is_written and "lr" in group:
                    _put(group, float(group["lr"]) * (start / base))
        for group in groups:
            group[_RATE_BY_HAND] = None if self._is_fresh else base
        self._base = start
        self._put_rate(self._rate_in_force)

    def _watch(self) -> None:
        """Remember the groups' rates and decays, to see later whether the loop writes others."""
        groups = self._groups
        for group in groups[1:]:  # one that was added since
            if self.are_by_hand:
                group.setdefault(_RATE_BY_HAND, groups[0][_RATE_BY_HAND])
        is_seen = not ("initial_lr" in groups[0] or self.are_by_hand)
        self._shown_rates = [_Shown(group.get("lr")) for group in groups] if is_seen else None
        self._rates = [group.get("lr") for group in groups]
        self._has_tensors = any(isinstance(rate, torch.Tensor) for rate in self._rates)
        self._shown_decays = [group.get("weight_decay") for group in groups]

    def _note_loaded(self, optimizer: Optimizer) -> None:
        """Note that the optimizer has loaded rates by itself, as accelerate has it do: the config's replace them."""
        if not (self._is_loading or "initial_lr" in self._groups[0]):
            self._take_base(None)
            self._is_loaded = True

    def _take_base(self, base: Any) -> None:
        """Take the base rate from rates that were loaded; ``base`` is the one that a schedule had multiplied before."""
        if self.are_by_hand:
            self._base = self._groups[0][_RATE_BY_HAND] or self._given_rate
        else:
            loaded = self.base_rate
            if loaded:
                self._base = self._base * (loaded / float(base)) if base else loaded
            if "initial_lr" not in self._groups[0]:
                self._rate_factor, self.factor = 1.0, self._batch_factor
        self._is_fresh, self._is_loaded, self.must_look = True, False, True
        self._watch()

    # ---- what the config says ----

    @property
    def _rate_in_force(self) -> float:
        return self._given_rate if self._rate is None else self._rate

    def _put_config(self) -> None:
        """Replace rates and decays that were loaded by those of the config in force."""
        if self._rate is not None or self.are_by_hand:
            self._put_rate(self._rate_in_force)
        if self._decay is not None:
            self._put_decay(self._decay)

    def _put_rate(self, rate: float) -> None:
        groups = self._groups
        if "initial_lr" in groups[0] or self.are_by_hand:  # a schedule starts from it, or the loop does
            self._rate_factor = rate / self._base if self._base else 1.0
            self.factor = self._rate_factor * self._batch_factor
            self._tell_rate()
            return
        rates = [float(group["lr"]) for group in groups]  # all of them before any is set: they may share a tensor
        for group, now in zip(groups, rates, strict=True):
            _put(group, rate * (now / self._base))
        self._base, self._rate_factor = rate, 1.0
        self.factor = self._batch_factor
        self._watch()

    def _put_decay(self, decay: float) -> None:
        self._decay, self.must_look = decay, True
        groups = self._groups
        self._decays += [_decay_of(group) for group in groups[len(self._decays) :]]  # groups that were added since
        for group, given in zip(groups, self._decays, strict=True):
            if _DECAY_BY_HAND not in group:
                share = 1.0 if given == self._decays[0] else given / self._decays[0]
                group["weight_decay"] = decay * share
        self._watch()

    def _tell_rate(self) -> None:
        if self._rate_factor == 1.0 or not self.are_by_hand:
            return
        now = float(self._groups[0]["lr"])
        told = {"now": now, "base": self._base, "factor": self._rate_factor, "effective": now * self.factor}
        self.tell("rates", _FACTOR.format(rate=self._rate_in_force, **told))

    def _tell_decay(self) -> None:
        if self._decay is None or self._decay == self._decays[0]:
            return
        now = next(_decay_of(group) for group in self._groups if _DECAY_BY_HAND in group)
        self.tell("decays", _OWN_DECAY.format(now=now, decay=self._decay))

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups


class _Shown:
    """A group's rate when it was last set or seen, to find out whether the loop has written another."""

    __slots__ = ("_copy", "rate", "version")

    def __init__(self, rate: Any) -> None:
        self.rate = rate
        self.version = _version_of(rate)
        self._copy = _copied(rate)

    def is_in(self, group: dict[str, Any]) -> bool:
        """Whether the group's rate has this value; waits for the device of a tensor that was written."""
        now = group.get("lr")
        if now is self.rate and _version_of(now) == self.version:
            return True
        if now is None or self._copy is None:
            return now is self._copy
        return float(now) == float(self._copy)


class _Rated(Protocol):
    """The part of an ``ElasticOptimizer`` that ``OptimizerSettings`` needs."""

    rates: Rates

    @property
    def inner(self) -> Optimizer: ...


class OptimizerSettings:
    """The applier of the section ``optimizer``, for one or several optimizers."""

    section = "optimizer"

    def __init__(self, optimizers: Sequence[_Rated]) -> None:
        self.optimizers = optimizers
        self._rates = [optimizer.rates.base_rate for optimizer in optimizers]
        self._decays = [optimizer.rates.base_decay for optimizer in optimizers]
        self._decay = self._decays[0]  # in force
        self.tells = False
        """Whether this rank logs warnings that all ranks would log alike."""
        self._told: set[str] = set()
        for optimizer in optimizers:
            optimizer.rates.tell = self._tell

    @property
    def rate(self) -> float | None:
        """The learning rate in use, of the first optimizer's first group; None where there is none that is finite."""
        rates = self.optimizers[0].rates
        rate = float(self.optimizers[0].inner.param_groups[0].get("lr", math.nan)) * rates.factor
        return rate if math.isfinite(rate) else None

    def take_world(self, world: World) -> None:
        """Log warnings from here on where this rank is the first of ``world``."""
        self.tells = world.rank == 0

    def startup_values(self) -> dict[str, object]:
        """The first optimizer's rate and weight decay, as the script gave them, as values of config keys."""
        values: dict[str, object] = {}
        if self._rates[0]:
            values["optimizer.learning_rate"] = self._rates[0]
        if self._decays[0] is not None:
            values["optimizer.weight_decay"] = self._decays[0]
        return values

    def check(self, new: ElasticConfig) -> str | None:
        wanted = new.optimizer
        if wanted.learning_rate is not None and wanted.learning_rate != self._rates[0]:
            if self._rates[0] is None:
                return f"{type(self.optimizers[0].inner).__name__} has no learning rate"
            if self._rates[0] == 0.0:
                return "the first group's learning rate is 0, so the others have no ratio to it; give it a rate"
        if wanted.weight_decay is not None and wanted.weight_decay not in (self._decays[0], self._decay):
            reasons = [optimizer.rates.why_not_decay() for optimizer in self.optimizers]
            if self._decays[0] == 0.0 and any(self._decays):
                reasons.append("the first optimizer has no weight decay that others could keep a ratio to")
            return next((reason for reason in reasons if reason is not None), None)
        return None

    def apply(self, old: ElasticConfig, new: ElasticConfig) -> None:
        rate, decay = new.optimizer.learning_rate, new.optimizer.weight_decay
        if rate is not None and rate != old.optimizer.learning_rate:
            for optimizer, base in zip(self.optimizers, self._rates, strict=True):
                if base:  # an optimizer without a rate, or with rate 0, stays so
                    optimizer.rates.set_rate(_in_ratio(rate, base, self._rates[0]))
        if decay is not None and decay != old.optimizer.weight_decay:
            self._decay = decay
            for optimizer, base in zip(self.optimizers, self._decays, strict=True):
                optimizer.rates.set_decay(_in_ratio(decay, base, self._decays[0]))

    def _tell(self, about: str, text: str) -> None:
        if self.tells and about not in self._told:
            self._told.add(about)
            _logger.warning("%s", text)


def _in_ratio(value: float, base: float | None, first_base: float | None) -> float:
    if base is None or not first_base or base == first_base:
        return value
    return value * (base / first_base)


def _version_of(rate: Any) -> int | None:
    return rate._version if isinstance(rate, torch.Tensor) else None


def _decay_of(group: dict[str, Any]) -> float:
    return float(group.get("weight_decay", 0.0))


def _copied(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _put(group: dict[str, Any], rate: Any) -> None:
    """Set a group's rate; a tensor changes in place, since a captured graph reads it where it is."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].copy_(torch.as_tensor(rate))
    else:
        group["lr"] = rate
