"""What is run first in a worker's Python steps aside: nothing of it is left for the script, or for what that starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_ext.agent.arguments import AT_START, WorkerPlace, devices_of, environment_of, with_start

SCRIPT = """
import os, subprocess, sys
print(os.environ.get("PYTHONPATH"), any("at_start" in path for path in sys.path), "ELASTIC_EXT_AGENT_PID" in os.environ)
print(sys.excepthook is sys.__excepthook__)
print(getattr(sys.modules.get("sitecustomize"), "OWN", None), flush=True)
subprocess.run([sys.executable, "-c", "import os, sys; print(os.environ.get('PYTHONPATH'), sys.excepthook.__name__)"])
"""


def output_of(path: str | None, *, agent_pid: int, **more: str) -> list[str]:
    environ = with_start({**os.environ, **more}, path, agent_pid)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("path", [None, "/some/where", "/some/where:/else"])
def test_the_script_finds_its_path_as_it_was(path: str | None, tmp_path: Path) -> None:
    lines = output_of(path, agent_pid=os.getpid(), TORCHELASTIC_ERROR_FILE=str(tmp_path / "e"))
    assert lines[0] == f"{path} False False"
    assert lines[1] == "False"  # what ends the script is written
    assert lines[3] == f"{path} excepthook"


def test_a_path_that_is_empty_does_not_become_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("")
    script = tmp_path / "sub" / "script.py"
    script.parent.mkdir()
    script.write_text("import importlib.util; print(importlib.util.find_spec('planted'))")
    environ = with_start(os.environ, "", os.getpid())
    done = subprocess.run([sys.executable, script], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "None\n"


def test_a_process_that_is_no_worker_is_left_alone(tmp_path: Path) -> None:
    lines = output_of(None, agent_pid=1, TORCHELASTIC_ERROR_FILE=str(tmp_path / "e"))
    assert lines[1] == "True"


def test_an_exception_that_cannot_be_told_is_named_all_the_same(tmp_path: Path) -> None:
    script = "class Odd(Exception):\n  def __str__(self): raise RuntimeError\nraise Odd"
    environ = with_start({**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "e")}, None, os.getpid())
    subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True)
    told = json.loads((tmp_path / "e").read_text())["message"]
    assert told["message"].startswith("Odd: ") and "line 3" in told["extraInfo"]["py_callstack"]


def test_of_an_exception_whose_words_say_all_there_is_nothing_more_is_shown(tmp_path: Path) -> None:
    script = "class Refusal(Exception):\n  says_all = True\nraise Refusal('no room')"
    environ = with_start({**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "e")}, None, os.getpid())
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "__main__.Refusal: no room\n")
    told = json.loads((tmp_path / "e").read_text())["message"]
    assert (told["message"], told["extraInfo"]["py_callstack"]) == ("Refusal: no room", "")


FOLLOWS = """
error = RuntimeError("reset\\nby it")
error.follows_from = "rank 1 has ended"
raise error
"""


def test_of_an_exception_that_follows_from_another_ranks_end_one_sentence_is_shown(tmp_path: Path) -> None:
    script, error_file = tmp_path / "train.py", tmp_path / "e"
    script.write_text(FOLLOWS)
    environ = with_start({**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file)}, None, os.getpid())
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True)
    words = f"RuntimeError (train.py, line 4), since rank 1 has ended: reset; the traceback is in {error_file}\n"
    assert (done.returncode, done.stderr) == (1, words)
    told = json.loads(error_file.read_text())["message"]
    assert told["message"] == "RuntimeError: reset\nby it" and "line 4" in told["extraInfo"]["py_callstack"]


def test_a_traceback_that_cannot_be_written_is_shown(tmp_path: Path) -> None:
    script, error_file = tmp_path / "train.py", tmp_path / "e"
    script.write_text(f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n{FOLLOWS}")
    environ = with_start({**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file)}, None, os.getpid())
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True)
    assert done.stderr.startswith("Traceback (most recent call last)")
    assert done.stderr.endswith("RuntimeError: reset\nby it\n")
    assert not error_file.exists(), "torch's agent raises at one that is no JSON"


def test_a_sitecustomize_of_the_machines_own_is_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("OWN = 5\n")
    assert output_of(str(tmp_path), agent_pid=os.getpid())[2] == "5"


def test_where_a_sitecustomize_of_the_machines_own_raises_exceptions_are_still_written(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('its own trouble')\n")
    environ = with_start({**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "e")}, str(tmp_path), os.getpid())
    done = subprocess.run(
        [sys.executable, "-c", "raise ValueError('ours')"], env=environ, capture_output=True, text=True
    )
    assert "its own trouble" in done.stderr, "Python tells of it as it does without this library"
    assert json.loads((tmp_path / "e").read_text())["message"]["message"] == "ValueError: ours"


def test_virtual_local_ranks_see_one_device_each() -> None:
    assert devices_of(1, visible=None, is_virtual=False) == {}
    assert devices_of(1, visible="4,5", is_virtual=False) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert devices_of(1, visible=None, is_virtual=True) == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"}
    assert devices_of(1, visible="4, 5", is_virtual=True) == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "5"}
    with pytest.raises(ValueError, match="local rank 2 has none"):
        devices_of(2, visible="4,5", is_virtual=True)


def test_places_are_told_in_torchruns_words() -> None:
    place = WorkerPlace(
        rank=5,
        local_rank=1,
        role_rank=5,
        group_rank=2,
        world_size=8,
        local_world_size=2,
        role_world_size=8,
        group_world_size=3,
        role="trainer",
        master_addr="host",
        master_port=29500,
        restart_count=1,
        max_restarts=3,
        run_id="job",
        use_agent_store=True,
    )
    environ = environment_of(place)
    assert environ["RANK"] == "5" and environ["GROUP_RANK"] == "2" and environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert AT_START.joinpath("sitecustomize.py").is_file()
