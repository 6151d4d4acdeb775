"""elastic-ext tuning memory: what it prints of a job's memory, of which sizes and plans, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ext.cli import main
from elastic_ext.cli.memory import Asked, limit_of, memory_record, memory_words, predicted
from elastic_ext.config.keys import TuningSection
from elastic_ext.records.agent import AgentRecord
from elastic_ext.records.metrics import JobFacts, MemoryFacts, PassesMemory
from elastic_ext.tuner.memory import JobMemory
from elastic_ext.tuner.space import point_of
from tests.support.job_facts import made_facts

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = ("no_shard", "shard_grad_op", "full_shard", "hybrid_shard")
NO_SHARD = {"parallelism.strategy": "no_shard", "dataloader.batch_size": 4}


def passes(size: int, ratio: float) -> PassesMemory:
    """Of a sample a MiB, half of it where all is computed again."""
    most = int(size * MIB * (1 - ratio / 2))
    return PassesMemory(
        micro_batch=size,
        activation_checkpoint=ratio,
        forward_bytes=most,
        loss_bytes=most // 2,
        backward_bytes=most,
        with_gradients_bytes=most,
    )


MEMORY = MemoryFacts(
    source="fake",
    parameter_bytes=12 * MIB,
    gradient_bytes=12 * MIB,
    optimizer_bytes=24 * MIB,
    buffer_bytes=1 * MIB,
    block_bytes=1 * MIB,
    update_bytes=MIB // 2,
    flops_per_sample=2_500_000,
    block_activation_bytes=(3 * MIB // 4, MIB // 2, MIB // 2),
    passes=tuple(passes(size, ratio) for size in (1, 64) for ratio in (0.0, 1.0)),
)


def facts_of(memory: MemoryFacts | None = MEMORY, **changes: Any) -> JobFacts:
    return made_facts(**{"memory": memory, "values": NO_SHARD, "share": 8, "device": "cuda", **changes})


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ELASTIC_EXT_MASTER", "ELASTIC_EXT_RUN_DIR", "ELASTIC_EXT_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Shell:
    """Runs the command on one run directory in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        self.out = self.err = ""

    def write(self, facts: JobFacts, config: Mapping[str, Any] | None = None) -> None:
        (self.folder / "job.json").write_text(facts.to_json())
        if config is not None:
            (self.folder / "config.json").write_text(json.dumps({"version": 1, **config}))

    def __call__(self, *arguments: str, place: tuple[str, ...] | None = None) -> int:
        try:
            status = main(["tuning", "memory", *((str(self.folder),) if place is None else place), *arguments])
        except SystemExit as error:  # what argparse refuses
            status = int(str(error.code))
        self.out, self.err = self._capsys.readouterr()
        return status

    def record(self, *arguments: str) -> dict[str, Any]:
        assert self("--json", *arguments) == 0, self.err
        found: dict[str, Any] = json.loads(self.out)
        return found


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    folder = tmp_path / "run"
    folder.mkdir()
    return Shell(folder, capsys)


# ---- what it tells ----


def test_it_says_what_the_model_takes_and_the_peak_of_every_size_by_every_strategy(run: Shell) -> None:
    run.write(facts_of(replace(MEMORY, capacity_bytes=100 * MIB, scale=1.04), time=0.0))
    assert run() == 0
    lines = run.out.splitlines()
    assert lines[0].startswith(
        "memory: worked out on tensors without memory, corrected by a factor of 1.04 from measured steps"
    )
    assert [line.split(maxsplit=1)[1] for line in lines[1:3]] == ["12.0 MiB", "12.0 MiB"]
    assert "  optimizer state 24.0 MiB" in lines and "  buffers         1.00 MiB" in lines
    assert "  FLOPs           2.5e+06 for a sample" in lines
    assert "  activations     512 KiB to 768 KiB of a sample in each of 3 blocks" in lines
    assert "  limit           94.0 MiB: 100 MiB of the device, less 6% of headroom" in lines
    heading = lines.index("peak of a rank, by samples at once")
    assert lines[heading + 1].split() == ["samples", "no_shard", "shard_grad_op", "full_shard", "hybrid_shard/4"]
    assert [line.split()[0] for line in lines[heading + 2 : heading + 6]] == ["1", "2", "4", "8"]
    assert lines[-1] == "* now"


