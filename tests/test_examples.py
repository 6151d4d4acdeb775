"""nano_gpt.py, started as users start it: the same training, however its model is wrapped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "nano_gpt.py"


def losses_of(folder: Path, by: str, num_processes: int, *more: str, steps: int = 6) -> list[float]:
    """What it prints of some steps."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    options = ["--by", by, "--steps", str(steps), "--log-every", "2", "--config-file", str(folder / "config.json")]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *options, *more],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"trained {steps} steps" in done.stdout
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", done.stdout, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["plain", "fully-shard", "accelerate", "dlrover"])
def test_the_example_trains_alike_however_its_model_is_wrapped(tmp_path: Path, by: str) -> None:
    """What is printed is the loss of the first rank's last micro-batch, which is another than one process's."""
    expected = losses_of(tmp_path, "ddp", 2)
    assert len(expected) == 3
    if by == "plain":
        assert losses_of(tmp_path, by, 1) == pytest.approx(expected, abs=0.1)
    else:
        assert losses_of(tmp_path, by, 2) == pytest.approx(expected, abs=0.002)


@pytest.mark.slow
def test_the_example_goes_on_from_its_checkpoints_with_other_processes_and_sharding(tmp_path: Path) -> None:
    saves = ("--checkpoints", str(tmp_path / "storage"), "--checkpoint-every", "2")
    expected = losses_of(tmp_path, "ddp", 2)
    first = losses_of(tmp_path, "fully-shard", 2, *saves, steps=2)
    second = losses_of(tmp_path, "ddp", 2, *saves, steps=4)
    third = losses_of(tmp_path, "fully-shard", 2, *saves, steps=6)
    assert [len(first), len(second), len(third)] == [1, 1, 1]
    assert [*first, *second, *third] == pytest.approx(expected, abs=0.002)
    assert losses_of(tmp_path, "plain", 1, *saves, steps=6) == []
