"""A key of the config is one row, and so is a sharding strategy: each is added, in a copy of the library, by its row
alone; and the files that name one are counted.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from elastic_ext import ConfigError, ElasticConfig, ParallelPlan
from elastic_ext.cli import main
from elastic_ext.config.keys import KEYS, TuningSection, key_table
from elastic_ext.strategies import STRATEGIES, StrategyName, strategies_in_words
from elastic_ext.tuner.explain import change_in_words
from elastic_ext.tuner.space import Point, shape_of, space_of
from tests.support.job_facts import ALL_CHOICES, made_facts

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = {path.relative_to(ROOT / "elastic_ext").as_posix(): path for path in (ROOT / "elastic_ext").rglob("*.py")}
SECONDS = 240.0

KEY = "dataloader.read_ahead_mb"
KEY_ROW = """
    read_ahead_mb: int | None = row(
        Integer(1, 512),
        "MiB of files read ahead",
        knob=TunerKnob(words="{} MiB read ahead", cost="workers", choices=(16, 64)),
    )"""
STRATEGY = "half_shard"
STRATEGY_ROW = f"""
STRATEGIES: Mapping[str, Sharding] = {{
    "{STRATEGY}": Sharding(has_degree=True),
"""

NAMING_PIN_MEMORY: Mapping[str, str] = {
    "config/keys.py": "its row",
    "data/loader.py": "puts it in force",
    "tuner/space.py": "what it makes of a step, and where it makes nothing",
}
NAMING_TORCHS: Mapping[str, str] = {
    "fsdp/checkpoint/saving/staging.py": "an argument of torch.empty",
    "torch_private/loading.py": "a module of torch's loader",
}
DECIDING_BY_STRATEGY: Mapping[str, set[str]] = {
    "no_shard": {"strategies.py", "fsdp/reshard/sharded_model.py", "tuner/space.py"},
    "shard_grad_op": {"strategies.py", "fsdp/reshard/sharded_model.py"},
    "full_shard": {"strategies.py", "fsdp/reshard/sharded_model.py"},
    "hybrid_shard": {"strategies.py", "fsdp/reshard/sharded_model.py", "cli/memory.py"},
}
"""Beside its row: how a model is known again that lies by it; and where a person or a job says nothing."""


# --- a row that is added --------------------------------------------------------------------------------------------


def told_of_the_key() -> dict[str, Any]:
    """What a library with the row of the key makes of it."""
    from elastic_ext.training.batches import Batches
    from elastic_ext.tuner.performance_model import columns_of
    from elastic_ext.tuner.search import Switching

    config = ElasticConfig.parse(json.dumps({"version": 1, "dataloader": {"read_ahead_mb": 64}}).encode())
    with pytest.raises(ConfigError) as refused:
        ElasticConfig.parse(json.dumps({"version": 1, "dataloader": {"read_ahead_mb": 513}}).encode())
    main(["config", "set", f"{KEY}=64", "--file", "config.json"])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["config", "show", "--file", "config.json"])
    facts = made_facts(choices={KEY: ()}, values={KEY: 32})
    free, bounded = (space_of(facts, TuningSection(knobs=knobs)) for knobs in (None, {KEY: (16, 32)}))
    columns = columns_of(free.points, facts)
    return {
        "values": config.values(),
        "refused": [str(each) for each in refused.value.refusals],
        "shown": json.loads(printed.getvalue()),
        "documented": [line for line in key_table().splitlines() if KEY in line],
        "choices": [free.choices["read_ahead_mb"], bounded.choices["read_ahead_mb"]],
        "words": change_in_words(Point(read_ahead_mb=64), Point()),
        "seconds": Switching(facts).seconds(Point(read_ahead_mb=32), [Point(read_ahead_mb=64)]).tolist(),
        "apart": [len({*columns.shape_ids.tolist()}), len({*map(tuple, columns.features.tolist())})],
        "without a loader": Batches(micro_batch_size=4, global_batch_size=16).check(config),
    }


def told_of_the_strategy() -> dict[str, Any]:
    """What a library with the row of the strategy makes of it."""
    plan = ParallelPlan(STRATEGY, shard_degree=2)  # type: ignore[arg-type]
    choices = {**ALL_CHOICES, "parallelism.strategy": ("no_shard", STRATEGY), "parallelism.shard_degree": (2, 4)}
    facts = made_facts(choices=choices, world_size=8)
    of_it = [point for point in space_of(facts, TuningSection()).points if point.strategy == STRATEGY]
    with pytest.raises(ConfigError) as refused:
        ElasticConfig.from_values({"parallelism.strategy": "quarter_shard"})
    return {
        "values": ElasticConfig.from_values({"parallelism.strategy": STRATEGY}).values(),
        "refused": [str(each) for each in refused.value.refusals],
        "degrees": [plan.degrees(8, 4).replicate, plan.degrees(8, 4).shard],
        "gathers again": plan.reshards_after_forward,
        "tried by": sorted({(point.shard_degree, shape_of(point, facts).shard_degree) for point in of_it}),
    }


def in_a_copy(folder: Path, file: str, before: str, after: str, what: str) -> Any:
    """What a function of this file tells with a copy of the library, in which one place of one file is another."""
    copy = folder / "elastic_ext"
    shutil.copytree(ROOT / "elastic_ext", copy)  # with what is compiled of it, which stays valid
    text = (copy / file).read_text(encoding="utf-8")
    assert text.count(before) == 1
    (copy / file).write_text(text.replace(before, after), encoding="utf-8")
    script = f"import json; from tests.config import test_rows; print(json.dumps(test_rows.{what}()))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_key_is_added_by_its_row_alone(tmp_path: Path) -> None:
    after = "\n\n\n@dataclass(frozen=True, kw_only=True, slots=True)\nclass OptimizerSection(Section):"
    told = in_a_copy(tmp_path, "config/keys.py", after, KEY_ROW + after, "told_of_the_key")
    assert told["values"] == {KEY: 64}
    assert told["refused"] == [f"{KEY} is 513; allowed: an integer >= 1 and <= 512"]
    assert told["shown"] == {"version": 1, "dataloader": {"read_ahead_mb": 64}}
    assert told["documented"] == [f"| `{KEY}` | an integer >= 1 and <= 512 | MiB of files read ahead |"]
    assert told["choices"] == [[16, 32, 64], [16, 32]]
    assert told["words"] == "64 MiB read ahead instead of the default"
    assert told["seconds"] == [pytest.approx(0.4)], "it waits for workers, as other keys of their cost do"
    assert told["apart"] == [3, 3], "points that differ by it are others to the search, which learns what it does"
    assert told["without a loader"].startswith("read_ahead_mb cannot change: no dataloader was given to the trainer")


def test_a_sharding_strategy_is_added_by_its_row_alone(tmp_path: Path) -> None:
    before = "\nSTRATEGIES: Mapping[str, Sharding] = {\n"
    told = in_a_copy(tmp_path, "strategies.py", before, STRATEGY_ROW, "told_of_the_strategy")
    assert told["values"] == {"parallelism.strategy": STRATEGY}
    allowed = f'"{STRATEGY}", {strategies_in_words()}'
    assert told["refused"] == [f'parallelism.strategy is "quarter_shard"; allowed: one of {allowed}']
    assert told["degrees"] == [4, 2] and told["gathers again"] is False
    assert told["tried by"] == [[2, 2], [4, 4]]


# --- files that name one --------------------------------------------------------------------------------------------


def test_a_key_that_a_tuner_chooses_is_named_in_three_files() -> None:
    found = {name for name, path in SOURCES.items() if re.search(r"\bpin_memory\b", path.read_text(encoding="utf-8"))}
    assert found - {*NAMING_TORCHS} == {*NAMING_PIN_MEMORY} and found >= {*NAMING_TORCHS}
    pages = {path.name for path in (ROOT / "docs").glob("*.md") if "pin_memory" in path.read_text(encoding="utf-8")}
    assert pages == {"configuration.md", "data.md"}, "the table of keys, and what the loader makes of it"


@functools.cache
def texts_of(file: str) -> frozenset[object]:
    """The whole strings of a file."""
    nodes = ast.walk(ast.parse(SOURCES[file].read_text(encoding="utf-8")))
    return frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


@pytest.mark.parametrize("name", STRATEGIES)
def test_code_that_decides_by_the_name_of_a_strategy_is_in_three_files(name: str) -> None:
    """Messages and docstrings may name it; a whole string is what is compared with it, or made of it."""
    found = {file for file in SOURCES if name in texts_of(file)}
    assert found == DECIDING_BY_STRATEGY[name]


def test_a_type_checker_knows_the_strategies_that_have_a_row() -> None:
    assert get_args(StrategyName) == tuple(STRATEGIES)


def test_words_of_a_knob_have_one_place_for_its_value() -> None:
    assert [path for path, key in KEYS.items() if key.knob is not None and key.knob.words.count("{}") != 1] == []
