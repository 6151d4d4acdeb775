"""Conversions to folders of torch.distributed.checkpoint and back: what ``dcp.load`` on one and two ranks finds there,
what a model loads of what ``dcp.save`` has made, what is refused, and how much memory that takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import SGD, AdamW, Optimizer

from elastic_ext.cli import main
from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound
from elastic_ext.fsdp import ShardCheckpointer, convert_from_dcp, convert_to_dcp
from elastic_ext.fsdp.checkpoint.export.dcp_folder import DcpFolder
from elastic_ext.fsdp.checkpoint.export.dcp_plan import leaves_of, owner_and_key, runs_of
from tests.support.made import by_rows, make_checkpoint
from tests.support.ranks import RankPool
from tests.support.saving import train as train_with_a_trainer
from tests.support.spread import (
    SPREADS,
    Everything,
    State,
    differences,
    overwrite,
    places_in,
    put_together,
    state_here,
    train,
)
from tests.support.thinning import each_once, the_first

FIRST = ["out.weight"]
"""Of the names of the tied parameter."""
TIED = [("again.weight", "out.weight")]
NUM_STEPS = 2
EXTRA = {"epoch": 3, "order": torch.arange(4), "pair": (1, 2.5)}


class Stated(Everything):
    """Everything, and a state of its own that is no tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.own: object = {"seed": seed, "in": {"it": [1, 2, {"deep": 4.5}]}, "empty": []}

    def get_extra_state(self) -> object:
        return self.own

    def set_extra_state(self, state: object) -> None:
        self.own = state


def adamw(model: nn.Module) -> Optimizer:
    """Two groups, of different values."""
    weights = [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("weight")]
    groups: list[dict[str, Any]] = [{"params": weights, "lr": 3e-3, "betas": (0.8, 0.95)}, {"params": others}]
    return AdamW(groups, lr=1e-2, amsgrad=True)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)


MAKERS: Mapping[str, Callable[[nn.Module], Optimizer]] = {"AdamW": adamw, "SGD": sgd}


def begun(spread: str, optimizer: str, seed: int) -> tuple[nn.Module, Optimizer]:
    """A model that is spread over the ranks here, after some steps."""
    model = SPREADS[spread].wrap(Stated(seed))
    made = MAKERS[optimizer](model)
    train(model, [made], NUM_STEPS)
    return model, made