def test_all_numbers_are_those_that_the_tuner_has(run: Shell) -> None:
    facts = facts_of(choices={"parallelism.strategy": ("no_shard", "full_shard"), "parallelism.shard_degree": (2,)})
    run.write(facts)
    found = run.record("--activation-checkpoint", "0", "--activation-checkpoint", "0.5")
    memory, point = JobMemory(facts), point_of(facts.values)
    expected = [
        (size, strategy, ratio, peak.num_bytes, peak.passes_bytes)
        for ratio in (0.0, 0.5)
        for size in (1, 2, 4, 8)
        for strategy in ("no_shard", "full_shard")
        if (peak := memory.peak(point._replace(batch_size=size, strategy=strategy, activation_checkpoint=ratio)))
    ]
    names = ("micro_batch", "strategy", "activation_checkpoint", "peak_bytes", "passes_bytes")
    assert [tuple(each[name] for name in names) for each in found["peaks"]] == expected and len(expected) == 16
    assert found["source"] == "fake" and found["block_activation_bytes"] == list(MEMORY.block_activation_bytes)
    assert found["flops_per_sample"] == 2_500_000 and found["parameter_bytes"] == 12 * MIB
    assert [each["micro_batch"] for each in found["peaks"] if each["is_present"]] == [4]


def test_by_shares_of_blocks_there_is_a_table_each(run: Shell) -> None:
    run.write(facts_of(choices={}))
    assert run("--activation-checkpoint", "0", "--activation-checkpoint", "0.25", "--activation-checkpoint", "1") == 0
    headings = [line for line in run.out.splitlines() if line.startswith("peak of a rank")]
    words = ["no block computed again", "25% of blocks computed again", "all blocks computed again"]
    assert headings == [f"peak of a rank, by samples at once, {each}" for each in words]


def test_one_size_by_one_plan_is_asked_for(run: Shell) -> None:
    facts = facts_of(choices={})
    run.write(facts)
    arguments = ("--strategy", "hybrid_shard", "--shard-degree", "2", "--unit", "3", "--activation-checkpoint", "0.5")
    (found,) = run.record("--micro-batch", "3", *arguments)["peaks"]
    point = point_of(facts.values)._replace(
        batch_size=3, strategy="hybrid_shard", shard_degree=2, unit=3, activation_checkpoint=0.5
    )
    peak = JobMemory(facts).peak(point)
    assert peak is not None and found["peak_bytes"] == peak.num_bytes
    assert (found["strategy"], found["shard_degree"], found["unit"]) == ("hybrid_shard", 2, 3)
    (found,) = run.record("--micro-batch", "3", "--strategy", "full_shard", "--unit", "whole")["peaks"]
    assert (found["shard_degree"], found["unit"]) == (4, facts.num_blocks)
    assert run("--micro-batch", "3", "--shard-degree", "2", "--unit", "3") == 0
    assert "hybrid_shard/2, unit 3" in run.out


def test_hybrid_shard_has_a_column_for_each_degree_that_the_job_can_have(run: Shell) -> None:
    degrees = {"parallelism.strategy": ("no_shard", "hybrid_shard"), "parallelism.shard_degree": (2, 4)}
    run.write(facts_of(choices=degrees, world_size=8))
    found = run.record("--micro-batch", "1")["peaks"]
    assert [(each["strategy"], each["shard_degree"]) for each in found] == [
        ("no_shard", 1),
        ("hybrid_shard", 2),
        ("hybrid_shard", 4),
    ]


