"""What the documentation shows is run: README.md and every page of docs/, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext import ConfigError, ElasticConfig
from elastic_ext.config.keys import key_table
from tests.support.documented_commands import SCENES, commands_of_scene, is_elsewhere, left_out, name_of
from tests.support.documents import (
    Block,
    Step,
    console_steps,
    fenced_blocks,
    json_fault,
    mark_faults,
    matches,
    run_page,
)
from tests.support.ports import free_port
from tests.support.ranks import RankPool
from tests.support.scripts import Script

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").glob("*.md"))]
PAGE_SECONDS = 240.0

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def _no_faults(faults: list[str]) -> None:
    assert not faults, "\n" + "\n".join(faults)


@each_page
def test_page_marks_its_blocks_with_words_that_are_known(page: Path) -> None:
    _no_faults(mark_faults(fenced_blocks(page.read_text(encoding="utf-8"))))


@each_page
def test_page_shows_json_that_can_be_read_and_configs_that_are_valid(page: Path) -> None:
    faults = []
    for block in fenced_blocks(page.read_text(encoding="utf-8")):
        if block.language == "json" and block.is_run:
            fault = json_fault(block) or (config_fault(block) if block.mark == "config" else None)
            if fault:
                faults.append(f"{page.relative_to(ROOT)}, {fault}")
    _no_faults(faults)


@each_page
def test_page_does_what_it_says(page: Path, ranks: RankPool, tmp_path: Path) -> None:
    if any(block.is_run for block in fenced_blocks(page.read_text(encoding="utf-8"))):
        run_in_a_process(page, tmp_path, None if page.name == "README.md" else ranks)


def test_readmes_loop_trains_before_and_after_its_diff_which_has_at_most_ten_lines(
    ranks: RankPool, tmp_path: Path
) -> None:
    (diff,) = [
        block.code.splitlines()
        for block in fenced_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
        if block.language == "diff"
    ]
    assert sum(line[:1] in ("-", "+") for line in diff) <= 10
    before = indented_by_headers([line[1:] for line in diff if line[:1] != "+"])
    after = "\n".join(line[1:] for line in diff if line[:1] != "-")
    assert steps_taken(before, "optimizer.state[next(model.parameters())]['step'].item()", ranks, tmp_path) == 10 * 4
    assert steps_taken(after, "trainer.global_step", ranks, tmp_path) == 10 * 4  # 256 samples in steps of 64


def test_every_command_of_the_pages_is_typed_by_a_scene_or_is_run_elsewhere() -> None:
    assert left_out() == []
    assert is_elsewhere("make demo") and not is_elsewhere("elastic-ext status")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=f"{name_of(scene)}, {parts[0][0]}", marks=[pytest.mark.slow] if number else [])
        for number, (scene, parts) in enumerate(SCENES)
    ],
)
def test_commands_of_pages_do_what_they_say_for_a_user_with_a_job(number: int, tmp_path: Path) -> None:
    scene, parts = SCENES[number]
    scene(commands_of_scene(parts), tmp_path)


def indented_by_headers(lines: Iterable[str]) -> str:
    """Lines of Python, each below the ``for`` and ``with`` that it is in: ``diff -w`` has them indented as after it."""
    headers: list[int] = []
    found = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip():
            headers = [each for each in headers if each < indent]
        found.append("    " * len(headers) + line.strip())
        if line.endswith(":"):
            headers.append(indent)
    return "\n".join(found)


def steps_taken(script: str, told_by: str, pool: RankPool, folder: Path) -> int:
    """How many steps two ranks take that run ``script``, as an expression at its end tells it."""
    file = folder / "train.py"
    file.write_text(f"{script}\nprint('steps:', int({told_by}))\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ELASTIC_EXT")}
    environ |= {"PYTHONPATH": str(ROOT), "ELASTIC_EXT_RUN_DIR": str(folder / "run")}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        environ[name] = "2"
    with ExitStack() as both:
        started = [
            both.enter_context(
                Script(pool, [str(file)], folder=folder, env={**environ, "RANK": rank, "LOCAL_RANK": rank})
            )
            for rank in "01"
        ]
        texts = [each.communicate(PAGE_SECONDS)[0] for each in started]
        assert [each.wait() for each in started] == [0, 0], "\n".join(texts)
    (num_steps,) = {int(text.rpartition("steps:")[2]) for text in texts}
    return num_steps


WITHOUT_EXAMPLE = ("architecture", "compare", "contracts", "stability", "words")
"""Pages of docs/ that tell of no use that could be shown in a few lines."""
LONGEST_EXAMPLE = 14  # lines that are not blank
GUIDES = [page for page in PAGES if page.parent.name == "docs" and page.stem not in WITHOUT_EXAMPLE]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_page_begins_with_a_short_example(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    first = next((block for block in fenced_blocks(text) if block.language in ("python", "console", "json")), None)
    assert first is not None, "the page has no example"
    above = text.splitlines()[: first.line]
    assert not any(line.startswith("## ") for line in above), f"the first example is in a section, line {first.line}"
    assert len([line for line in first.code.splitlines() if line.strip()]) <= LONGEST_EXAMPLE


def test_what_works_with_what_is_shown_by_tests_that_exist() -> None:
    text = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]*test_\w+\.py)`", text)
    assert len(named) > 50
    assert [name for name in named if not (ROOT / "tests" / name).is_file()] == []


def test_the_glossary_is_in_the_order_of_the_alphabet_and_every_word_has_its_page() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", (ROOT / "docs" / "words.md").read_text(encoding="utf-8"), re.MULTILINE)
    words = [word.strip("`").lower() for word, _ in rows[1:]]
    assert len(words) > 50 and words == sorted(words)
    assert [word for word, meaning in rows[1:] if ".md" not in meaning] == []


def config_fault(block: Block) -> str | None:
    """Why a block is not a valid config, None where it is."""
    try:
        ElasticConfig.parse(block.code.encode())
    except ConfigError as error:
        return f"line {block.line}: not a valid config: {error}"
    return None


def run_in_a_process(page: Path, folder: Path, pool: RankPool | None) -> None:
    """Run one page in a process of its own, in an empty folder, with a run directory in it: a new interpreter, unless
    there is a pool that forks one."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ELASTIC_EXT")}
    environ |= {"PYTHONPATH": str(ROOT), "ELASTIC_EXT_RUN_DIR": str(folder / "run")}
    argv = [str(ROOT / "tests" / "support" / "documents.py"), str(page)]
    if pool is None:
        done = subprocess.run(
            [sys.executable, *argv],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PAGE_SECONDS,
            env=environ,
        )
        output, status = done.stdout, done.returncode
    else:
        with Script(pool, argv, folder=folder, env=environ) as script:
            output, _ = script.communicate(PAGE_SECONDS)
            status = script.wait()
    assert status == 0, output


