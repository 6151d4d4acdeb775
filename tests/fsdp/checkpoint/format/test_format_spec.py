"""docs/checkpoint_format.md is what the code writes: a reader made from the page alone reads it, bit for bit, and finds
what was changed; the page's example is a checkpoint, and the one that the library saves; its tables are the code's.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from elastic_ext import CheckpointInterval, ElasticTrainer, FollowOptions
from elastic_ext.fsdp import ShardCheckpointer
from elastic_ext.fsdp.checkpoint.folder.commit import Commit
from elastic_ext.fsdp.checkpoint.format.json_text import ITEM_BYTES
from elastic_ext.fsdp.checkpoint.format.metadata import Kind
from elastic_ext.fsdp.value_encoding import name_of, pack
from tests.support import format_reader
from tests.support.documents import fenced_blocks
from tests.support.format_reader import Damaged, Newer, newest, read_checkpoint
from tests.support.ranks import RankPool
from tests.support.spread import SPREADS, Everything, State, places_in, put_together, state_here, train
from tests.support.thinning import the_first
from tests.support.training import make_data, make_model

PAGE = Path(__file__).resolve().parents[4] / "docs" / "checkpoint_format.md"
NUM_STEPS = 2


# --- the second reader, beside what was saved -----------------------------------------------------------------------


def save_spread(rank: int, name: str, folder: Path) -> State:
    """Save a model of all sorts, spread over ranks; what this rank has of it. It is saved twice, to find the newest."""
    places = places_in(SPREADS[name])
    model = SPREADS[name].wrap(Everything(7))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)]
    with ShardCheckpointer(folder, job=name) as checkpointer:
        checkpointer.save(0, model)
        train(model, optimizers, NUM_STEPS)
        checkpointer.save(NUM_STEPS, model, optimizers, {"name": name, "order": torch.arange(5)})
    return state_here(model, optimizers, places)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize(
    "name", the_first(["FSDP1 2", "TP x FSDP 2x2", "plain", "FSDP2 3", "FSDP2 2 by columns", "HSDP 2x2"], 2), ids=str
)
def test_a_reader_made_from_the_page_finds_every_bit_that_was_saved(ranks: RankPool, tmp_path: Path, name: str) -> None:
    whole = put_together(ranks.run(SPREADS[name].num_ranks, save_spread, name, tmp_path))
    read = newest(tmp_path, name)
    assert (read.path.name, read.commit["global_step"], read.commit["num_ranks"]) == (
        f"step_{NUM_STEPS}",
        NUM_STEPS,
        SPREADS[name].num_ranks,
    )
    found = {**read.tensors["model"], **read.tensors["optim"]}
    assert found["out.weight"] == found["again.weight"]  # tied
    expected = {key: value[1] for key, value in whole.items() if isinstance(value, tuple)}
    shapes = {key: tuple(tensor.shape) for key, tensor in Everything(7).state_dict().items()}
    for key, tensor in expected.items():
        assert found[key].data == bytes_of(tensor), key
        assert found[key].dtype == name_of(tensor.dtype)
        owner, _, state = key.rpartition("/")
        assert found[key].shape == (() if state == "step" else shapes[owner or state])
    assert found.keys() - expected.keys() == {"out.weight"}
    assert read.tensors["extra"]["extra/order"].data == bytes_of(torch.arange(5))
    assert read.state["extra"] == {"name": name, "order": {"!": "tensor", "of": "extra/order"}}


def test_the_ways_that_are_read_have_cut_points_of_several_ranks_and_boxes_of_two_dimensions(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(4, save_spread, "TP x FSDP 2x2", tmp_path)
    meta = json.loads((newest(tmp_path, "TP x FSDP 2x2").path / "model_meta.json").read_text())
    assert any(len(layout.get("cuts", ())) > 2 for layout in meta["layouts"])
    assert any(len(start) == 2 for layout in meta["layouts"] for _, start, _ in layout.get("boxes", ()))


def save_replicas(rank: int, folder: Path) -> dict[str, bytes]:
    """Replicas of a model that is large enough for them to share out what they write."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(200, 300))
    with ShardCheckpointer(folder, job="replicas/and é") as checkpointer:
        checkpointer.save(1, model)
    return {name: bytes_of(tensor) for name, tensor in model.module.state_dict().items()}