def test_more_samples_than_a_step_has_now_are_those_of_a_larger_step(run: Shell) -> None:
    facts = facts_of(choices={})
    run.write(facts)
    found = run.record("--micro-batch", "20")
    larger = replace(facts, share=20, global_batch=80)
    peak = JobMemory(larger).peak(point_of(facts.values)._replace(batch_size=20))
    assert peak is not None and found["peaks"][0]["peak_bytes"] == peak.num_bytes
    assert found["peaks"][0]["micro_batch"] == 20
    assert found["notes"] == [
        "a rank has 8 samples of a step, so that 20 at once take a global_batch_size of at least 80"
    ]


def test_of_a_strategy_that_the_job_cannot_have_it_is_said_why(run: Shell) -> None:
    run.write(facts_of(choices={}, fixed={"parallelism.strategy": "the model is wrapped by FSDP1"}))
    assert run("--strategy", "full_shard") == 0
    assert "note: the job cannot change to full_shard while it trains: the model is wrapped by FSDP1" in run.out
    assert run("--strategy", "no_shard") == 0 and "note" not in run.out


# ---- what fits ----


def peak_of(facts: JobFacts, size: int) -> int:
    peak = JobMemory(facts).peak(point_of(facts.values)._replace(batch_size=size))
    assert peak is not None
    return peak.num_bytes


def test_what_does_not_fit_is_marked_by_the_less_of_device_and_config_without_headroom(run: Shell) -> None:
    facts = facts_of(choices={})
    allowed = peak_of(facts, 4)
    memory = replace(MEMORY, capacity_bytes=2 * allowed)
    run.write(facts_of(memory, choices={}), {"tuning": {"memory_bytes": allowed, "headroom": 0.0}})
    found = run.record()
    assert (found["usable_bytes"], found["headroom"]) == (allowed, 0.0)
    assert [each["fits"] for each in found["peaks"]] == [True, True, True, False]
    assert run() == 0
    last = next(line for line in run.out.splitlines() if line.startswith("        8"))
    assert last.endswith(" !") and run.out.splitlines()[-1] == "* now, ! does not fit"
    assert run.out.count(" !") == 2  # and that of the legend
    run.write(facts_of(memory, choices={}), {"tuning": {"memory_bytes": allowed, "headroom": 0.01}})
    assert [each["fits"] for each in run.record()["peaks"]] == [True, True, False, False]
    run.write(facts_of(memory, choices={}), {"tuning": {"memory_bytes": 9 * allowed, "headroom": 0.5}})
    assert run.record()["usable_bytes"] == allowed


def test_without_a_limit_nothing_is_marked_and_it_is_said_how_to_set_one(run: Shell) -> None:
    run.write(facts_of(device="cpu"))
    assert run() == 0
    assert "limit           none is known; tuning.memory_bytes in the config sets one" in run.out
    assert "!" not in run.out
    assert {each["fits"] for each in run.record()["peaks"]} == {None}


def test_what_ran_out_of_memory_is_marked_whatever_is_predicted(run: Shell) -> None:
    choices = {"parallelism.strategy": ("no_shard", "full_shard")}
    run.write(facts_of(replace(MEMORY, capacity_bytes=1000 * MIB), choices=choices, bound=4))
    found = run.record("--activation-checkpoint", "0", "--activation-checkpoint", "1")["peaks"]
    refuted = [(each["micro_batch"], each["strategy"], each["activation_checkpoint"]) for each in found]
    refuted = [each for each, row in zip(refuted, found, strict=True) if row["is_refuted"]]
    assert refuted == [(4, "no_shard", 0.0), (8, "no_shard", 0.0)]
    assert run() == 0
    assert run.out.splitlines()[-1] == "* now, !! memory did not suffice when it was tried"
    assert "MiB* !!" in run.out