# --- the reader itself ----------------------------------------------------------------------------------------------


def test_blocks_are_found_with_language_mark_and_line() -> None:
    text = (
        "# T\n\n```python\na = 1\n```\n\n~~~json config\n{}\n~~~\n"
        "- item\n\n  ```console no-run needs a GPU\n  $ x\n  ```\n"
    )
    assert fenced_blocks(text) == [
        Block(language="python", mark="", line=4, code="a = 1"),
        Block(language="json", mark="config", line=8, code="{}"),
        Block(language="console", mark="no-run needs a GPU", line=13, code="$ x"),
    ]


def test_a_longer_fence_holds_shorter_ones() -> None:
    (block,) = fenced_blocks("````markdown\n```python\nx\n```\n````\n")
    assert (block.language, block.code) == ("markdown", "```python\nx\n```")


def test_fence_never_closed_is_named_by_its_line() -> None:
    with pytest.raises(ValueError, match="line 2: this fence is never closed"):
        fenced_blocks("text\n```python\na = 1\n")


def test_inline_code_is_no_fence() -> None:
    assert fenced_blocks("```inline``` code\n``x``\n") == []


def test_no_run_needs_a_reason_and_marks_must_be_known() -> None:
    page = "```python no-run needs two GPUs\n```\n```python no-run\n```\n```json no-run:\n```\n```python config\n```\n"
    faults = mark_faults(fenced_blocks(page))
    assert [fault.split(":")[0] for fault in faults] == ["line 3", "line 5", "line 7"]
    assert "needs a reason" in faults[0]
    assert "unknown mark 'config'" in faults[2]