def test_replicas_that_wrote_a_part_each_are_read_as_one(ranks: RankPool, tmp_path: Path) -> None:
    (saved, _, _) = ranks.run(3, save_replicas, tmp_path)
    read = newest(tmp_path, "replicas/and é")
    assert {name: tensor.data for name, tensor in read.tensors["model"].items()} == saved
    assert len(read.commit["shards"]) == 3


def test_a_trainers_checkpoint_has_the_names_and_values_of_the_page(tmp_path: Path) -> None:
    model = make_model(torch.float32)
    dataloader = DataLoader(TensorDataset(*make_data(32, torch.float32)), batch_size=8)
    trainer = ElasticTrainer(
        model,
        dataloader,
        global_batch_size=16,
        shared_storage_path=tmp_path,
        checkpoint_interval=CheckpointInterval(epochs=1),
        follow_options=FollowOptions(job="a trainer's", run_dir=tmp_path / "run"),
    )
    with trainer:
        average = {"w.x/y": torch.arange(3.0)}
        trainer.register_state("e.m/a", average)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer, scheduler = trainer.prepare(inner, torch.optim.lr_scheduler.StepLR(inner, 3))
        with trainer.epoch(0):
            for inputs, _ in dataloader:
                with trainer.step():
                    model(inputs).sum().backward()
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    read = newest(tmp_path, "a trainer's")
    assert read.path.name == "epoch_1" and read.commit["epoch"] == read.state["counts"]["epoch"] == 1
    assert {f"`{key}`" for key in read.state} == keys_of("## Plain values", of=("both", "a trainer"))
    assert read.tensors["extra"]["registered/e.m%2Fa/w.x/y"].data == bytes_of(average["w.x/y"])
    prefixes = set(re.findall(r"`(\w+)/", section("### Names").partition("| `extra`")[2]))
    assert {name.partition("/")[0] for name in read.tensors["extra"]} <= prefixes
    assert json.loads(read.tensors["extra"]["random/0/python"].data)[0] == 3


# --- what was changed -----------------------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The checkpoint of the page, put together from what stands there."""
    folder = tmp_path / "step_3"
    folder.mkdir()
    for file, data in files_of_the_page().items():
        (folder / file).write_bytes(data)
    return folder


@pytest.mark.parametrize("every", the_first([7, 1]))
def test_a_bit_that_is_flipped_is_found_in_any_byte(example: Path, every: int) -> None:
    for path in sorted(example.iterdir()):
        data = path.read_bytes()
        for at in range(0, len(data), every):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            with pytest.raises((Damaged, Newer)):
                read_checkpoint(example)
        path.write_bytes(data)
    read_checkpoint(example)


def test_bits_that_are_flipped_in_a_sharded_checkpoint_are_found(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(3, save_spread, "FSDP2 3", tmp_path)
    folder = newest(tmp_path, "FSDP2 3").path
    assert len(list(folder.glob("*.safetensors"))) == 7  # one of `extra`, which the first rank has
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        path.unlink()  # some are links
        for at in {0, len(data) // 3, 4096, len(data) // 2, len(data) - 9, len(data) - 1} & set(range(len(data))):
            path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
            with pytest.raises((Damaged, Newer)):
                read_checkpoint(folder)
        path.write_bytes(data)
    read_checkpoint(folder)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b" ", lambda data: b"", None])
def test_a_file_that_is_cut_lengthened_emptied_or_missing_is_found(
    example: Path, change: Callable[[bytes], bytes] | None
) -> None:
    for path in sorted(example.iterdir()):
        data = path.read_bytes()
        path.unlink()
        if change is not None:
            path.write_bytes(change(data))
        with pytest.raises(Damaged, match=path.name):
            read_checkpoint(example)
        path.write_bytes(data)


