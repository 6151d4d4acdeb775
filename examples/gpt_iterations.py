"""Train a small GPT in a loop that counts iterations, as nanoGPT does, with ElasticTrainer.

    python examples/gpt_iterations.py --out /tmp/gpt
    torchrun --standalone --nproc-per-node=2 examples/gpt_iterations.py --out /tmp/gpt
    elastic-run --standalone --nproc-per-node=3 examples/gpt_iterations.py --out /tmp/gpt --max-iters 800

gpt_iterations_plain.py is the same in plain torch; ten lines differ, and some lines' indentation. Checkpoints are saved
to the folder ``--out``: started again, with any number of processes, training goes on with the next window.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils import data

from elastic_ext import CheckpointInterval, ElasticDataLoader, ElasticTrainer


class Windows(data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random windows of a text, by number: characters, and for each of them the next one."""

    def __init__(self, num_windows: int, context: int) -> None:
        draw = random.Random(0)
        sums = [(draw.randrange(50), draw.randrange(50)) for _ in range(2_000)]
        text = "".join(f"{a} and {b} make {a + b}.\n" for a, b in sums)
        self.alphabet = sorted(set(text))
        self._characters = torch.tensor([self.alphabet.index(character) for character in text])
        self._starts = [draw.randrange(len(text) - context) for _ in range(num_windows)]
        self._context = context

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self._starts[number]
        window = self._characters[start : start + self._context + 1]
        return window[:-1], window[1:]


class Gpt(nn.Module):
    """Characters in, logits for each next character out."""

    mask: torch.Tensor

    def __init__(self, num_characters: int, context: int, width: int = 32) -> None:
        super().__init__()
        self.characters = nn.Embedding(num_characters, width)
        self.places = nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.characters(tokens) + self.places.weight
        return self.head(self.blocks(x, mask=self.mask, is_causal=True))  # type: ignore[no-any-return]


def train(args: argparse.Namespace) -> list[float]:
    """Train ``--max-iters`` iterations; gives the loss of every ``--log-every``th, over all processes."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    windows = Windows(args.num_windows, args.context)
    shares: data.DistributedSampler[Any] = data.DistributedSampler(windows, world_size, rank, shuffle=False)
    loader = ElasticDataLoader(windows, args.batch_size // world_size, sampler=shares)
    gpt = Gpt(len(windows.alphabet), args.context).to(device)
    model = DistributedDataParallel(gpt) if world_size > 1 else gpt
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler: Any = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup_iters))

    losses = []
    saves = CheckpointInterval(steps=args.log_every)
    trainer = ElasticTrainer(model, loader, shared_storage_path=args.out, checkpoint_interval=saves)
    optimizer, scheduler = trainer.prepare(optimizer, scheduler)
    for inputs, targets in trainer.batches(max_steps=args.max_iters):
        with trainer.step():
            loss = cross_entropy(model(inputs.to(device)).flatten(0, 1), targets.to(device).flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            trainer.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if trainer.sync_gradients and (iter_num := trainer.global_step) % args.log_every == 0:
            losses.append(mean_over_processes(loss))
            if rank == 0:
                print(f"iteration {iter_num}: loss {losses[-1]:.6f}", flush=True)
    trainer.close()
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        torch.save(gpt.state_dict(), args.out / "model.pt")
    return losses


def mean_over_processes(loss: torch.Tensor) -> float:
    mean = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.item()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder that all processes share")
    parser.add_argument("--max-iters", type=int, default=400, help="iterations in all")
    parser.add_argument("--batch-size", type=int, default=24, help="windows per iteration, over all processes")
    parser.add_argument("--num-windows", type=int, default=4_800, help="windows in an epoch")
    parser.add_argument("--context", type=int, default=32, help="characters per window")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--warmup-iters", type=int, default=20)
    parser.add_argument("--log-every", type=int, default=20, help="iterations")
    return parser.parse_args(words)


def main() -> None:
    """Join the process group that a launcher describes, if one does, and train."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(parse())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
