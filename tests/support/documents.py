"""Reading the documentation as something that can be run: its fenced blocks, and one page run from top to bottom.

``python tests/support/documents.py PAGE`` runs a page in the folder and environment it is started in; test_documents.py
does so for every page.

Words: a *block* is what stands between two fences; its *info* is what stands behind the opening fence: a language, and
after it at most one mark (``config``, or ``no-run`` and the reason). A *step* is one command of a console block.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COMMAND = "elastic-ext"
COMMAND_SECONDS = 60.0
SHELL_WORDS = frozenset({"|", "||", "&", "&&", ";", ">", ">>", "<", "2>&1"})

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block: its language, its mark, the page's line on which its code starts, and the code."""

    language: str
    mark: str
    line: int
    code: str

    @property
    def is_run(self) -> bool:
        """Whether the block is one that can be run, and is not marked ``no-run``."""
        return self.language in ("python", "console", "json") and self.mark.split(maxsplit=1)[:1] != ["no-run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One command of a console block with the output that the page shows for it."""

    line: int
    command: str
    output: tuple[str, ...]


def fenced_blocks(text: str) -> list[Block]:
    """Every fenced block of a Markdown page, in order; ValueError names a fence that is never closed."""
    blocks: list[Block] = []
    opening: re.Match[str] | None = None
    start = 0
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        match = _FENCE.match(line)
        if opening is None:
            opening, start = match, number
        elif match and match["fence"].startswith(opening["fence"]) and not match["info"].strip():
            words = opening["info"].strip().split(maxsplit=1)
            blocks.append(
                Block(
                    language=words[0] if words else "",
                    mark=words[1] if len(words) > 1 else "",
                    line=start + 1,
                    code=textwrap.dedent("\n".join(lines[start : number - 1])),
                )
            )
            opening = None
    if opening is not None:
        raise ValueError(f"line {start}: this fence is never closed")
    return blocks


def mark_faults(blocks: Sequence[Block]) -> list[str]:
    """Marks that say nothing this reader knows, and ``no-run`` marks without a reason."""
    faults = []
    for block in blocks:
        word, _, rest = block.mark.partition(" ")
        if word == "no-run":
            if not rest.strip(" :-"):
                faults.append(f"line {block.line - 1}: no-run needs a reason after it")
        elif block.mark and (block.language, block.mark) != ("json", "config"):
            faults.append(
                f"line {block.line - 1}: unknown mark {block.mark!r}; allowed: config (of json), no-run REASON"
            )
    return faults


def json_fault(block: Block) -> str | None:
    """Why a block is not JSON, None where it is."""
    try:
        json.loads(block.code)
    except ValueError as error:
        return f"line {block.line}: not JSON: {error}"
    return None


def console_steps(block: Block) -> list[Step]:
    """The commands of a console block, each with the output shown below it; a backslash continues a command."""
    steps: list[Step] = []
    command, line, output, continues = "", block.line, list[str](), False
    for number, text in enumerate(block.code.splitlines(), start=block.line):
        if continues or text.startswith("$ "):
            if not continues:
                if command:
                    steps.append(Step(line=line, command=command, output=tuple(output)))
                command, line, output = "", number, []
            part = text.removeprefix("> ") if continues else text[2:]
            continues = part.endswith("\\")
            command += part.removesuffix("\\")
        elif not command:
            raise ValueError(f"line {number}: a console block starts with a command, '$ ...'")
        else:
            output.append(text)
    if command:
        steps.append(Step(line=line, command=command, output=tuple(output)))
    return steps


def matches(expected: Sequence[str], actual: Sequence[str]) -> bool:
    """Whether output is what a page shows; ``...`` stands for any text of a line, alone on a line for any lines."""
    pattern = ""
    for line in _without_blank_end(expected):
        if line.strip() == "...":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += "[^\n]*".join(re.escape(part) for part in line.rstrip().split("...")) + "\n"
    text = "".join(f"{line.rstrip()}\n" for line in _without_blank_end(actual))
    return re.fullmatch(pattern, text) is not None


def _without_blank_end(lines: Sequence[str]) -> list[str]:
    kept = list(lines)
    while kept and not kept[-1].strip():
        kept.pop()
    return kept


def run_page(name: str, text: str) -> list[str]:
    """The faults of a page whose blocks are run in order in this process; the first block that fails is the last run.

    Python blocks share one namespace, and their line numbers in a traceback are those of the page.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in fenced_blocks(text):
        if not block.is_run:
            continue
        if block.language == "python":
            faults = _run_python(name, block, namespace)
        elif block.language == "console":
            faults = _run_console(name, block)
        else:
            faults = []
        if faults:
            return faults
    return []


def _run_python(name: str, block: Block, namespace: dict[str, object]) -> list[str]:
    try:
        exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)
    except BaseException as error:  # SystemExit too: a page's code is not to end the page
        shown = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
        at = lines[0] if lines else getattr(error, "lineno", None) or block.line
        return [f"{name}, line {at}: this block (from line {block.line}) failed:\n{shown}"]
    return []


def _run_console(name: str, block: Block) -> list[str]:
    status = 0
    for step in console_steps(block):
        where = f"{name}, line {step.line}: $ {step.command}"
        if step.command.strip() == "echo $?":
            shown = [str(status)]
        elif step.command.startswith(f"{COMMAND} "):
            words = shlex.split(step.command, comments=True)[1:]
            if SHELL_WORDS.intersection(words):
                return [f"{where}: only plain commands are run here, without {' '.join(sorted(SHELL_WORDS))}"]
            done = subprocess.run(
                [sys.executable, "-m", "elastic_ext.cli", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=COMMAND_SECONDS,
                env={**os.environ, "COLUMNS": "120"},
            )
            status, shown = done.returncode, done.stdout.splitlines()
        else:
            continue
        if not matches(step.output, shown):
            return [
                f"{where}: the page shows\n{textwrap.indent(chr(10).join(step.output), '    ')}\n"
                f"and the command wrote (exit status {status})\n{textwrap.indent(chr(10).join(shown), '    ')}"
            ]
    return []


def main(page: str) -> int:
    """0 where every block of the page did what the page says, else 1 with the fault on the standard error stream."""
    sys.stdout.flush()
    faults = run_page(page, Path(page).read_text(encoding="utf-8"))
    for fault in faults:
        sys.stderr.write(fault + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