@contextlib.contextmanager
def told_by_torch() -> Iterator[None]:
    """torch's state dict functions warn of their own doings, and of having no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_ours(rank: int, spread: str, optimizer: str, storage: Path) -> State:
    """Save with a checkpointer; what there is."""
    places = places_in(SPREADS[spread])
    model, made = begun(spread, optimizer, 3)
    with ShardCheckpointer(storage, job="ours") as checkpointer:
        checkpointer.save(NUM_STEPS, model, made, EXTRA, epoch=1)
    return state_here(model, [made], places)


def load_ours(rank: int, spread: str, optimizer: str, storage: Path, job: str) -> tuple[State, Any, object]:
    """Load with a checkpointer into a model that was trained otherwise; what there is then."""
    places = places_in(SPREADS[spread])
    model, made = begun(spread, optimizer, 8)
    overwrite(model, [made])
    with ShardCheckpointer(storage, job=job) as checkpointer:
        loaded = checkpointer.load(model, made)
    return state_here(model, [made], places), loaded, bare(model).own


def save_theirs(rank: int, spread: str, optimizer: str, folder: Path, is_flattened: bool = False) -> State:
    """Save with dcp.save; what there is."""
    places = places_in(SPREADS[spread])
    model, made = begun(spread, optimizer, 3)
    with told_by_torch():
        options = StateDictOptions(flatten_optimizer_state_dict=is_flattened)
        of_model, of_optim = get_state_dict(model, made, options=options)
        rest = {"train": {"step": torch.tensor(7), "seen": [1, {"order": torch.arange(3)}], "name": "théirs"}}
        save({"model": of_model, "optim": of_optim, **rest}, checkpoint_id=folder)
    return state_here(model, [made], places)


def load_theirs(rank: int, spread: str, optimizer: str, folder: Path) -> tuple[State, object]:
    """Load with dcp.load into a model that was trained otherwise; what there is then."""
    places = places_in(SPREADS[spread])
    model, made = begun(spread, optimizer, 8)
    overwrite(model, [made])
    bare(model).own = {"seed": 0, "in": {"it": [0, 0, {"deep": 0.0}]}, "empty": [0]}
    with told_by_torch():
        of_model, of_optim = get_state_dict(model, made)
        whole: dict[str, Any] = {"model": of_model, "optim": of_optim}
        load(whole, checkpoint_id=folder)
        set_state_dict(model, made, model_state_dict=whole["model"], optim_state_dict=whole["optim"])
    return state_here(model, [made], places), bare(model).own


def bare(model: nn.Module) -> Stated:
    inner = getattr(model, "module", model)
    assert isinstance(inner, Stated)
    return inner


def run(ranks: RankPool, spread: str, act: Callable[..., Any], *arguments: object) -> list[Any]:
    return ranks.run(SPREADS[spread].num_ranks, act, spread, *arguments)


def newest(storage: Path, job: str) -> Path:
    with ShardCheckpointer(storage, job=job) as checkpointer:
        path = checkpointer.latest()
    assert path is not None
    return path


# --- to DCP ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spread", "optimizer"), each_once(["FSDP2 3", "FSDP2 2 by columns", "FSDP1 2"], list(MAKERS)))
def test_what_ranks_have_saved_is_loaded_by_dcp_on_one_rank_and_on_two(
    ranks: RankPool, tmp_path: Path, spread: str, optimizer: str
) -> None:
    whole = put_together(run(ranks, spread, save_ours, optimizer, tmp_path))
    convert_to_dcp(newest(tmp_path, "ours"), tmp_path / "dcp", first_names=FIRST)
    for other in ("plain", "FSDP2 2"):
        for here, own in run(ranks, other, load_theirs, optimizer, tmp_path / "dcp"):
            assert differences(here, whole) == []
            assert own == Stated(3).own


@pytest.mark.parametrize("optimizer", MAKERS)
def test_a_checkpoint_that_was_converted_comes_back_with_all_that_it_had(
    ranks: RankPool, tmp_path: Path, optimizer: str
) -> None:
    whole = put_together(run(ranks, "FSDP2 3", save_ours, optimizer, tmp_path))
    convert_to_dcp(newest(tmp_path, "ours"), tmp_path / "dcp", first_names=FIRST)
    converted = convert_from_dcp(tmp_path / "dcp", tmp_path, job="again")
    assert converted.step == NUM_STEPS and converted.path == newest(tmp_path, "again")
    for other in ("plain", "FSDP2 2"):
        for here, loaded, own in run(ranks, other, load_ours, optimizer, tmp_path, "again"):
            assert differences(here, whole) == []
            assert own == Stated(3).own
            assert (loaded.step, loaded.epoch, loaded.num_ranks) == (NUM_STEPS, 1, 3)
            assert loaded.extra.pop("order").tolist() == [0, 1, 2, 3]
            assert loaded.extra == {"epoch": 3, "pair": (1, 2.5)}


def go_on(rank: int, folder: Path, storage: Path, until: int) -> tuple[int, int]:
    """A trainer's run."""
    return train_with_a_trainer(folder, storage, until, rank=rank)


