"""Run the benchmarks: ``python -m benchmarks [NAME ...] [--list] [--minutes] [--short] [--gpu] [--record]``.

Each runs in a process of its own, one after another, and prints its tables. The exit status is 1 where a claim fails.
``--record`` puts the tables in the place of those recorded before, in benchmarks/results/ (benchmarks/recording.py).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import datetime
import importlib
import inspect
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import Result, table, this_machine
from benchmarks.plan import SHORT_SHARE, in_words, on_gpu
from benchmarks.recording import CommitError, commit_of, is_commit, record_of, write_record

FOLDER = Path(__file__).resolve().parent


def defines_main(source: str) -> bool:
    """Whether a module's text defines a ``main`` at its top that needs nothing: which makes it a benchmark."""
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return any(each.name == "main" and len(each.args.args) == len(each.args.defaults) for each in functions)


def benchmarks_in(sources: Mapping[str, str]) -> list[str]:
    """The names of the benchmarks among some modules, sorted."""
    return sorted(name for name, source in sources.items() if not name.startswith("_") and defines_main(source))


def known_benchmarks() -> list[str]:
    """The names of all benchmarks, sorted."""
    return benchmarks_in({path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")})


def run_one(name: str, given: argparse.Namespace) -> int:
    """Run one benchmark in this process and print its tables; 1 where a claim fails, else 0."""
    module = importlib.import_module(f"benchmarks.{name}")
    run = module.main_on_gpu if given.gpu else module.main
    if given.gpu and not _has_gpu():
        sys.stderr.write(f"torch sees no GPU here: what {name} has for one was not run\n")
        return 1
    is_short = given.short and "share" in inspect.signature(run).parameters
    began = time.monotonic()
    results: Sequence[Result] = run(share=SHORT_SHARE) if is_short else run()
    seconds = time.monotonic() - began
    for result in results:
        sys.stdout.write(f"\n{table(result)}")
    sys.stdout.write(f"\n{name} took {seconds:.0f} s\n")
    sys.stdout.flush()
    if given.record:
        machine = this_machine()
        record = record_of(
            name,
            results,
            date=datetime.date.today().isoformat(),
            commit=given.commit,
            command=f"python -m benchmarks {' '.join([name, *_flags(given)])}",
            form="short" if is_short else "whole",
            machine=dataclasses.replace(machine, accelerator=machine.accelerator if given.gpu else None),
            seconds=seconds,
        )
        sys.stdout.write(f"recorded in {write_record(record)}: make results\n")
    return int(any(verdict == "fail" for result in results for verdict in result.verdicts))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _flags(given: argparse.Namespace) -> list[str]:
    return [f"--{flag}" for flag in ("short", "gpu", "record") if getattr(given, flag)]


def main(arguments: Sequence[str]) -> int:
    """0 where every benchmark ran and no claim failed, else 1."""
    known = known_benchmarks()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run the benchmarks, one after another.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run; all by default: {', '.join(known)}")
    parser.add_argument("--list", action="store_true", help="name the benchmarks and run none")
    parser.add_argument("--minutes", action="store_true", help="say about what they would take, and run none")
    parser.add_argument("--short", action="store_true", help="fewer rounds, trials and jobs where a benchmark is long")
    parser.add_argument("--gpu", action="store_true", help="what needs a GPU alone, in the order of what it proves")
    parser.add_argument("--record", action="store_true", help="put the tables into benchmarks/results/")
    parser.add_argument("--commit", help="with --record where there is no git: the commit whose files these are")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.names) - set(known))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are: {', '.join(known) or 'none'}")
    possible = list(on_gpu()) if given.gpu else known
    cannot = sorted(set(given.names) - set(possible))
    if cannot:
        parser.error(f"nothing of {', '.join(cannot)} needs a GPU; with --gpu there are: {', '.join(possible)}")
    names: list[str] = given.names or possible
    if given.list:
        sys.stdout.write("".join(f"{name}\n" for name in names))
        return 0
    if given.minutes:
        sys.stdout.write(in_words(names, is_short=given.short))
        return 0
    if given.commit is not None and not is_commit(given.commit):
        parser.error(f"--commit is {given.commit!r}; allowed: all forty digits of one: git rev-parse HEAD")
    if given.record and given.commit is None:
        try:
            given.commit = commit_of(FOLDER.parent)
        except CommitError as error:
            parser.error(str(error))
    if len(names) == 1:
        return run_one(names[0], given)
    failed = []
    began = time.monotonic()
    for name in names:
        sys.stdout.write(f"\n== {name}\n")
        sys.stdout.flush()
        flags = [*_flags(given), *(["--commit", given.commit] if given.record else [])]
        if subprocess.run([sys.executable, "-m", "benchmarks", name, *flags]).returncode != 0:
            failed.append(name)
    sys.stdout.write(f"\ntogether they took {(time.monotonic() - began) / 60:.1f} min\n")
    if failed:
        sys.stdout.write(f"failed: {', '.join(failed)}\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
