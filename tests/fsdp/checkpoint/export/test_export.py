"""Exports: what plain safetensors, and Hugging Face's reading of an index, find in them; damage, kills, full disks and
little memory.

transformers is not installed here: ``from_pretrained`` below reads a folder in the way and order in which it does.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from elastic_ext.cli import main
from elastic_ext.cli.ckpt import size_of
from elastic_ext.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from elastic_ext.fsdp import ShardCheckpointer
from elastic_ext.fsdp.checkpoint.export.safetensors import INDEX, Renaming, export_checkpoint, is_weights_file
from elastic_ext.fsdp.checkpoint.format.copy import TARGETS, Target
from elastic_ext.fsdp.checkpoint.format.json_text import ITEM_BYTES
from elastic_ext.fsdp.value_encoding import dtype_of
from tests.support.made import by_columns, by_rows, make_checkpoint, on_one
from tests.support.ranks import RankPool
from tests.support.spread import SPREADS, Everything, State, any_bits, differences, places_in, put_together, state_here
from tests.support.syscalls import at_call, failure
from tests.support.thinning import the_first

NUM_RANKS = 3
ALIASES = {"tied.weight": "a.weight"}
ODD = 'é "quoted"/with a\nline, and 漢字'


def tensors_of_all_kinds() -> dict[str, torch.Tensor]:
    tensors = {f"of.{name}": any_bits((7, 5), dtype_of(name), seed) for seed, name in enumerate(ITEM_BYTES)}
    tensors["a.weight"] = any_bits((6, 4, 3), torch.bfloat16, 100)
    tensors["b.weight"] = any_bits((3000, 41), torch.float32, 101)
    tensors["number"] = any_bits((), torch.float32, 102)
    tensors["count"] = any_bits((), torch.int64, 103)
    tensors["none"] = any_bits((0, 3), torch.float16, 104)
    tensors[ODD] = any_bits((11,), torch.float64, 105)
    return tensors


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return tensors_of_all_kinds()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of three ranks, which have tensors by rows, by columns, and whole."""
    ways = [by_rows, by_columns, on_one]
    layouts = {
        name: ways[place % 3](tensor.shape, NUM_RANKS) if tensor.dim() and tensor.numel() else on_one(tensor.shape, 3)
        for place, (name, tensor) in enumerate(tensors.items())
    }
    path = tmp_path_factory.mktemp("made") / "step_1"
    return make_checkpoint(path, tensors, layouts, num_ranks=NUM_RANKS, aliases=ALIASES)


def from_pretrained(folder: Path) -> dict[str, torch.Tensor]:
    """As transformers reads the weights of a model: one file if it is there, else the files that the index names."""
    if (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        index = json.loads((folder / INDEX).read_text())
        assert set(index) == {"metadata", "weight_map"}
        files = sorted(set(index["weight_map"].values()))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(folder / file, framework="pt") as opened:
            assert opened.metadata().get("format") == "pt"
            for name in list(opened.keys()):
                assert name not in found
                found[name] = opened.get_tensor(name)
    return found


def assert_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert bits(found[name]) == bits(tensor), name


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def with_aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, **{alias: tensors[name] for alias, name in ALIASES.items()}}


# --- what is in it --------------------------------------------------------------------------------------------------


def test_every_tensor_of_three_ranks_is_exported_bit_for_bit(
    made: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    exported = export_checkpoint(made, tmp_path / "out")
    assert exported.files == ("model.safetensors",)
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors", INDEX]
    assert_bits(from_pretrained(tmp_path / "out"), with_aliases(tensors))
    assert_bits(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), with_aliases(tensors))
    assert exported.num_bytes == sum(tensor.nbytes for tensor in with_aliases(tensors).values())
    assert exported.num_tensors == len(with_aliases(tensors))