def test_the_limit_is_that_of_the_config_which_the_agent_has(run: Shell, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(json.dumps({"version": 3, "tuning": {"memory_bytes": 5 * MIB}}))
    agent = AgentRecord(
        node_id="a",
        job="j",
        run_id="r",
        host="h",
        pid=1,
        start_ticks=1,
        time=1.0,
        version="0",
        config_file=str(elsewhere),
        memory_folder="",
        socket="",
        log_folder="",
    )
    (run.folder / "agent.json").write_text(agent.to_json())
    run.write(facts_of(), {"tuning": {"memory_bytes": MIB}})
    assert run.record()["allowed_bytes"] == 5 * MIB


def test_a_config_that_cannot_be_read_is_named_and_its_limit_left_out(run: Shell) -> None:
    run.write(facts_of())
    (run.folder / "config.json").write_text('{"version": 1, "tuning": {"memory_bytes": "much"}}')
    found = run.record()
    (note,) = found["notes"]
    assert found["usable_bytes"] is None
    assert "config.json cannot be read" in note and "tuning.memory_bytes" in note and "an integer >= 1" in note


# ---- where little is known ----


def test_what_was_measured_says_why_it_was_not_worked_out(run: Shell) -> None:
    memory = replace(
        MEMORY,
        source="measured",
        why_measured="no model_factory was given",
        flops_per_sample=None,
        block_activation_bytes=(),
    )
    run.write(facts_of(memory))
    assert run() == 0
    lines = run.out.splitlines()
    assert lines[0].startswith("memory: measured, by straight lines fitted to what steps have taken")
    assert lines[1] == "  since no model_factory was given"
    assert "  FLOPs           not known" in lines and "  activations     not known by block" in lines
    found = run.record()
    assert found["source"] == "measured" and found["block_activation_bytes"] == []


def test_why_some_sizes_were_not_worked_out_is_said_below_how_the_others_were(run: Shell) -> None:
    run.write(facts_of(replace(MEMORY, why_measured="a step of 1 sample failed")))
    assert run() == 0
    lines = run.out.splitlines()
    assert lines[0].startswith("memory: worked out on tensors without memory")
    assert lines[1] == "  some sizes by lines through others, since a step of 1 sample failed"


@pytest.mark.parametrize(
    ("device", "words"), [("cpu", "tuning.memory_bytes in the config"), ("cuda", "once some have")]
)
def test_where_memory_is_not_predicted_it_is_said_and_what_to_do(run: Shell, device: str, words: str) -> None:
    run.write(facts_of(None, device=device))
    assert run() == 0
    assert run.out.startswith("memory is not predicted: nothing is known yet of what the model's steps take\n")
    assert "model_factory" in run.out and words in run.out and "peak of a rank" not in run.out
    found = run.record()
    assert "model_factory" in found["why_unknown"] and found["parameter_bytes"] is None
    assert {each["peak_bytes"] for each in found["peaks"]} == {None}


def test_where_passes_are_not_known_the_model_is_told_all_the_same(run: Shell) -> None:
    run.write(facts_of(replace(MEMORY, passes=())))
    assert run() == 0
    assert "  parameters      12.0 MiB" in run.out and "memory is not predicted" in run.out
    assert "peak of a rank" not in run.out


# ---- which job ----


def test_the_job_is_that_of_a_folder_a_file_a_node_or_the_environment(
    run: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write(facts_of(), {"tuning": {"memory_bytes": 77}})
    assert run("--json", place=("--file", str(run.folder / "job.json"))) == 0
    assert json.loads(run.out)["allowed_bytes"] == 77
    job = tmp_path / "job"
    for node in ("a", "b"):
        (job / "nodes" / node).mkdir(parents=True)
    os.rename(run.folder / "job.json", job / "nodes" / "b" / "job.json")
    assert run("--json", place=(str(job),)) == 0
    assert json.loads(run.out)["allowed_bytes"] is None
    run.write(facts_of(share=2))
    monkeypatch.setenv("ELASTIC_EXT_RUN_DIR", str(run.folder))
    assert run("--json", place=()) == 0
    assert json.loads(run.out)["share"] == 2


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--micro-batch", "0"], "'0' is given; allowed: an integer >= 1"),
        (["--micro-batch", "few"], "'few' is given; allowed: an integer >= 1"),
        (["--micro-batch", "[1,"], "'[1,' is given; allowed: an integer >= 1"),
        (["--strategy", "sideways"], '"no_shard"'),
        (["--activation-checkpoint", "1.5"], "allowed: a number >= 0 and <= 1"),
        (["--activation-checkpoint", "NaN"], "allowed: a number >= 0 and <= 1"),
        (["--unit", "0"], 'an integer >= 1 (blocks), or "whole"'),
        (["--shard-degree", "3"], "shard_degree: 3 does not divide the 4 ranks; allowed: 1, 2, 4"),
        (["--strategy", "no_shard", "--shard-degree", "2"], "shard_degree is 2 with the strategy no_shard"),
        (["--strategy", "full_shard", "--shard-degree", "2"], "which shards over all 4 ranks"),
        (["--strategy", "no_shard", "--unit", "2"], "unit is 2 with the strategy no_shard, where nothing is gathered"),
        (["--job", "x"], "not allowed with argument"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_with_what_can(run: Shell, arguments: list[str], words: str) -> None:
    run.write(facts_of())
    assert run(*arguments) == 2
    assert words in run.err and run.out == ""


def test_a_share_of_blocks_needs_blocks(run: Shell) -> None:
    run.write(facts_of(num_blocks=0))
    assert run("--activation-checkpoint", "0.5") == 2
    assert "has no repeated blocks that were found or named" in run.err
    assert run("--activation-checkpoint", "0") == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "job.json is damaged, or no job.json: "),
        ('{"time": 1', "is damaged"),
        ("[1]", "not a JSON object"),
        ("{}", "time is missing"),
        (facts_of().to_json().replace('"share":8', '"share":0'), "share"),
        (
            facts_of().to_json().replace(f'"parameter_bytes":{12 * MIB}', '"parameter_bytes":-5'),
            "memory.parameter_bytes",
        ),
        ("x" * (1 << 19), "allowed: 262144"),
        ("\udcff", "codec can't decode"),
        (facts_of().to_json().replace('"micro_batch":1,', '"micro_batch":0,'), "memory.passes has a row of no samples"),
        (
            facts_of().to_json().replace('"activation_checkpoint":1.0', '"activation_checkpoint":1.5'),
            "or of more blocks than there are",
        ),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(run: Shell, text: str, words: str) -> None:
    (run.folder / "job.json").write_bytes(text.encode(errors="surrogateescape"))
    assert run() == 2
    assert words in run.err and len(run.err.splitlines()) == 1 and run.out == ""


def test_what_a_file_says_stays_on_its_line(run: Shell) -> None:
    said = "of this\n  limit           99.0 GiB\x1b[2J"
    run.write(facts_of(replace(MEMORY, source="measured", why_measured=said)))
    assert run() == 0
    assert "  since of this   limit           99.0 GiB [2J" in run.out.splitlines()


def test_where_there_is_no_such_file_it_is_said_who_writes_it(run: Shell, tmp_path: Path) -> None:
    assert run() == 2
    assert "has no job.json, which rank 0 writes on its node after its first steps" in run.err
    assert run(place=(str(tmp_path / "gone"),)) == 2 and "is not a folder" in run.err
    assert run(place=("--file", str(tmp_path / "gone.json"))) == 2 and "No such file" in run.err
    assert run(place=("--file", str(tmp_path))) == 2 and "is not a regular file" in run.err
    assert run(place=()) == 2 and "give one, or set ELASTIC_EXT_RUN_DIR" in run.err


# ---- the decision itself, and the process ----


def test_the_present_degree_is_a_column_beside_those_that_can_be_chosen() -> None:
    values = {**NO_SHARD, "parallelism.strategy": "hybrid_shard"}  # by the ranks of a machine
    facts = facts_of(values=values, choices={"parallelism.shard_degree": (2, 3)}, world_size=8, num_local=4)
    rows = predicted(facts, Asked(micro_batches=(4,)), limit_of(facts, TuningSection()))
    assert [(str(row.plan), row.is_present) for row in rows] == [("hybrid_shard/2", False), ("hybrid_shard/4", True)]


def test_a_plan_that_is_there_twice_is_one_column() -> None:
    values = {**NO_SHARD, "parallelism.strategy": "hybrid_shard", "parallelism.shard_degree": 2}
    choices = {"parallelism.strategy": ("no_shard", "hybrid_shard"), "parallelism.shard_degree": (2,)}
    facts = facts_of(values=values, choices=choices)
    rows = predicted(facts, Asked(micro_batches=(1, 1)), limit_of(facts, TuningSection()))
    assert [str(row.plan) for row in rows] == ["no_shard", "hybrid_shard/2"]


def test_a_default_degree_that_cannot_be_is_left_out_unless_it_is_asked_for() -> None:
    facts = facts_of(choices={"parallelism.strategy": ("no_shard", "hybrid_shard")}, world_size=4, num_local=3)
    limit = limit_of(facts, TuningSection())
    assert {row.plan.strategy for row in predicted(facts, Asked(), limit)} == {"no_shard"}
    with pytest.raises(ValueError, match="the ranks of a machine: 3 does not divide the 4 ranks"):
        predicted(facts, Asked(strategy="hybrid_shard"), limit)


def test_it_runs_as_a_program_without_torch_and_grpc(run: Shell) -> None:
    run.write(facts_of())
    program = (
        "import sys; from elastic_ext.cli import main; status = main(sys.argv[1:]); "
        "sys.exit(status or 9 * bool({'torch', 'grpc', 'numpy'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "tuning", "memory", str(run.folder), "--micro-batch", "8"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "peak of a rank, by samples at once" in done.stdout


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 1 << 40),
    st.integers(1, 64),
    st.integers(1, 8),
    st.sampled_from([None, *STRATEGIES]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.lists(st.sampled_from([None, *STRATEGIES]), max_size=5),
    st.integers(0, 1 << 59),
    st.integers(0, 100),
)
def test_whatever_a_job_is_there_are_words_for_it_and_a_record(
    share: int,
    world_size: int,
    num_local: int,
    strategy: str | None,
    ratio: float,
    strategies: list[str | None],
    num_bytes: int,
    num_blocks: int,
) -> None:
    values = {"parallelism.strategy": strategy, "parallelism.activation_checkpoint": ratio * bool(num_blocks)}
    facts = facts_of(
        replace(MEMORY, parameter_bytes=num_bytes, capacity_bytes=num_bytes),
        values=values,
        choices={"parallelism.strategy": tuple(strategies), "parallelism.shard_degree": (2, 3)},
        share=share,
        world_size=world_size,
        num_local=min(num_local, world_size),
        num_blocks=num_blocks,
    )
    limit = limit_of(facts, TuningSection())
    rows = predicted(facts, Asked(), limit)
    words = memory_words(facts, limit, rows, [], now=facts.time)
    names = {strategy or "no_shard", *(each for each in strategies if each not in (None, "hybrid_shard"))}
    assert {row.plan.strategy for row in rows} - {"hybrid_shard"} == names - {"hybrid_shard"}
    assert sum(row.is_present for row in rows) == 1 and words.count("\n  ") >= 7 + len(
        {row.micro_batch for row in rows}
    )
    json.dumps(memory_record(facts, limit, rows, []), allow_nan=False)
