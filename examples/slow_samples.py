"""Train a small network on samples that take a while to be had, from a bad start: no workers, one sample at once.

    elastic-run --standalone --nproc-per-node=2 --tuning=auto examples/slow_samples.py
    elastic-ext tuning log --master RUN_DIRECTORY

It needs no data: a sample is made here, after a pause as long as reading it from storage might take. The model is as
small as one must be that two processors are to train within a minute; what it is fed by is like a real job's.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import zlib
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from elastic_ext import CheckpointInterval, ElasticDataLoader, ElasticTrainer

NUM_CLASSES = 10
NUM_FEATURES = 64
NUM_SAMPLES = 200_000
Sample = tuple[torch.Tensor, int, int]


class StoredSamples(Dataset[Sample]):
    """Points around one center for each class, each after ``read_seconds``; with its own number as the last value."""

    def __init__(self, read_seconds: float) -> None:
        self._read_seconds = read_seconds
        self._centers = torch.randn(NUM_CLASSES, NUM_FEATURES, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Sample:
        time.sleep(self._read_seconds)
        label = index % NUM_CLASSES
        noise = torch.randn(NUM_FEATURES, generator=torch.Generator().manual_seed(index))
        return self._centers[label] + noise, label, index


def make_model() -> nn.Module:
    """A few layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, NUM_CLASSES)
    )


def is_first() -> bool:
    """Whether this is rank 0 now; asked each time, as members may come and go while this process trains."""
    return not dist.is_initialized() or dist.get_rank() == 0


def train(options: argparse.Namespace) -> None:
    """Train as many steps as the knob ``steps`` says, or until the job is told to stop."""
    loader = ElasticDataLoader(StoredSamples(options.read_seconds), batch_size=1, num_workers=0, shuffle=True)
    model: nn.Module = make_model()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    trainer = ElasticTrainer(
        model,
        loader,
        global_batch_size=options.global_batch_size,
        shared_storage_path=options.checkpoints,
        checkpoint_interval=CheckpointInterval(steps=options.checkpoint_every) if options.checkpoints else None,
    )
    optimizer = trainer.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
    told_at, told_step, checksum = time.monotonic(), -1, 0
    with trainer, ExitStack() as stack:
        samples = stack.enter_context(open(options.samples, "a")) if options.samples else None
        for epoch in range(trainer.start_epoch, 1000):
            with trainer.epoch(epoch):
                for features, labels, numbers in loader:
                    with trainer.step():
                        loss = functional.cross_entropy(model(features), labels)
                        loss.backward()  # type: ignore[no-untyped-call]
                        optimizer.step()
                        optimizer.zero_grad()
                    checksum = zlib.crc32(numbers.numpy().tobytes(), checksum)
                    if not trainer.sync_gradients:
                        continue
                    step = trainer.global_step
                    if samples is not None and is_first():
                        print(step, f"{checksum:08x}", file=samples, flush=True)
                    checksum = 0
                    told_step = step - 1 if told_step < 0 else told_step
                    seconds = time.monotonic() - told_at
                    if is_first() and seconds >= options.log_seconds:
                        rate = (step - told_step) * options.global_batch_size / seconds
                        print(
                            f"step {step}: {rate:.0f} samples/s, loss {loss.item():.3f}, "
                            f"{len(labels)} at once, {trainer.num_micro_steps} micro-steps",
                            flush=True,
                        )
                        told_at, told_step = time.monotonic(), step
                    if trainer.should_stop or step >= trainer.knob("steps", options.steps):
                        return


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--global-batch-size", type=int, default=64, help="samples per step, over all ranks")
    parser.add_argument("--read-seconds", type=float, default=0.003, help="how long it takes to read a sample")
    parser.add_argument("--checkpoints", type=Path, help="a folder that all processes share; default: none are saved")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    parser.add_argument("--samples", type=Path, help="a file that gets a checksum of rank 0's samples for every step")
    parser.add_argument("--log-seconds", type=float, default=2.0)
    return parser.parse_args()


def main() -> None:
    """Join the process group that a launcher describes, if one does, and train."""
    options = parse()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(levelname)s %(message)s")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    if world_size > 1:
        dist.init_process_group("gloo")
    train(options)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
