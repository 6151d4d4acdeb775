"""gpt_iterations.py beside gpt_iterations_plain.py, the same script in plain torch: how little differs, and that both
train alike, under every launcher and with other processes after a restart.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from examples import gpt_iterations, gpt_iterations_plain
from tests.support.ranks import RankPool
from tests.support.scripts import Script
from tests.support.thinning import the_first
from tests.support.training import bits_of

NUM_WINDOWS, BATCH, NUM_ITERATIONS, SAVED_AT = 60, 12, 14, 7  # epochs of five iterations
SMALL = (f"--num-windows={NUM_WINDOWS}", f"--batch-size={BATCH}", "--context=8", "--warmup-iters=4", "--log-every=1")


def code_of(script: ModuleType) -> list[str]:
    """A script's lines without what is said of it, blank ones, and indentation."""
    text = Path(str(script.__file__)).read_text(encoding="utf-8")
    return [line.strip() for line in text.partition(f'{script.__doc__}"""')[2].splitlines() if line.strip()]


def losses_of(rank: int, script: str, out: Path, num_iterations: int) -> list[float]:
    """The losses of a script, run within this process."""
    module = importlib.import_module(script)
    losses: list[float] = module.train(module.parse([f"--out={out}", f"--max-iters={num_iterations}", *SMALL]))
    return losses


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """What is set in this process, for a script that runs in it; and what others are to be given."""
    own = {"ELASTIC_EXT_RUN_DIR": str(tmp_path / "run"), "ELASTIC_EXT_JOB": "test"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return own


def test_a_script_that_counts_iterations_changes_by_ten_lines_at_most() -> None:
    plain, ours = code_of(gpt_iterations_plain), code_of(gpt_iterations)
    changes = difflib.SequenceMatcher(None, plain, ours, autojunk=False).get_opcodes()
    num_changed = sum(max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal")
    assert 5 < num_changed <= 10


@pytest.mark.usefixtures("environ")
def test_both_lose_the_same_to_the_bit_on_one_process_and_end_with_the_same_model(tmp_path: Path) -> None:
    losses, models = [], []
    for script in (gpt_iterations_plain, gpt_iterations):
        out = tmp_path / script.__name__
        losses.append(losses_of(0, script.__name__, out, NUM_ITERATIONS))
        models.append(torch.load(out / "model.pt"))
    assert len(losses[0]) == NUM_ITERATIONS > 2 * NUM_WINDOWS // BATCH
    assert bits_of(losses[0], models[0]) == bits_of(losses[1], models[1])


def test_a_run_goes_on_with_three_processes_where_two_have_stopped(
    ranks: RankPool, tmp_path: Path, environ: dict[str, str]
) -> None:
    ours, out = gpt_iterations.__name__, tmp_path / "ours"
    whole = losses_of(0, gpt_iterations_plain.__name__, tmp_path / "plain", NUM_ITERATIONS)
    first, other = ranks.run(2, losses_of, ours, out, SAVED_AT, env=environ)
    second, *others = ranks.run(3, losses_of, ours, out, NUM_ITERATIONS, env=environ)
    assert (other, others) == (first, [second, second])
    assert (len(first), len(second)) == (SAVED_AT, NUM_ITERATIONS - SAVED_AT)
    assert first + second == pytest.approx(whole, rel=1e-4)
    assert losses_of(0, ours, out, NUM_ITERATIONS) == []


LAUNCHERS = {
    "python": (),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    "elastic-run": ("-m", "elastic_ext.run", "--standalone", "--nproc-per-node=2"),
}


@pytest.mark.parametrize("launcher", the_first(LAUNCHERS))
@pytest.mark.usefixtures("environ")
def test_it_trains_alike_under_every_launcher(ranks: RankPool, tmp_path: Path, launcher: str) -> None:
    expected = losses_of(0, gpt_iterations_plain.__name__, tmp_path / "plain", NUM_ITERATIONS)
    output = output_of(ranks, tmp_path, [*LAUNCHERS[launcher], str(gpt_iterations.__file__)])
    told = re.findall(r"^iteration (\d+): loss ([\d.]+)$", output, re.MULTILINE)
    assert [int(iteration) for iteration, _ in told] == list(range(1, NUM_ITERATIONS + 1)), output
    assert [float(loss) for _, loss in told] == pytest.approx(expected, rel=1e-4)
    assert (tmp_path / "out" / "model.pt").exists()


def output_of(ranks: RankPool, folder: Path, argv: Sequence[str]) -> str:
    """What a script writes to the terminal."""
    root = str(Path(__file__).resolve().parent.parent)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": root}
    words = [f"--out={folder / 'out'}", f"--max-iters={NUM_ITERATIONS}", *SMALL]
    with Script(ranks, [*argv, *words], folder=folder, env=environ) as script:
        output, _ = script.communicate(240.0)
        assert script.wait() == 0, output
    return output
