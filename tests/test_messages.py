"""docs/my_job_died.md tells of every message that saving and loading can end in: compared with the code's own.

A message is the text that an error or a warning is made of, with the places that are filled in left open. A row of the
page is a part of one, in which `...` may stand for such places and for other text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "elastic_ext"
PAGE = ROOT / "docs" / "my_job_died.md"

MODULES = [
    *(
        path
        for path in sorted((LIBRARY / "fsdp" / "checkpoint").rglob("*.py"))
        if path.parent.name != "export" and path.stem != "verify"  # commands say themselves what is to be typed
    ),
    *(
        path
        for path in sorted((LIBRARY / "fsdp").glob("*.py"))
        if path.stem not in ("blocks", "plan")  # docs/parallelism.md tells of these, and of fsdp/reshard
    ),
    *sorted((LIBRARY / "training" / "checkpoints").glob("*.py")),
    LIBRARY / "torch_private" / "sharded.py",
]
ELSEWHERE = [
    LIBRARY / "training" / "batches.py",  # why an epoch begins anew, which is logged as a checkpoint is resumed from
    LIBRARY / "ranks" / "board.py",
]
OPEN = "\0"  # what is filled in

ONLY_REASONS = {
    # ValueErrors that are caught, and stand as a reason in another message
    "fsdp/checkpoint/folder/commit.py": "... is no COMMIT: ...",
    "fsdp/checkpoint/saving/shared_memory.py": "what is staged in ... cannot be used: ...",
    "fsdp/checkpoint/format/metadata.py": "... is damaged: ...",
}
REASONS = (
    # single ones of such, and what only a mistake of the library could raise
    "its header ",
    "its tensors take ",
    "what its header says of ",
    "block_bytes is ",
    "two tensors are named ",
    f"the tensor {OPEN} has dtype ",
    "of the piece ",
    "the piece ",
    "sizes, offsets and strides of ",
    f"sizes {OPEN}, source strides ",
    "the target of ",
    "two steps of ",
    "there is no kind ",
    f"{OPEN} is no dtype",
    "it is of ",  # of a numpy generator, in "the random state ..."
    "has no attribute",
    # of commands: which checkpoints are kept, and what is taken away
    "another checkpoint has its name now",
    "a run of this job has begun just now",
    "keep_last is ",
    "keep_every is ",
)


def text_of(node: ast.expr) -> str | None:
    """The text of an expression, None where it is no text that is written down."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(\.\d+)?[a-z]", OPEN, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join((text_of(part) or OPEN) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = text_of(node.left), text_of(node.right)
        return None if sides == (None, None) else "".join(side or OPEN for side in sides)
    return None


def messages_in(path: Path) -> Iterator[tuple[int, str]]:
    """The messages of errors that a module raises, and of its warnings, by line."""
    name = path.relative_to(LIBRARY).as_posix()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        is_error = called.endswith("Error") or called.startswith("Checkpoint")
        if called == "_refuse" and name.endswith("format/reader.py"):
            is_error = True
        if not is_error and called != "warning":
            continue
        if called == "ValueError" and name in ONLY_REASONS:
            continue
        text = text_of(node.args[0])
        if text is not None and len(re.findall(r"\w+", text)) > 1:  # else it is another's text, or a bare reason
            yield node.lineno, text


def all_texts(path: Path) -> Iterator[str]:
    """Every text that a module writes down, its comments and docstrings left out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.expr) and (text := text_of(node)):
            yield text


def rows() -> list[str]:
    """The messages on the page."""
    _, _, tables = PAGE.read_text(encoding="utf-8").partition("\n## Every message\n")
    found = [re.match(r"\| `([^`]+)` \|", line) for line in tables.splitlines()]
    return [match[1] for match in found if match is not None]


def is_in(row: str, text: str) -> bool:
    """Whether a row of the page is a part of a message, or all of it."""
    parts = [part.strip() for part in row.split("...")]
    pattern = ".*".join(re.escape(part) for part in parts)
    return re.search(pattern, text, re.DOTALL) is not None


def test_every_message_is_on_the_page() -> None:
    known = rows()
    left = [
        f"{path.relative_to(ROOT)}:{line}: {text.replace(OPEN, '...')}"
        for path in MODULES
        for line, text in messages_in(path)
        if not any(reason in text for reason in REASONS) and not any(is_in(row, text) for row in known)
    ]
    assert not left, f"add a row to {PAGE.name}, Every message, for\n" + "\n".join(left)


def test_every_message_on_the_page_is_the_codes() -> None:
    texts = [text for path in MODULES + ELSEWHERE for text in all_texts(path)]
    strange = [row for row in rows() if not any(is_in(row, text) for text in texts)]
    assert not strange, "no message reads so any more; correct docs/my_job_died.md, Every message:\n" + "\n".join(
        strange
    )


def test_no_message_is_on_the_page_twice_and_no_reason_is_stale() -> None:
    assert len(rows()) == len(set(rows())) > 80
    texts = [text for path in MODULES for text in all_texts(path)]
    assert [reason for reason in REASONS if not any(reason in text for text in texts)] == []
    assert set(ONLY_REASONS.values()) <= set(rows())


@pytest.mark.parametrize(
    ("row", "text", "found"),
    [
        ("... is gone: the job's folder", f"{OPEN} is gone: the job's folder was removed", True),
        ("ranks see ... in ...", f"ranks see different checkpoints in {OPEN}: look after it", True),
        ("it has ... bytes", f"it has {OPEN} tensors", False),
    ],
)
def test_a_row_is_found_in_a_message(row: str, text: str, found: bool) -> None:
    assert is_in(row, text) is found