def test_a_shard_file_of_another_save_is_found(tmp_path: Path) -> None:
    with ShardCheckpointer(tmp_path, job="twice") as checkpointer:
        first, second = (checkpointer.save(step, nn.Linear(3, 3)) for step in (1, 2))
    file = "model_param.00000-00001.safetensors"
    shutil.copy(first / file, second / file)
    with pytest.raises(Damaged, match=rf"step_2/{file}: its generation"):
        newest(tmp_path, "twice")


@pytest.mark.parametrize("kind", ["COMMIT", "the metadata", "a shard file"])
def test_a_newer_format_is_not_called_damaged(example: Path, kind: str) -> None:
    files = files_of_the_page()
    shard, meta = "model_param.00000-00001.safetensors", "model_meta.json"
    changed = {"COMMIT": "COMMIT", "the metadata": meta, "a shard file": shard}[kind]
    files[changed] = files[changed].replace(b'"format": 1', b'"format": 2').replace(b'format":"1"', b'format":"2"')
    for file, data in sealed_again(files).items():
        (example / file).write_bytes(data)
    with pytest.raises(Newer, match=changed):
        read_checkpoint(example)


# --- the example ----------------------------------------------------------------------------------------------------


def test_the_example_is_a_checkpoint_that_the_library_loads(example: Path, tmp_path: Path) -> None:
    model = nn.Module()
    model.table = nn.Parameter(torch.full((2, 3), 9.0))
    model.tied = model.table
    model.register_buffer("seen", torch.tensor(0))
    with ShardCheckpointer(tmp_path / "other", job="other") as checkpointer:
        loaded = checkpointer.load(model, path=example)
    assert loaded.step == 3 and loaded.extra["note"] == "hello" and loaded.extra["sizes"] == (2, 3)
    assert loaded.extra["order"].tolist() == [2, 0, 1]
    assert torch.equal(model.table, torch.arange(6.0).reshape(2, 3)) and int(model.seen) == 7  # type: ignore[arg-type]
    read = read_checkpoint(example)
    assert read.tensors["model"]["tied"].data == bytes_of(torch.arange(6.0))


