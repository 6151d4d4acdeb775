"""Run the benchmarks: ``python -m benchmarks [NAME ...] [--list] [--record]``.

Each runs in a process of its own, one after another, and prints its tables. The exit status is 1 where a claim fails.
``--record`` appends the tables to benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import RESULTS, Result, record, table, this_machine, versions

FOLDER = Path(__file__).resolve().parent


def defines_main(source: str) -> bool:
    """Whether a module's text defines a ``main`` at its top that needs nothing: which makes it a benchmark."""
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return any(each.name == "main" and len(each.args.args) == len(each.args.defaults) for each in functions)


def benchmarks_in(sources: Mapping[str, str]) -> list[str]:
    """The names of the benchmarks among some modules, sorted."""
    return sorted(name for name, source in sources.items() if not name.startswith("_") and defines_main(source))


def run_one(name: str, *, is_recorded: bool) -> int:
    """Run one benchmark in this process and print its tables; 1 where a claim fails, else 0."""
    results: Sequence[Result] = importlib.import_module(f"benchmarks.{name}").main()
    for result in results:
        sys.stdout.write(f"\n{table(result)}")
    sys.stdout.flush()
    if is_recorded:
        section = record(
            name,
            results,
            date=datetime.date.today().isoformat(),
            command=f"python -m benchmarks {name} --record",
            machine=this_machine(),
            seen=versions(),
        )
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(f"\n{section}")
    return int(any(verdict == "fail" for result in results for verdict in result.verdicts))


def main(arguments: Sequence[str]) -> int:
    """0 where every benchmark ran and no claim failed, else 1."""
    sources = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")}
    known = benchmarks_in(sources)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run the benchmarks, one after another.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run; all by default: {', '.join(known)}")
    parser.add_argument("--list", action="store_true", help="name the benchmarks and run none")
    parser.add_argument("--record", action="store_true", help="append the tables to benchmarks/RESULTS.md")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.names) - set(known))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are: {', '.join(known) or 'none'}")
    if given.list:
        sys.stdout.write("".join(f"{name}\n" for name in known))
        return 0
    names: list[str] = given.names or known
    if len(names) == 1:
        return run_one(names[0], is_recorded=given.record)
    failed = []
    for name in names:
        sys.stdout.write(f"\n== {name}\n")
        sys.stdout.flush()
        flags = ["--record"] if given.record else []
        if subprocess.run([sys.executable, "-m", "benchmarks", name, *flags]).returncode != 0:
            failed.append(name)
    if failed:
        sys.stdout.write(f"\nfailed: {', '.join(failed)}\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