def test_block_is_run_unless_marked_or_of_another_language() -> None:
    page = "```python\n```\n```python no-run because\n```\n```toml\n```\n```json config\n```\n"
    assert [block.is_run for block in fenced_blocks(page)] == [True, False, False, True]


def test_json_and_configs_are_checked() -> None:
    assert json_fault(Block(language="json", mark="", line=3, code="[1, 2]")) is None
    assert "line 3: not JSON" in str(json_fault(Block(language="json", mark="", line=3, code="{,}")))
    assert config_fault(Block(language="json", mark="config", line=3, code='{"version": 1}')) is None
    assert "not a valid config" in str(
        config_fault(Block(language="json", mark="config", line=3, code='{"versio": 1}'))
    )


def test_console_block_is_read_as_commands_and_their_output() -> None:
    code = "$ elastic-ext a \\\n>   --b\nout 1\n\nout 2\n$ ls\n$ elastic-ext c"
    assert console_steps(Block(language="console", mark="", line=10, code=code)) == [
        Step(line=10, command="elastic-ext a   --b", output=("out 1", "", "out 2")),
        Step(line=15, command="ls", output=()),
        Step(line=16, command="elastic-ext c", output=()),
    ]


def test_console_block_that_starts_with_output_is_refused() -> None:
    with pytest.raises(ValueError, match=r"line 4: .* starts with a command"):
        console_steps(Block(language="console", mark="", line=4, code="out"))


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        (["a", "b"], ["a", "b"], True),
        (["a"], ["a", "b"], False),
        ([], ["a"], False),
        ([], [], True),
        (["a", ""], ["a"], True),
        (["a "], ["a"], True),
        (["version ... in force"], ["version 7 in force"], True),
        (["version ... in force"], ["version 7 in\nforce"], False),
        (["a", "...", "d"], ["a", "b", "c", "d"], True),
        (["a", "...", "d"], ["a", "d"], True),
        (["a", "...", "d"], ["a", "b"], False),
        (["..."], ["anything", "at all"], True),
        (["x (y) [z]*"], ["x (y) [z]*"], True),
        (["x.y"], ["xzy"], False),
    ],
)
def test_output_matches_with_dots_for_anything(expected: list[str], actual: list[str], same: bool) -> None:
    assert matches(expected, actual) is same


def test_python_blocks_share_names_and_a_failure_names_page_and_line() -> None:
    good = "```python\na = 1\n```\n```python\nassert a == 1\n```\n"
    assert run_page("page.md", good) == []
    (fault,) = run_page("page.md", good + "\n```python\nb = 2\nraise KeyError(b)\n```\n```python\n1 / 0\n```\n")
    assert fault.startswith("page.md, line 10: this block (from line 9) failed:")
    assert "KeyError: 2" in fault


def test_block_that_does_not_parse_or_exits_fails_with_its_line() -> None:
    assert run_page("page.md", "\n```python\na = (\n```\n")[0].startswith("page.md, line 3:")
    assert "SystemExit" in run_page("page.md", "```python\nraise SystemExit(0)\n```\n")[0]


def test_block_marked_no_run_is_not_run() -> None:
    assert run_page("page.md", "```python no-run it divides by zero\n1 / 0\n```\n") == []


def test_commands_of_other_programs_are_not_run_and_shell_words_are_refused() -> None:
    assert run_page("page.md", "```console\n$ false\nnothing of this is checked\n```\n") == []
    assert "only plain commands" in run_page("page.md", "```console\n$ elastic-ext config | cat\n```\n")[0]


def test_command_whose_output_is_not_as_shown_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    page = "```console\n$ elastic-ext --no-such-option\nall went well\n$ echo $?\n0\n```\n"
    (fault,) = run_page("page.md", page)
    assert fault.startswith("page.md, line 2: $ elastic-ext --no-such-option: the page shows\n    all went well\n")


def test_failing_page_fails_its_process_with_the_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nimport os\n\nassert 'ELASTIC_EXT_RUN_DIR' not in os.environ\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md, line 4: this block"):
        run_in_a_process(page, tmp_path, None)


def test_the_table_of_keys_on_the_page_is_the_one_that_the_code_checks_by() -> None:
    assert key_table() in (ROOT / "docs" / "configuration.md").read_text()