def test_shards_are_as_large_as_they_may_be_and_the_index_names_all(
    made: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    exported = export_checkpoint(made, tmp_path / "out", max_shard_bytes=600)
    out = tmp_path / "out"
    assert exported.files == tuple(
        f"model-{n:05d}-of-{len(exported.files):05d}.safetensors" for n in range(1, len(exported.files) + 1)
    )
    assert len(exported.files) > 5
    for file in exported.files:
        held = safetensors.torch.load_file(out / file)
        assert sum(tensor.nbytes for tensor in held.values()) <= 600 or set(held) == {"b.weight"}
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == exported.num_bytes
    assert all(name in safetensors.torch.load_file(out / file) for name, file in index["weight_map"].items())
    assert_bits(from_pretrained(out), with_aliases(tensors))


def train_nothing(rank: int, spread: str, folder: Path) -> State:
    """Save a model that is spread over ranks; what is in it."""
    places = places_in(SPREADS[spread])
    model = SPREADS[spread].wrap(Everything(5))
    with ShardCheckpointer(folder, job=spread) as checkpointer:
        checkpointer.save(1, model)
    return state_here(model, [], places)


@pytest.mark.parametrize("spread", ["FSDP2 3", "FSDP1 2", "FSDP2 2 by columns"])
def test_a_model_that_ranks_have_saved_loads_into_a_bare_one(ranks: RankPool, tmp_path: Path, spread: str) -> None:
    whole = put_together(ranks.run(SPREADS[spread].num_ranks, train_nothing, spread, tmp_path / "storage"))
    with ShardCheckpointer(tmp_path / "storage", job=spread) as checkpointer:
        path = checkpointer.latest()
    assert path is not None
    export_checkpoint(path, tmp_path / "out", max_shard_bytes=100)
    bare = Everything(1)
    bare.load_state_dict(from_pretrained(tmp_path / "out"))  # strict: all names, those of tied weights too
    assert differences(state_here(bare, [], places_in(SPREADS["plain"])), whole) == []


def test_tied_weights_written_once_are_loaded_as_safetensors_does(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

    torch.manual_seed(3)
    model = Tied()
    weight = model.first.weight.detach().clone()
    path = make_checkpoint(
        tmp_path / "step_1",
        {"first.weight": weight},
        {"first.weight": on_one((4, 4), 1)},
        num_ranks=1,
        aliases={"second.weight": "first.weight"},
    )
    export_checkpoint(path, tmp_path / "once", tied="once")
    file = tmp_path / "once" / "model.safetensors"
    assert set(safetensors.torch.load_file(file)) == {"first.weight"}
    other = Tied()
    assert not any(safetensors.torch.load_model(other, file))  # strict
    assert torch.equal(other.second.weight, weight)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "second.weight": "first.weight"}


@pytest.mark.parametrize("target", TARGETS)
def test_floats_are_cast_and_nothing_else(
    made: Path, tensors: dict[str, torch.Tensor], tmp_path: Path, target: Target
) -> None:
    export_checkpoint(made, tmp_path / "out", dtype=target)
    found = from_pretrained(tmp_path / "out")
    assert found["b.weight"].dtype == found["of.F8_E4M3"].dtype == found["number"].dtype == dtype_of(target)
    assert found["none"].dtype == dtype_of(target)
    for name, tensor in with_aliases(tensors).items():
        if tensor.is_floating_point():
            expected = tensor.to(torch.float64).to(dtype_of(target))
            if tensor.dtype == torch.float64 and target == "BF16":  # torch rounds that twice
                continue
            assert torch.equal(found[name].isnan(), expected.isnan())
            assert torch.equal(found[name].nan_to_num(7.0), expected.nan_to_num(7.0)), name
        else:
            assert bits(found[name]) == bits(tensor)


# --- names ----------------------------------------------------------------------------------------------------------


def test_names_lose_prefixes_and_then_have_patterns_replaced_one_by_one() -> None:
    renaming = Renaming(
        strip_prefixes=["_orig_mod.", "model."], replacements=[(r"^h\.(\d+)", r"layers.\1"), ("w$", "weight")]
    )
    assert renaming.names(["_orig_mod.model.h.3.w", "model.h.10.b", "head.w"]) == {
        "_orig_mod.model.h.3.w": "layers.3.weight",
        "model.h.10.b": "layers.10.b",
        "head.w": "head.weight",
    }


@pytest.mark.parametrize(
    ("renaming", "words"),
    [
        (Renaming(replacements=[("[ab]$", "c")]), "'x.a' and 'x.b' are both renamed 'x.c'"),
        (Renaming(replacements=[("nowhere", "c")]), "the pattern 'nowhere' changes none of 2 names, such as x.a, x.b"),
        (Renaming(strip_prefixes=["y."]), "the prefix 'y.' changes none"),
        (Renaming(replacements=[("(", "c")]), "cannot be replaced"),
        (Renaming(replacements=[("x", r"\2")]), "cannot be replaced"),
        (Renaming(replacements=[("x.a", "__metadata__")]), "cannot be named"),
    ],
)
def test_names_that_cannot_be_are_refused(renaming: Renaming, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        renaming.names(["x.a", "x.b"])


def test_what_is_renamed_is_renamed_in_files_and_index(
    made: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    export_checkpoint(made, tmp_path / "out", strip_prefixes=["of."], renames=[("weight", "kernel")], max_shard_bytes=9)
    expected = {
        name.removeprefix("of.").replace("weight", "kernel"): tensor for name, tensor in with_aliases(tensors).items()
    }
    assert_bits(from_pretrained(tmp_path / "out"), expected)


# --- folders --------------------------------------------------------------------------------------------------------


def test_an_earlier_export_is_replaced_with_force_alone_and_other_files_stay(
    made: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export_checkpoint(made, out, max_shard_bytes=9)
    (out / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds an export already"):
        export_checkpoint(made, out)
    assert_bits(from_pretrained(out), with_aliases(tensors))
    export_checkpoint(made, out, force=True)
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors", INDEX]
    assert_bits(from_pretrained(out), with_aliases(tensors))


def test_what_is_no_checkpoint_or_no_place_for_an_export_is_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        export_checkpoint(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(CheckpointError, match="is a checkpoint"):
        export_checkpoint(made, made)
    job = tmp_path / "fsdp_checkpoint" / "job_1"
    job.mkdir(parents=True)
    (tmp_path / "link").symlink_to(job)
    for place in (job, job / "step_9", job / "step_9" / "out", tmp_path / "link" / "out"):
        with pytest.raises(CheckpointError, match="lies among the checkpoints of a job"):
            export_checkpoint(made, place)
    assert list(job.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        export_checkpoint(made, tmp_path / "no" / "parent")
    with pytest.raises(ValueError, match="dest is '', as where a variable is not set"):
        export_checkpoint(made, "")
    with pytest.raises(ValueError, match="tied is 'twice'; allowed: all, once"):
        export_checkpoint(made, tmp_path / "to", tied="twice")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="force is 'no'; allowed: True, False"):
        export_checkpoint(made, tmp_path / "to", force="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_shard_bytes is 0"):
        export_checkpoint(made, tmp_path / "out", max_shard_bytes=0)
    wrong: Any = "INT8"
    with pytest.raises(ValueError, match="F32, F16, BF16"):
        export_checkpoint(made, tmp_path / "out", dtype=wrong)
    assert not (tmp_path / "out").exists()


def test_state_of_modules_that_is_no_tensor_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.zeros(2)
    path = make_checkpoint(
        tmp_path / "step_1", {"w": weight}, {"w": on_one((2,), 1)}, num_ranks=1, extra_states={"a._extra_state": 1}
    )
    assert export_checkpoint(path, tmp_path / "out").left_out == ("a._extra_state",)
    assert "a._extra_state" in caplog.text


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_every_damaged_file_is_noticed_and_nothing_is_left(made: Path, tmp_path: Path) -> None:
    for file in sorted(made.iterdir()):
        if file.stem.startswith(("optim", "extra")):
            continue
        kept = file.read_bytes()
        changed = bytearray(kept)
        changed[len(changed) * 2 // 3] ^= 4
        file.write_bytes(changed)
        with pytest.raises(CheckpointDamaged, match=file.name):
            export_checkpoint(made, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        file.write_bytes(kept)
    export_checkpoint(made, tmp_path / "out")


def test_a_full_disk_is_one_error_and_leaves_nothing(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    with at_call(-1, failure(errno.ENOSPC), counts=may_need_room) as calls:
        export_checkpoint(made, out, max_shard_bytes=4000)
    for name in filter(is_weights_file, os.listdir(out)):
        os.unlink(out / name)
    for number in range(1, len(calls.names)):  # the first is of the mark that the checkpoint is being read
        with (
            pytest.raises(OSError, match=f"No space left on device; .* is removed: '{out}") as raised,
            at_call(number, failure(errno.ENOSPC), counts=may_need_room),
        ):
            export_checkpoint(made, out, max_shard_bytes=4000)
        assert raised.value.errno == errno.ENOSPC
        assert os.listdir(out) == ["config.json"]
    assert number > 20


def may_need_room(name: str) -> bool:
    return name in ("write", "fsync", "link")


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_exports_and_tells_what_it_has_written(
    made: Path, tensors: dict[str, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ["--rename", "^of=from", "--max-shard-size", "1kB", "--strip-prefix", "b."]
    assert main(["ckpt", "export", str(made), str(out), "--json", *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["dest"] == str(out) and told["tensors"] == len(tensors) + 1 and told["left_out"] == []
    assert sorted([*told["files"], INDEX]) == sorted(os.listdir(out))
    assert {"from.F32", "weight", "tied.weight"} < set(from_pretrained(out))
    assert main(["ckpt", "export", str(made), str(out)]) == 2
    assert "holds an export already" in capsys.readouterr().err
    assert main(["ckpt", "export", str(made), str(out), "--force", "--dtype", "bf16", "--tied", "once"]) == 0
    assert "out: 25 tensors" in capsys.readouterr().out
    assert main(["ckpt", "export", str(made), str(out), "--force", "--rename", "never=x"]) == 2
    assert "changes none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500MiB", 500 << 20), ("12", 12), ("1.5k", 1500), ("2tib", 2 << 40)]
)
def test_sizes_are_read_as_hugging_face_does(text: str, size: int) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "0", "5 GB", "5XB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        size_of(text)


# --- processes ------------------------------------------------------------------------------------------------------

_KILLS = """
import os, shutil, sys, tempfile
from pathlib import Path
from elastic_ext.fsdp.checkpoint.export.safetensors import export_checkpoint
from elastic_ext.fsdp.checkpoint.export.safetensors import INDEX
from tests.support.syscalls import every_kill

made, folder, has_earlier = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "True"
stride = int(sys.argv[4])
earlier, later = {}, dict(max_shard_bytes=40_000, force=True)

def files_in(path):
    return {one.name: one.read_bytes() for one in path.iterdir() if not one.name.startswith(".")}

def export(path, options):
    export_checkpoint(made, path, **options)
    return files_in(path)

wholes = [export(folder / "earlier", earlier), export(folder / "later", later)]
dests, seen = [], []

def prepare():
    dests.append(Path(tempfile.mkdtemp(dir=folder)))
    if has_earlier:
        export(dests[-1], earlier)
    return lambda: export(dests[-1], later)

def check(number):
    there = files_in(dests[-1])
    if INDEX in there:
        assert there in wholes, sorted(there)
    if "model.safetensors" in there:
        assert there["model.safetensors"] == wholes[0]["model.safetensors"]
    seen.append(wholes.index(there) if there in wholes else None)
    assert export(dests[-1], later) == wholes[1]
    assert set(os.listdir(dests[-1])) == set(wholes[1]), "something was left"
    shutil.rmtree(dests[-1])

every_kill(prepare, check, stride=stride)
assert "torch" not in sys.modules
assert seen[0] == (0 if has_earlier else None) and seen[-1] == 1
print(len(seen))
"""


@pytest.mark.parametrize(("has_earlier", "stride"), the_first([(True, 4), (True, 1), (False, 1)]))
def test_an_export_that_is_killed_at_any_call_leaves_a_whole_one_or_none(
    tmp_path: Path, tensors: dict[str, torch.Tensor], has_earlier: bool, stride: int
) -> None:
    few = {name: tensors[name] for name in ("a.weight", "b.weight", "none")}
    layouts = {name: by_rows(tensor.shape, 2) for name, tensor in few.items()}
    path = make_checkpoint(tmp_path / "step_1", few, layouts, num_ranks=2)
    assert int(run_alone(_KILLS, str(path), str(tmp_path), str(has_earlier), str(stride))) > 50 // stride


_MEASURED = """
import json, sys
from elastic_ext.fsdp.checkpoint.export.safetensors import export_checkpoint
export_checkpoint(sys.argv[1], sys.argv[2], dtype=sys.argv[3] or None)
assert "torch" not in sys.modules
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize("dtype", the_first(["BF16", ""]))
def test_a_tensor_larger_than_the_memory_that_is_allowed_is_exported(tmp_path: Path, dtype: str) -> None:
    shape = (50_000, 2_000)  # 400 MB
    large = torch.zeros(shape)
    large[::1000, 7] = torch.arange(50.0)
    path = make_checkpoint(tmp_path / "step_1", {"large": large}, {"large": by_columns(shape, 3)}, num_ranks=3)
    peak_kib = int(run_alone(_MEASURED, str(path), str(tmp_path / "out"), dtype))
    assert peak_kib < 256 * 1024
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as opened:
        assert torch.equal(opened.get_tensor("large"), large.to(torch.bfloat16) if dtype else large)


def run_alone(script: str, *arguments: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout
