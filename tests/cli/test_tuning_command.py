"""elastic-ext tuning, and what else on a command line is about the tuner."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_ext.agent.arguments import parse
from elastic_ext.agent.journal import Journal
from elastic_ext.agent.master.embedded import OwnMaster, master_choice, tuning_mode
from elastic_ext.cli import main
from elastic_ext.cli.master import decision_words, moment_words
from elastic_ext.master.credentials import make_token
from elastic_ext.master.store import JobStore
from elastic_ext.master.tuning import event_text
from elastic_ext.master.wire import master_pb2 as wire
from elastic_ext.ranks.deadlines import Backoff
from elastic_ext.ranks.processes import this_process
from elastic_ext.records.agent import MASTER_FILE, MasterRecord
from tests.agent.status.test_agent_status import write_all
from tests.master.test_master_store import event_of
from tests.support.job_facts import made_facts
from tests.support.masters import MasterThread, master_on_thread, until
from tests.support.ports import free_port
from tests.support.tuned import Scripted, decision_of, reported

FACTS = made_facts(world_size=2)


@pytest.fixture(autouse=True)
def _no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ELASTIC_EXT_MASTER", "ELASTIC_EXT_TOKEN_FILE", "ELASTIC_EXT_RUN_DIR", "PET_TUNING", "PET_MASTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where jobs are found
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")


@pytest.fixture
def strategy() -> Scripted:
    first = decision_of(outcome="kept", measured=176.5, version=1)
    second = decision_of(2, kind="hold", changes={}, reason="rank 1 told nothing", before=None, predicted=None)
    return Scripted(
        answers={
            "see": lambda _: [first, second],
            "pause": lambda made: [decision_of(3, kind="pause", changes={}, reason=made.all("pause")[0][0])],
        }
    )


@pytest.fixture
def master(tmp_path: Path, strategy: Scripted) -> Iterator[MasterThread]:
    for made in master_on_thread(tmp_path, "--tuning", "auto", tuner=strategy.made):
        caller = made.caller()
        caller.join()
        caller.beat(facts=FACTS.to_json(), workers=[reported(0), reported(1)])
        yield made


def ran(master: MasterThread, *arguments: str) -> int:
    return main(["tuning", *arguments, "--master", master.address, "--token-file", str(master.token_file)])


# ---- elastic-ext tuning ----


def test_the_log_says_what_was_decided_why_and_what_came_of_it(
    master: MasterThread, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(master, "log") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("  1  ") and lines[0].endswith("  probe    version 1  kept")
    assert [each.strip() for each in lines[1:4]] == [
        "dataloader.num_workers=2",
        "samples are waited for",
        "100 samples/s before, 180 samples/s predicted, 176.5 samples/s measured",
    ]
    assert lines[4].endswith("  hold") and lines[5].strip() == "rank 1 told nothing"
    assert lines[-1] == "the tuner's mode is auto; it is probing: the tuner tries what may be faster"


def test_the_master_of_the_only_job_that_runs_is_asked(
    master: MasterThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, process in (("runs", this_process()), ("died", replace(this_process(), start_ticks=1))):
        write_all(tmp_path / "cache" / "elastic_ext" / name, process, job=name)
    assert main(["tuning", "log"]) == 2
    assert "runs has no master.json" in capsys.readouterr().err
    record = MasterRecord(
        address=master.address, token_file=str(master.token_file), ca_file="", pid=0, job_id="", epoch=1, time=0.0
    )
    (tmp_path / "cache" / "elastic_ext" / "runs" / MASTER_FILE).write_text(record.to_json())
    for words in ([], ["--job", "runs"]):
        assert main(["tuning", "log", *words]) == 0
        assert "samples are waited for" in capsys.readouterr().out
    assert main(["tuning", "log", "--job", "died"]) == 2
    assert "died has no master.json" in capsys.readouterr().err


def test_after_the_end_of_a_job_the_log_shows_what_its_own_master_has_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "cache" / "elastic_ext" / "died"
    write_all(run_dir, replace(this_process(), start_ticks=1), job="died")
    store = JobStore(run_dir / "master")
    begun = event_of(1, time=1001.5, rank=0, step=0, kind="training-began")
    decisions = [decision_of(outcome="kept", measured=176.5, version=1), decision_of(2, kind="settle")]
    store.keep(decisions=decisions, events=[begun])
    store.close()
    assert main(["tuning", "log"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("  probe    version 1  kept") and "settle" in lines[5]
    assert lines[4] == f"--- a new training began {moment_words(1001.5)}"
    assert lines[-1] == "the job's master has ended; its tuner had made 2 decisions"
    assert main(["tuning", "log", "--job", "died", "--last", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["number"] == 2
    store = JobStore(run_dir / "master")
    store.keep(decisions=[decision_of(3, kind="pause", changes={})])
    store.close()
    assert main(["tuning", "log"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("its tuner had made 3 decisions, and was paused")
    assert main(["tuning", "pause", "--job", "died"]) == 2
    assert "died has no master.json" in capsys.readouterr().err
    (run_dir / "master" / "master.db").write_bytes(b"no database" * 100)
    assert main(["tuning", "log"]) == 1
    assert "master.db cannot be read: file is not a database" in capsys.readouterr().err


def began(time: float, rank: int = 0, step: int = 0) -> wire.JobEvent:
    return wire.JobEvent(time=time, node_id="a", rank=rank, step=step, kind="training-began", text="training begins")


def test_the_log_says_where_a_new_training_of_the_job_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decisions = [decision_of(number, kind="hold", changes={}) for number in range(1, 4)]  # at 1001, 1002 and 1003 s
    strategy = Scripted(answers={"see": lambda _: decisions})
    for made in master_on_thread(tmp_path, "--tuning", "auto", tuner=strategy.made):
        caller = made.caller()
        caller.join()
        first, second, third = began(1000.5), began(1002.5), began(1003.5)
        others = [began(1002.6, rank=1), began(1001.5, step=7)]  # which goes on after a step
        ranks = [reported(0), reported(1)]
        caller.beat(facts=FACTS.to_json(), workers=ranks, events=[first, second, *others], first_event=1)
        assert ran(made, "log") == 0
        lines = capsys.readouterr().out.splitlines()
        (line,) = [number for number, each in enumerate(lines) if "a new training began" in each]
        assert lines[line] == f"--- a new training began {moment_words(1002.5)}"
        assert lines[line + 1].startswith("  3  ") and any(each.startswith("  2  ") for each in lines[:line])
        assert ran(made, "log", "--json") == 0
        found = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
        assert [each["training_began"] for each in found] == [1000.5, 1000.5, 1002.5]
        caller.beat(events=[third], first_event=5)
        assert ran(made, "log", "--last", "1") == 0
        assert capsys.readouterr().out.splitlines()[-2] == (
            f"--- a new training began {moment_words(1003.5)}, and the tuner has decided nothing yet"
        )


def test_a_job_that_is_found_is_told_by_name_and_the_master_of_another_job_refuses(
    master: MasterThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "cache" / "elastic_ext" / "runs"
    record = MasterRecord(
        address=master.address, token_file=str(master.token_file), ca_file="", pid=0, job_id="", epoch=1, time=0.0
    )
    write_all(run_dir, this_process(), job="j")
    (run_dir / MASTER_FILE).write_text(record.to_json())
    assert main(["tuning", "pause"]) == 0
    assert capsys.readouterr().out.startswith(f"told the master of job j at {master.address}\n")
    assert main(["tuning", "resume", "--job", "runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["job"], found["master"]) == ("j", master.address)
    write_all(run_dir, this_process(), job="runs")
    assert main(["tuning", "pause"]) == 2
    assert "this master is of job 'j', not of 'runs'" in capsys.readouterr().err


def test_the_log_as_json_is_an_object_for_each_decision(
    master: MasterThread, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(master, "log", "--json") == 0
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["changes"] == {"dataloader.num_workers": 2} and first["measured"] == 176.5
    assert second["version"] is None and second["outcome"] == ""
    assert ran(master, "log", "--json", "--last", "1") == 0
    assert json.loads(capsys.readouterr().out)["number"] == 2


def test_people_have_it_pause_with_a_reason_and_go_on(
    master: MasterThread, strategy: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(master, "pause", "--reason", "I measure by myself") == 0
    out = capsys.readouterr().out
    assert "pause" in out and "I measure by myself" in out and "the tuner's mode is auto" in out
    assert strategy.all("pause") == [("I measure by myself",)]
    assert ran(master, "resume", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["decisions"] == [] and found["status"]["mode"] == "auto"
    assert ran(master, "undo") == 0
    assert "the tuner has decided nothing on this request" in capsys.readouterr().out and strategy.names()[-1] == "undo"


def test_without_a_master_it_is_said_what_to_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tuning", "log"]) == 2
    assert "allowed: --master ADDR" in capsys.readouterr().err
    assert main(["tuning", "log", "--master", f"127.0.0.1:{free_port()}"]) == 1
    assert "no master answers" in capsys.readouterr().err


def test_a_master_whose_tuner_is_off_refuses_and_says_how_to_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for made in master_on_thread(tmp_path, "--tuning", "off"):
        assert ran(made, "pause") == 2
        assert "tuning.mode=advise" in capsys.readouterr().err
        assert ran(made, "log") == 0
        assert "the tuner's mode is off" in capsys.readouterr().out


def test_status_has_a_line_of_the_tuner(master: MasterThread, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--master", master.address, "--token-file", str(master.token_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [each for each in lines if each.startswith("  tuner")]
    assert line.split(maxsplit=1)[1] == "auto, probing: the tuner tries what may be faster"


def test_words_of_a_decision_cannot_steer_a_terminal() -> None:
    decision = wire.TuningDecision(number=1, kind="probe", reason="\x1b[2Jgone", changes={"user.x": "{not json"})
    assert "\x1b" not in decision_words(decision) and "{not json" in decision_words(decision)
    assert "\x1b" not in event_text(decision_of(reason="\x1b[2Jgone\n"))


# ---- elastic-run --tuning ----


def mode(*arguments: str) -> str:
    options = parse([*arguments, "train.py"], {})
    return tuning_mode(options, master_choice(options))


def test_an_own_master_advises_unless_something_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mode("--standalone") == mode() == mode("--master", "somewhere:1") == "advise"
    assert mode("--standalone", "--tuning=auto") == "auto"
    assert mode("--standalone", "--tuning", "OFF") == mode("--tuning=off") == "off"
    monkeypatch.setenv("PET_TUNING", "auto")
    assert mode("--standalone") == "auto"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--standalone", "--tuning=on"], "--tuning is 'on'; allowed: off, advise, auto"),
        (["--tuning=auto"], "there is no master that could tune; --standalone starts one, --master names one"),
        (["--standalone", "--master=off", "--tuning=advise"], "there is no master"),
        (["--master=head:7788", "--tuning=auto"], "the master at head:7788 has a --tuning of its own"),
    ],
)
def test_what_cannot_be_asked_of_it_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mode(*arguments)


def test_an_own_master_is_told_the_mode(tmp_path: Path) -> None:
    """As a process that writes down what it was given."""
    make_token(tmp_path / "master.token")
    backoff = Backoff(random.Random(1), first_seconds=0.1, most_seconds=0.2)
    command = ("/bin/sh", "-c", f'echo "$@" > {tmp_path}/told; sleep 60', "sh")
    own = OwnMaster(tmp_path, "j", Journal(tmp_path), backoff, tuning="auto", command=command)
    try:
        own.find()
        told = tmp_path / "told"
        assert "--tuning auto" in until(lambda: told.exists() and told.read_text())
    finally:
        own.close()
