"""What the whole test run shares: fixtures, and the sizes of the library's files and classes at the end of its report.

The rules that sizes stand beside are in test_house.py; sizes are reported and never fail a run.
"""

from __future__ import annotations

import ast
import compileall
import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import types
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.support.pages import use_large_pages

if TYPE_CHECKING:
    from tests.support.ranks import RankPool


def pytest_configure(config: pytest.Config) -> None:
    """One thread for what is computed here and in processes begun here, as ranks have it: tensors of tests are small,
    and threads of several test processes would wait for each other. Before torch is imported, which reads it then."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        compile_once()
        if config.getoption("numprocesses", None):
            rewrite_once()


def compile_once() -> None:
    """Compile what changed since the last run: with PYTHONDONTWRITEBYTECODE every interpreter that tests begin would
    compile all that it imports, for a second each. Where nothing can be written, they still do."""
    for folder in ("elastic_ext", "tests", "benchmarks"):
        compileall.compile_dir(Path(__file__).resolve().parents[1] / folder, quiet=2)


def rewrite_once() -> None:
    """Have pytest rewrite the asserts of what changed since the last run, before each of several processes collects all
    tests and rewrites them for itself, for ten seconds each."""
    folder = Path(__file__).resolve().parent
    names = [path.relative_to(folder.parent).with_suffix("").parts for path in sorted(folder.rglob("test_*.py"))]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as processes:
        list(processes.map(rewrite, [".".join(name) for name in names], chunksize=16))


def rewrite(name: str) -> None:
    """Have pytest write the rewritten bytecode of a module of tests, and run none of it: without builtins its first
    statement, an import, fails."""
    sys.dont_write_bytecode = False
    folder = Path(__file__).resolve().parents[1].joinpath(*name.split(".")[:-1])
    finders: list[Any] = sys.meta_path  # of which pytest's gives itself as the loader of what it rewrites
    for finder in finders:
        spec = finder.find_spec(name, [str(folder)])
        if spec is not None and spec.loader is finder:
            module = types.ModuleType(name)
            module.__spec__ = spec
            vars(module)["__builtins__"] = {}
            with contextlib.suppress(ImportError):
                finder.exec_module(module)


def pytest_collection() -> None:
    """Nothing that is made while tests are collected becomes garbage; looking for it takes seconds."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Tests of worker processes fork this one, which is large where it is one of several that have collected all."""
    gc.enable()
    if "PYTEST_XDIST_WORKER" in os.environ:
        use_large_pages()


@pytest.fixture(scope="module", autouse=True)
def collections_look_at_what_these_tests_make() -> Iterator[None]:
    """And not at what thousands of tests and torch have made before, which stays: each would take ten times as long."""
    gc.collect()
    gc.freeze()
    yield
    assert gc.isenabled(), "a test of this file has left garbage uncollected for all that come after it"


@pytest.fixture(scope="session", autouse=True)
def signals_reach_what_is_begun() -> None:
    """A run in the background of a script ignores Ctrl-C, and one under nohup hang-ups; their tests' processes would
    inherit that, and wait for ever for the signals that tests send. What has a handler is not inherited."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else lambda *_: None)


# --- fixtures of the multi-rank harness ----------------------------------------------------------------------------
@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Warm ranks for the whole test run; they start with the first test that asks for them."""
    from tests.support.ranks import RankPool  # imports torch, which tests without ranks do not need

    with RankPool() as pool:
        yield pool


@pytest.fixture
def forked_jobs(request: pytest.FixtureRequest) -> Iterator[None]:
    """What tests.support.scripts begins is forked, and need not import torch."""
    from tests.support.scripts import forked_from

    def pool() -> RankPool:
        found: RankPool = request.getfixturevalue("ranks")
        return found

    with forked_from(pool):
        yield


@pytest.fixture
def storage(ranks: RankPool, tmp_path: Path) -> Path:
    """Where two ranks have saved step 1."""
    from tests.support.saving import begin_job  # imports torch

    ranks.run(2, begin_job, tmp_path / "storage", 1)
    return tmp_path / "storage"


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A folder where nothing waits for a disk, for tests of thousands of saves; names behave there as elsewhere."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


# --- fixtures of worker processes -----------------------------------------------------------------------------------
@pytest.fixture(params=["torch", "ours"])
def loader_class(request: pytest.FixtureRequest) -> Any:
    """torch's loader, which proves what a test says of it, and ours."""
    from torch.utils.data import DataLoader

    from elastic_ext.data.loader import ElasticDataLoader

    return {"torch": DataLoader, "ours": ElasticDataLoader}[request.param]


@pytest.fixture(scope="module")
def started_once() -> None:
    """What is started once and stays."""
    from tests.support.pools import ensure_servers

    ensure_servers()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What a test computes is so small that threads would only wait for each other, and for the few processors."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """No process of a test outlives it, and it takes no longer than any should."""
    from tests.support.loading import settled
    from tests.support.pools import within

    before = settled().processes
    with within(20):
        yield
    assert settled().processes <= before


@pytest.fixture
def within_a_minute() -> Iterator[None]:
    """Who waits for ever fails."""
    from tests.support.pools import within

    with within(60):
        yield


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The test leaves no process, descriptor, thread or shared memory behind."""
    from elastic_ext.data.workers.pool import Pool
    from tests.support.loading import settled
    from tests.support.pools import FORK, batches_made, work

    with Pool(work(), context=FORK) as pool:  # what is opened once and stays
        batches_made(pool, 1, [[0]])
    before = settled()
    yield
    assert settled() == before


# --------------------------------------------------------------------------------------------------------------------

hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")

LIBRARY = Path(__file__).resolve().parent.parent / "elastic_ext"
LONG_FILE = 900  # lines
LONG_CLASS = 500  # lines
NUM_SHOWN = 5


def class_sizes(source: str) -> dict[str, int]:
    """The number of lines of every class of a source text, by name."""
    return {
        node.name: (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }


def size_line(what: str, sizes: dict[str, int], limit: int) -> str:
    """One line: the sizes over the limit, or the largest where none is."""
    ranked = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    over = [item for item in ranked if item[1] > limit]
    shown = ", ".join(f"{name} {size}" for name, size in over or ranked[:NUM_SHOWN])
    return f"{what} over {limit} lines: {shown}" if over else f"{what}: none over {limit} lines; largest: {shown}"


def size_report(sources: dict[str, str]) -> Sequence[str]:
    """The two lines of the report, from every file's name and text; a long class is in a long file."""
    files = {name: len(source.splitlines()) for name, source in sources.items()}
    classes = {
        f"{name}:{class_name}": size
        for name, source in sources.items()
        if files[name] > LONG_CLASS
        for class_name, size in class_sizes(source).items()
    }
    return [size_line("files", files, LONG_FILE), size_line("classes", classes, LONG_CLASS)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test has logged goes from one process to another, which takes no half characters."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    sources = {
        path.relative_to(LIBRARY).as_posix(): path.read_text(encoding="utf-8") for path in sorted(LIBRARY.rglob("*.py"))
    }
    try:
        lines = size_report(sources)
    except SyntaxError as error:  # the tests have failed on it already, and say more
        lines = [f"not measured: {error}"]
    terminalreporter.section("sizes")
    for line in lines:
        terminalreporter.write_line(line)
