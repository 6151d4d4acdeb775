"""Makes what lies here, by the library as it is: for the first time, or after a change of a format that was meant.

    python -m tests.saved.make

A job of two ranks runs under elastic-run, installed from a wheel, with a config of four versions. Its checkpoint and
its run directory are kept as they are, but for the machine's name and addresses and the folder's; its master's store
is kept as SQL. What is pinned by name (public, commands, metrics and config.json, keys.md) is edited by hand.
"""

from __future__ import annotations

import json
import shutil
import socket
import sqlite3
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.test_installed import Installed, asked_of_master, master, read_by_commands

HERE = Path(__file__).resolve().parent
AWAY = ("*.lock", "place", "incarnation", "logs", "master", "master.*", "stacks-*")
"""What is no record of a job, or secret."""
NAMES = {"host": "node-a", "folder": "/jobs/saved"}


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        (folder / "of-wheel").mkdir()
        installed = Installed(folder / "of-wheel")
        told = ran_in(folder, installed)
        for name in ("run", "storage"):
            shutil.rmtree(HERE / name, ignore_errors=True)
        write_json("expected.json", told["facts"])
        shutil.copytree(folder / "storage", HERE / "storage", ignore=shutil.ignore_patterns("*.lock"))
        shutil.copytree(folder / "run", HERE / "run", ignore=shutil.ignore_patterns(*AWAY))
        with closing(sqlite3.connect(folder / "run" / "master" / "master.db")) as store:
            (version,) = store.execute("PRAGMA user_version").fetchone()
            for node, record in store.execute("SELECT node_id, record FROM nodes").fetchall():
                values = json.loads(record)
                values["hardware"] = json.dumps(without_addresses(json.loads(values["hardware"])))
                store.execute("UPDATE nodes SET record = ? WHERE node_id = ?", (json.dumps(values), node))
            script = "\n".join([f"PRAGMA user_version = {version};", *store.iterdump(), ""])
        (HERE / "master.sql").write_text(elsewhere(script, folder))
        hardware = HERE / "run" / "hardware.json"
        hardware.write_text(json.dumps(without_addresses(json.loads(hardware.read_text()))))
        for path in [*(HERE / "run").iterdir(), *(HERE / "storage").rglob("RUN.json")]:
            path.write_text(elsewhere(path.read_text(), folder))
        write_outputs(folder, installed)


def ran_in(folder: Path, installed: Installed) -> dict[str, Any]:
    """What rank 0 of the job tells."""
    shutil.copy(HERE / "job.py", folder)
    environ = {**installed.environ, "ELASTIC_EXT_RUN_DIR": f"{folder}/run", "ELASTIC_EXT_JOB": "saved"}
    for change in (
        ["set", "optimizer.learning_rate=0.125", "user.note=one", "--reason", "a start"],
        ["set", "optimizer.learning_rate=0.25", "user.names=[1, null, [true]]", "--at-step", "1", "--reason", "faster"],
        ["undo"],
        ["set", "optimizer.learning_rate=0.25", "--reason", "faster after all"],
    ):
        subprocess.run([installed.script("elastic-ext"), "config", *change], env=environ, check=True)
    (folder / "seen").touch()
    command = [installed.script("elastic-run"), "--standalone", "--nproc-per-node=2", f"{folder}/job.py", str(folder)]
    done = subprocess.run(command, env=environ, text=True, stdout=subprocess.PIPE)
    (told, *_) = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    found: dict[str, Any] = json.loads(told.removeprefix("told "))
    return found


def write_outputs(folder: Path, installed: Installed) -> None:
    """What commands tell of all that."""
    for name in ("run", "storage"):
        shutil.copytree(HERE / name, installed.folder / name)
    told = read_by_commands(installed)
    with master(installed, folder / "again") as address:
        told |= asked_of_master(installed, "--master", address)
    write_json("outputs.json", told)


def without_addresses(hardware: dict[str, Any]) -> dict[str, Any]:
    hardware["network"] |= {"host_addresses": ["127.0.0.1"], "interfaces": []}
    hardware["system"] |= {"kernel": "6.1.0", "boot_id": "0"}
    hardware["storage"] = []
    return hardware


def elsewhere(text: str, folder: Path) -> str:
    return text.replace(str(folder), NAMES["folder"]).replace(socket.gethostname(), NAMES["host"])


def write_json(name: str, value: object) -> None:
    (HERE / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