def test_a_trainer_resumes_from_what_was_there_and_back_as_from_the_checkpoint_itself(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(2, go_on, tmp_path / "runs", tmp_path / "one", 3)
    convert_to_dcp(newest(tmp_path / "one", "test"), tmp_path / "dcp")
    convert_from_dcp(tmp_path / "dcp", tmp_path / "two", job="test")
    ended = []
    for name in ("one", "two"):
        assert ranks.run(2, go_on, tmp_path / f"runs of {name}", tmp_path / name, 5) == [(3, 5)] * 2
        convert_to_dcp(newest(tmp_path / name, "test"), tmp_path / f"dcp {name}")
        ended.append(contents(DcpFolder(tmp_path / f"dcp {name}")))
    for whole in ended:
        assert json.loads(b"".join(whole.pop("elastic_ext.record")))["global_step"] == 5
    assert ended[0].keys() == ended[1].keys() and len(ended[0]) > 20
    assert [key for key in ended[0] if ended[0][key] != ended[1][key]] == []


def test_keys_are_those_that_are_asked_for(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, "plain", save_ours, "SGD", tmp_path)
    convert_to_dcp(newest(tmp_path, "ours"), tmp_path / "dcp", first_names=FIRST, model_key="", optim_key="opt")
    keys = set(FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata)
    assert {"up.weight", "again.weight", "out.weight", "opt.state.out.weight.momentum_buffer"} < keys
    assert {"opt.param_groups.0.lr", "opt.param_groups.0.params", "elastic_ext.record"} < keys
    assert "opt.state.again.weight.momentum_buffer" not in keys
    convert_from_dcp(tmp_path / "dcp", tmp_path, job="again")


# --- from DCP -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spread", "optimizer"), each_once(["plain", "FSDP2 2", "FSDP2 2 by columns"], list(MAKERS)))
def test_what_dcp_has_saved_on_one_rank_and_on_two_is_loaded(
    ranks: RankPool, tmp_path: Path, spread: str, optimizer: str
) -> None:
    whole = put_together(run(ranks, spread, save_theirs, optimizer, tmp_path / "dcp"))
    convert_from_dcp(tmp_path / "dcp", tmp_path, job="new", step=5, optimizers=[optimizer], tied=TIED)
    for other in ("plain", "FSDP2 2"):
        for here, loaded, own in run(ranks, other, load_ours, optimizer, tmp_path, "new"):
            assert differences(here, whole) == []
            assert own == Stated(3).own
            train_state = loaded.extra["train"]
            assert loaded.step == 5 and train_state["step"].item() == 7 and train_state["name"] == "théirs"
            assert train_state["seen"][0] == 1 and train_state["seen"][1]["order"].tolist() == [0, 1, 2]


def test_a_flattened_optimizer_state_is_loaded(ranks: RankPool, tmp_path: Path) -> None:
    whole = put_together(run(ranks, "FSDP2 2", save_theirs, "AdamW", tmp_path / "dcp", True))
    convert_from_dcp(tmp_path / "dcp", tmp_path, job="new", step=5, optimizers=["AdamW"], tied=TIED)
    for here, _, _ in run(ranks, "FSDP2 2", load_ours, "AdamW", tmp_path, "new"):
        assert differences(here, whole) == []


# --- what is refused ------------------------------------------------------------------------------------------------


def saved_by_dcp(folder: Path, state: Mapping[str, Any]) -> Path:
    with told_by_torch():
        save(dict(state), checkpoint_id=folder)
    return folder


class Thing:
    """What only pickle can hold."""


@pytest.mark.parametrize(
    ("state", "arguments", "words"),
    [
        ({"model": {"w": torch.ones(2), "n": 3}}, {}, r"neither tensors nor extra states of modules: model\.n"),
        ({"model": {"w": torch.ones(2)}, "t": Thing()}, {}, r"torch does not load with weights_only.*: t$"),
        ({"model": {"w": torch.ones(2)}, "optim": {"state": {"v": {"s": torch.ones(2)}}}}, {}, r"optim\.state\.v\.s"),
        ({"net": {"w": torch.ones(2)}}, {}, r"its keys begin with net: .* with model_key \(--model-key\)"),
        ({"model": {"w": torch.ones(2)}}, {"optimizers": ["SGD"]}, "holds no groups"),
        ({"model": {"w": torch.ones(2)}}, {"tied": [("w", "v")]}, r"tied \(--tied\) names v, and"),
        ({"model": {"w": torch.ones(2), "v": torch.zeros(2)}}, {"tied": [("w", "v")]}, "has two different"),
        ({"model": {"w": torch.ones(2)}}, {"step": None}, r"give step \(--step\)"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_its_keys(
    tmp_path: Path, state: Mapping[str, Any], arguments: Mapping[str, Any], words: str
) -> None:
    saved_by_dcp(tmp_path / "dcp", state)
    with pytest.raises(CheckpointError, match=words):
        convert_from_dcp(tmp_path / "dcp", tmp_path / "storage", job="new", **{"step": 1, **arguments})
    assert not (tmp_path / "storage").exists()


def test_names_that_a_folder_does_not_have_are_told_in_order(tmp_path: Path) -> None:
    saved_by_dcp(tmp_path / "dcp", {"model": {"w": torch.ones(2)}})
    for number in range(8):  # the order of a set would be another one for some
        tied = [(f"b{number}", f"a{number}")]
        with pytest.raises(CheckpointError, match=rf"tied \(--tied\) names a{number}, b{number}, and"):
            convert_from_dcp(tmp_path / "dcp", tmp_path / "storage", job="new", step=1, tied=tied)


def test_optimizer_state_without_a_class_or_with_another_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, "plain", save_theirs, "SGD", tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"not their classes; name them with optimizers \(--optimizer\)"):
        convert_from_dcp(tmp_path / "dcp", tmp_path, job="new", step=1)
    convert_from_dcp(tmp_path / "dcp", tmp_path, job="new", step=1, optimizers=["Adam"], tied=TIED)
    model = Stated(1)
    with (
        ShardCheckpointer(tmp_path, job="new") as checkpointer,
        pytest.raises(CheckpointMismatch, match="Adam, and"),
    ):
        checkpointer.load(model, sgd(model))


def test_a_tied_parameter_needs_the_name_that_torch_has(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, "plain", save_ours, "SGD", tmp_path)
    with pytest.raises(CheckpointError, match=r"to be in first_names \(--first\).*: again.weight = out.weight"):
        convert_to_dcp(newest(tmp_path, "ours"), tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"first_names \(--first\) that no parameter has: up\.wait"):
        convert_to_dcp(newest(tmp_path, "ours"), tmp_path / "dcp", first_names=["out.weight", "up.wait"])
    assert sorted(os.listdir(tmp_path)) == ["fsdp_checkpoint"]


def test_a_job_that_has_checkpoints_is_left_alone(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, "plain", save_ours, "SGD", tmp_path)
    path = newest(tmp_path, "ours")
    convert_to_dcp(path, tmp_path / "dcp", first_names=FIRST)
    with pytest.raises(CheckpointError, match="holds checkpoints of job 'ours' already"):
        convert_from_dcp(tmp_path / "dcp", tmp_path, job="ours")
    assert newest(tmp_path, "ours") == path


def test_a_folder_is_replaced_with_force_alone_and_only_if_dcp_made_all_of_it(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "step_1", {"w": torch.ones(3)}, {"w": by_rows((3,), 1)}, num_ranks=1)
    convert_to_dcp(path, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"is there already; give another dest, or force=True \(--force\)"):
        convert_to_dcp(path, tmp_path / "dcp")
    convert_to_dcp(path, tmp_path / "dcp", force=True)
    (tmp_path / "dcp" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt, which dcp\.save has not made"):
        convert_to_dcp(path, tmp_path / "dcp", force=True)
    assert sorted(os.listdir(tmp_path)) == ["dcp", "step_1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model_key": "optim"}, "model_key is 'optim' and optim_key 'optim'; allowed: two different texts"),
        ({"optim_key": ""}, "model_key is 'model' and optim_key ''; allowed: two different texts"),
        ({"model_key": 3}, "model_key is 3 and optim_key 'optim'; allowed"),
        ({"first_names": "w"}, "first_names is 'w'; allowed: a list of names"),
        ({"first_names": [1]}, r"first_names is \[1\]; allowed: a list of names"),
        ({"force": "no"}, "force is 'no'; allowed: True, False"),
        ({"dest": ""}, "dest is ''"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_by_its_name(
    tmp_path: Path, arguments: Mapping[str, Any], words: str
) -> None:
    path = make_checkpoint(tmp_path / "step_1", {"w": torch.ones(3)}, {"w": by_rows((3,), 1)}, num_ranks=1)
    with pytest.raises(ValueError, match=words):
        convert_to_dcp(path, **{"dest": tmp_path / "dcp", **arguments})
    assert sorted(os.listdir(tmp_path)) == ["step_1"]


def test_one_optimizer_by_itself_is_refused_by_the_parameters_name(tmp_path: Path) -> None:
    saved_by_dcp(tmp_path / "dcp", {"model": {"w": torch.ones(2)}})
    with pytest.raises(ValueError, match="optimizers is 'AdamW'; allowed: a list of names"):
        convert_from_dcp(tmp_path / "dcp", tmp_path, job="new", step=1, optimizers="AdamW")


def test_what_a_killed_conversion_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "step_1", {"w": torch.ones(3)}, {"w": by_rows((3,), 1)}, num_ranks=1)
    (tmp_path / ".dcp.0123456789abcdef.tmp").mkdir()
    (tmp_path / ".other.0123456789abcdef.tmp").mkdir()
    convert_to_dcp(path, tmp_path / "dcp")
    assert sorted(os.listdir(tmp_path)) == [".other.0123456789abcdef.tmp", "dcp", "step_1"]


# --- trust and damage -----------------------------------------------------------------------------------------------


def test_damage_anywhere_is_noticed_and_nothing_is_saved(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    state = {"model": {"large": torch.randn(3 << 20, 4, generator=draw), "small": torch.randn(100, generator=draw)}}
    folder = saved_by_dcp(tmp_path / "dcp", state)
    file = folder / "__0_0.distcp"
    kept = file.read_bytes()
    of_small = kept.index(struct.pack("<f", state["model"]["small"][50].item()))
    for at in (kept.index(b"_rebuild_tensor"), len(kept) // 3, len(kept) // 2, of_small):
        changed = bytearray(kept)
        changed[at] ^= 1
        file.write_bytes(changed)
        with pytest.raises(CheckpointDamaged, match=r"__0_0\.distcp"):
            convert_from_dcp(folder, tmp_path / "storage", job="new", step=1)
        with ShardCheckpointer(tmp_path / "storage", job="new") as checkpointer:
            assert checkpointer.latest() is None
    file.write_bytes(kept[:-5000])
    with pytest.raises(CheckpointDamaged, match=r"__0_0\.distcp"):
        convert_from_dcp(folder, tmp_path / "storage", job="new", step=1)
    file.unlink()
    with pytest.raises(CheckpointDamaged, match="is missing"):
        convert_from_dcp(folder, tmp_path / "storage", job="new", step=1)
    with pytest.raises(CheckpointNotFound, match=r"holds no \.metadata"):
        convert_from_dcp(tmp_path, tmp_path / "storage", job="new", step=1)
    file.write_bytes(kept)
    convert_from_dcp(folder, tmp_path / "storage", job="new", step=1)


@pytest.mark.parametrize("stride", the_first([21, 7]))
def test_no_changed_bit_passes_for_another_tensor(tmp_path: Path, stride: int) -> None:
    state = {"model": {"w": torch.arange(6.0).reshape(2, 3), "s": torch.arange(6.0).reshape(2, 3).t()}, "v": [1, "two"]}
    folder = saved_by_dcp(tmp_path / "dcp", state)
    opened = DcpFolder(folder)
    expected = contents(opened)
    file = folder / "__0_0.distcp"
    kept = file.read_bytes()
    num_noticed = 0
    for at in range(0, len(kept), stride):
        changed = bytearray(kept)
        changed[at] ^= 1 << at % 8
        file.write_bytes(changed)
        try:
            assert contents(opened) == expected, at
        except CheckpointError:
            num_noticed += 1
    assert num_noticed > 700 / stride


def contents(opened: DcpFolder) -> dict[str, Any]:
    found: dict[str, Any] = {key: opened.value(key) for key in opened.values}
    for key, tensor in opened.tensors.items():
        found[key] = [bytes(part) for piece in tensor.pieces for part in opened.contents_of(tensor, piece)]
    return found


def test_a_damaged_checkpoint_is_no_folder_of_dcps(tmp_path: Path) -> None:
    weight = torch.randn(100_000)
    path = make_checkpoint(tmp_path / "step_1", {"w": weight}, {"w": by_rows(weight.shape, 2)}, num_ranks=2)
    for file in path.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with pytest.raises(CheckpointDamaged):
        convert_to_dcp(path, tmp_path / "dcp")
    assert sorted(os.listdir(tmp_path)) == ["step_1"]


def test_what_is_converted_is_not_put_where_a_job_clears_up(tmp_path: Path) -> None:
    weight = torch.zeros(2)
    path = make_checkpoint(tmp_path / "step_1", {"w": weight}, {"w": by_rows(weight.shape, 1)}, num_ranks=1)
    (tmp_path / "fsdp_checkpoint" / "job_1").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="lies among the checkpoints of a job"):
        convert_to_dcp(path, tmp_path / "fsdp_checkpoint" / "job_1" / "step_9")


def test_tensors_that_lie_otherwise_in_memory_are_converted(tmp_path: Path) -> None:
    small, large = torch.randn(6, 5).t(), torch.randn(4096, 3000).t()
    folder = saved_by_dcp(tmp_path / "dcp", {"model": {"small": small, "large": large, "part": large[5:7, 3]}})
    convert_from_dcp(folder, tmp_path, job="new", step=1)
    model = nn.Module()
    for name, tensor in (("small", small), ("large", large), ("part", large[5:7, 3])):
        model.register_buffer(name, torch.zeros(tensor.shape))
    with ShardCheckpointer(tmp_path, job="new") as checkpointer:
        checkpointer.load(model)
    found = dict(model.named_buffers())
    assert torch.equal(found["small"], small) and torch.equal(found["large"], large)
    assert torch.equal(found["part"], large[5:7, 3])


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "most"), [((), 1), ((0, 3), 5), ((7,), 3), ((4, 5), 11), ((4, 5), 3), ((2, 3, 5), 7), ((2, 3, 5), 1)]
)
def test_runs_are_blocks_that_follow_one_another(shape: tuple[int, ...], most: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    found = []
    for offsets, sizes in runs_of(shape, most):
        block = whole[tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))]
        assert tuple(block.shape) == sizes and block.numel() <= most
        found += block.reshape(-1).tolist()
    assert found == whole.reshape(-1).tolist()


def test_leaves_are_those_of_dcp() -> None:
    value = {"a": {"b": 1, "none": None}, "l": [1, 2], "m": [1, {"c": (1, 2)}, [[{"d": 3}]]], "t": ({"x": 1},)}
    leaves = {".".join(map(str, leaf)): each for leaf, each in leaves_of(("x",), value)}
    planner = DefaultSavePlanner()
    planner.set_up_planner({"x": value})
    assert leaves == planner.state_dict


def test_the_longest_parameter_owns_a_state() -> None:
    assert owner_and_key("a.b.c", {"a", "a.b"}, ".") == ("a.b", "c")
    assert owner_and_key("a.b.c", {"a"}, ".") == ("a", "b.c")
    assert owner_and_key("a.b.c", {"c"}, ".") is None


# --- the command and its memory -------------------------------------------------------------------------------------


def test_the_command_converts_both_ways(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = put_together(run(ranks, "FSDP2 2", save_ours, "SGD", tmp_path))
    path, folder = newest(tmp_path, "ours"), str(tmp_path / "dcp")
    assert main(["ckpt", "convert", str(path), "--to", "dcp", folder]) == 2
    assert "--first" in capsys.readouterr().err
    assert main(["ckpt", "convert", str(tmp_path), "--to", "dcp", folder, "--first", "out.weight"]) == 0
    assert f"{folder}: " in capsys.readouterr().out
    assert main(["ckpt", "convert", folder, "--to", "elastic", str(tmp_path)]) == 2
    assert "give --job" in capsys.readouterr().err
    assert main(["ckpt", "convert", folder, "--to", "elastic", str(tmp_path), "--job", "new", "--force"]) == 2
    assert "--force is only for --to dcp" in capsys.readouterr().err
    assert main(["ckpt", "convert", folder, "--to", "elastic", str(tmp_path), "--job", "new", "--json"]) == 0
    assert f'"dest": "{newest(tmp_path, "new")}"' in capsys.readouterr().out
    for here, _, _ in run(ranks, "plain", load_ours, "SGD", tmp_path, "new"):
        assert differences(here, whole) == []


_MEASURED = """
import sys
def peak():
    with open("/proc/self/status") as status:
        return int(next(line.split()[1] for line in status if line.startswith("VmHWM")))
from elastic_ext.fsdp.checkpoint.export.convert import convert_from_dcp, convert_to_dcp
before, (directions, source, dest) = peak(), sys.argv[1:]
if "to" in directions:
    convert_to_dcp(source, dest)
if directions == "to and from":
    source, dest = dest, dest + " and back"
if "from" in directions:
    convert_from_dcp(source, dest, job="new", step=1)
print(peak() - before)
"""


@pytest.mark.slow
def test_a_tensor_larger_than_the_memory_that_is_allowed_is_converted(tmp_path: Path) -> None:
    shape = (50_000, 2_000)  # 400 MB
    large = torch.zeros(shape)
    large[::1000, 7] = torch.arange(50.0)
    path = make_checkpoint(tmp_path / "step_1", {"large": large}, {"large": by_rows(shape, 3)}, num_ranks=3)
    assert grown_kib("to", path, tmp_path / "to") < 256 * 1024
    found = {"model": {"large": torch.ones(shape)}}
    with told_by_torch():
        load(found, checkpoint_id=tmp_path / "to")
    assert torch.equal(found["model"]["large"], large)
    folder = saved_by_dcp(tmp_path / "dcp", {"model": {"large": large}})
    assert grown_kib("from", folder, tmp_path) < 256 * 1024
    model = nn.Module()
    model.register_buffer("large", found["model"]["large"].fill_(1))
    with ShardCheckpointer(tmp_path, job="new") as checkpointer:
        checkpointer.load(model)
    assert torch.equal(found["model"]["large"], large)


@pytest.mark.parametrize(
    ("num_tensors", "most_kib"), [(1_000, 12 * 1024), pytest.param(60_000, 256 * 1024, marks=pytest.mark.slow)]
)
def test_a_conversion_needs_little_memory_however_many_tensors_there_are(
    tmp_path: Path, num_tensors: int, most_kib: int
) -> None:
    names = [f"model.layers.{number}.mlp.experts.gate_proj.weight" for number in range(num_tensors)]
    tensors = {name: torch.full((3,), float(number)) for number, name in enumerate(names)}
    layout = by_rows((3,), 1)
    path = make_checkpoint(tmp_path / "step_1", tensors, dict.fromkeys(names, layout), num_ranks=1)
    assert grown_kib("to and from", path, tmp_path / "dcp") < most_kib
    if num_tensors > 1_000:  # and what this library has not written, which says less
        folder = saved_by_dcp(tmp_path / "theirs", {"model": tensors})
        assert grown_kib("from", folder, tmp_path) < most_kib
    last = DcpFolder(tmp_path / "dcp").tensors[f"model.{names[-1]}"]
    assert tuple(last.shape) == (3,) and newest(tmp_path / "dcp and back", "new").name == "step_1"


def grown_kib(direction: str, source: Path, dest: Path) -> int:
    """By how much a process that converts grows beyond what its imports take."""
    arguments = [direction, str(source), str(dest)]
    done = subprocess.run([sys.executable, "-c", _MEASURED, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
