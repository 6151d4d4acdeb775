"""accelerate's notebook_launcher: cells that train on two processes, forked from one that trains by itself too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import RankPool
from tests.training.optimizers.test_accelerate import step_alone, trained_by_accelerate, trained_by_hand

CELLS = """
import sys
from pathlib import Path

from accelerate import notebook_launcher
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from tests.training.test_notebook_launcher import train_in_launched
from tests.support.training import Slices, make_data, make_model, trainer_of
from tests.support.watching import write_whole

folder = Path(sys.argv[1])
config = folder / "config.json"
model = make_model()
loader = Slices(make_data(64), 2)
trainer = trainer_of(folder, model, loader, global_batch_size=8, config_file=config)
optimizer = trainer.prepare(SGD(model.parameters(), lr=0.125))

def train_alone():
    with trainer.epoch():
        for inputs, targets in loader:
            with trainer.step():
                cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()

train_alone()
for port in sys.argv[2:]:
    notebook_launcher(train_in_launched, (folder / port,), num_processes=2, use_port=port)
write_whole(config, b'{"version": 1, "optimizer": {"learning_rate": 0.25}}')
assert trainer._session.follower._watcher.wait_for_version(1, timeout_seconds=60.0)
train_alone()
assert (trainer.global_step, optimizer.effective_rates) == (16, [0.25])
trainer.close()
"""


def train_in_launched(folder: Path) -> None:
    """What a launched process does: train under an accelerator, and leave what came of it in a file."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder.mkdir(exist_ok=True)
    bits = trained_by_accelerate(rank, world_size, folder, step_alone)
    (folder / f"bits-{rank}").write_text(repr(bits))


@pytest.mark.slow
def test_launched_processes_train_as_ranks_by_hand_do_and_the_notebook_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(server.getsockname()[1]) for server in (one, other)]
    ended = subprocess.run(
        [sys.executable, "-c", CELLS, str(tmp_path), *ports],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout
    assert "Traceback" not in ended.stdout
    by_hand = ranks.run(2, trained_by_hand, 2)
    for port in ports:
        assert [(tmp_path / port / f"bits-{rank}").read_text() for rank in (0, 1)] == [repr(bits) for bits in by_hand]