def test_the_example_is_what_the_library_writes(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    (code,) = [block.code for block in fenced_blocks(section("## A small checkpoint")) if block.language == "python"]
    exec(compile(code, str(PAGE), "exec"), namespace)
    folder: Path = namespace["folder"]
    shown = files_of_the_page()
    written = {file.name: file.read_bytes() for file in folder.iterdir()}
    ids = {  # what is another with each save
        pattern: match.group()
        for pattern in (rb'"generation": "\w+"', rb'"id": "\w+"', rb'"saved_at": "[^"]+"', rb'"versions": {[^}]*}')
        if (match := re.search(pattern, shown["COMMIT"])) is not None
    }
    generations = [json.loads(files["COMMIT"])["generation"].encode() for files in (written, shown)]
    written = {file: data.replace(*generations) for file, data in written.items()}
    for pattern, value in ids.items():
        written["COMMIT"] = re.sub(pattern, value, written["COMMIT"])
    assert sealed_again(written) == shown


def test_the_numbers_about_the_example_are_right() -> None:
    text, files = section("## A small checkpoint"), files_of_the_page()
    assert f"the {len(files['COMMIT']) - 52} bytes before the last comma" in text
    for file in ("model", "extra"):
        data = files[f"{file}_param.00000-00001.safetensors"]
        header = data[8 : 8 + int.from_bytes(data[:8], "little")]
        assert f"with {len(header) - len(header.rstrip(b' '))} spaces after it" in text
        assert data[:8].hex(" ") in text and len(header) == 4088


def files_of_the_page() -> dict[str, bytes]:
    """The files of the example, from the blocks in which the page shows them."""
    text = section("## A small checkpoint")
    blocks = [block for block in fenced_blocks(text) if block.language in ("json", "text")]
    assert [block.language for block in blocks] == ["json"] * 5 + ["json", "text"] * 2
    names = ("COMMIT", "model_meta.json", "optim_meta.json", "extra_meta.json")
    files = {name: block.code.encode() + b"\n" for name, block in zip(names, blocks, strict=False)}
    files["trainer_state.json"] = blocks[4].code.encode()
    for kind, header, data in (("model", blocks[5], blocks[6]), ("extra", blocks[7], blocks[8])):
        encoded = header.code.encode().ljust(4088)
        files[f"{kind}_param.00000-00001.safetensors"] = (
            len(encoded).to_bytes(8, "little") + encoded + bytes.fromhex(data.code)
        )
    assert all(f"`{name}`" in text for name in files)
    return files


def sealed_again(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The same with checksums that are right, as the page says they are made."""
    commit = json.loads(files["COMMIT"])
    for file in commit["metas"]:
        commit["metas"][file] = xxhash.xxh3_128_hexdigest(files[file])
    for file, said in commit["states"].items():
        said["num_bytes"], said["checksum"] = len(files[file]), xxhash.xxh3_128_hexdigest(files[file])
    for file, said in commit["shards"].items():
        data = files[file]
        start = 8 + int.from_bytes(data[:8], "little")
        table = json.loads(data[8:start])["elastic_ext.checksums"]["data_offsets"][0]
        said["num_bytes"], said["checksum"] = len(data), xxhash.xxh3_128_hexdigest(data[:start] + data[start + table :])
    del commit["checksum"]
    body = json.dumps(commit, indent=1).encode()[:-2]
    return {**files, "COMMIT": body + b',\n "checksum": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()}


# --- the tables -----------------------------------------------------------------------------------------------------


def section(heading: str) -> str:
    """A page's section, to the next heading of its level or above."""
    text = PAGE.read_text(encoding="utf-8")
    level = heading.split()[0]
    _, _, rest = f"\n{text}".partition(f"\n{heading}\n")
    assert rest, f"{PAGE} has no section {heading!r}"
    end = re.search(rf"^#{{1,{len(level)}}} ", rest, re.MULTILINE)
    return rest if end is None else rest[: end.start()]


def rows(heading: str) -> list[list[str]]:
    """The cells of the tables of a section, without their heads."""
    found = [line for line in section(heading).splitlines() if line.startswith("|")]
    heads = [at for at, line in enumerate(found) if set(line) <= set("|- ")]
    skipped = {place for at in heads for place in (at - 1, at)}
    return [[cell.strip() for cell in line.strip("|").split("|")] for at, line in enumerate(found) if at not in skipped]


def keys_of(heading: str, *, of: Sequence[str]) -> set[str]:
    return {cells[0] for cells in rows(heading) if cells[1] in of}


def named_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_fields_of_commit_on_the_page_are_the_codes() -> None:
    shown = [named_in(cells[0])[0] for cells in rows("## COMMIT")]
    assert shown == ["format", *Commit.__dataclass_fields__, "checksum"]
    assert set(shown) == format_reader.COMMIT_KEYS


def test_the_dtypes_and_kinds_on_the_page_are_the_codes() -> None:
    shown = {dtype: int(size) for size, dtypes in rows("### Dtypes") for dtype in named_in(dtypes)}
    assert shown == ITEM_BYTES == format_reader.ITEM_BYTES
    assert [named_in(cells[0])[0] for cells in rows("### Kinds")] == list(get_args(Kind))


def test_the_kinds_of_plain_values_on_the_page_are_the_codes() -> None:
    values: list[object] = [(1,), {1}, frozenset({1}), torch.Size([1]), deque([1], 2), {1: 2}, OrderedDict(a=1)]
    values += [Counter("a"), float("nan"), float("-inf"), 1 + 2j, b"1", torch.float32, torch.device("cpu")]
    values += [torch.ones(1), torch.ones(1).numpy()]
    marks = set()
    for value in values:
        packed = pack(value, "value", {})
        assert isinstance(packed, dict) and packed.keys() - {"!", "of"} <= {"most"}
        marks.add(packed["!"])
    _, _, table = section("## Plain values").partition("| `!` |")
    shown = {mark for line in table.splitlines() if line.startswith("| `") for mark in named_in(line.split("|")[1])}
    assert shown == marks
