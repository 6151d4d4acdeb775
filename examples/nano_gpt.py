"""Train a small character-level GPT whose configuration follows a file while it trains.

    torchrun --standalone --nproc-per-node=2 examples/nano_gpt.py --config-file /tmp/nano_gpt.json
    elastic-ext config set --file /tmp/nano_gpt.json optimizer.learning_rate=0.0003 user.dropout=0.2
    elastic-ext config set --file /tmp/nano_gpt.json dataloader.batch_size=4

With ``--checkpoints FOLDER`` it saves every hundred steps; started again, with any number of processes and whatever
``--by``, it goes on from the newest.

It runs with one process (``python examples/nano_gpt.py``) or many, with gloo or NCCL, and needs no data: the text is
made here. ``--by`` says how the model is wrapped: plain, ddp, fully-shard, accelerate; or dlrover, whose loop this is
then.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from elastic_ext import BatchPlan, CheckpointInterval, ElasticTrainer, FollowOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class GptShape:
    """How large the model is."""

    num_characters: int
    context: int = 64
    num_blocks: int = 2
    num_heads: int = 4
    width: int = 64


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer; each added to its input."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.dropout = 0.0
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention_in = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(shape.width),
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention_in(self.attention_norm(x)).view(
            batch, length, 3, self.num_heads, width // self.num_heads
        )
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self._drop(self.attention_out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self._drop(self.feed_forward(x))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Gpt(nn.Module):
    """Characters in, logits for each next character out."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.characters = nn.Embedding(shape.num_characters, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.num_characters, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.characters(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def set_dropout(self, dropout: float) -> None:
        for block in self.blocks:
            assert isinstance(block, Block)
            block.dropout = dropout


def make_text(num_sentences: int, seed: int = 0) -> str:
    """A text with something to learn: sums, written out and all of them right."""
    draw = random.Random(seed)
    pairs = ((draw.randrange(50), draw.randrange(50)) for _ in range(num_sentences))
    return "".join(f"{a} and {b} make {a + b}.\n" for a, b in pairs)


class Windows:
    """Random windows of a text, without end, as (inputs, next characters): a MicroBatchSource.

    All ranks draw the windows of a whole step alike and each takes its own part, in micro-batches of the sizes it is
    told: so the step is made of the same windows, however it is cut.
    """

    remaining = None  # it never ends
    drop_last = False

    def __init__(self, text: str, context: int, batch_size: int) -> None:
        self.batch_size = batch_size
        self.alphabet = sorted(set(text))
        self._tokens = torch.tensor([self.alphabet.index(character) for character in text])
        self._context = context
        self._num_steps = 0  # that were committed
        self._is_cut = False  # the step being handed out has ended, or is to come again

    def plan(self, plan: BatchPlan, rank: int) -> None:
        self._plan, self._rank = plan, rank

    def commit(self, num_micro_batches: int) -> None:
        self._num_steps += 1
        self._is_cut = True

    def rollback(self) -> None:
        self._is_cut = True

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self._num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._num_steps = state["num_steps"]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            step = self._plan.full_step
            draw = torch.Generator().manual_seed(self._num_steps)
            starts = torch.randint(len(self._tokens) - self._context, (step.global_batch, 1), generator=draw)
            first = sum(sum(sizes) for sizes in step.micro_batches[: self._rank])
            self._is_cut = False
            for size in step.micro_batches[self._rank]:
                windows = self._tokens[starts[first : first + size] + torch.arange(self._context + 1)]
                yield windows[:, :-1], windows[:, 1:]
                first += size
                if self._is_cut:
                    break


def wrapped(gpt: Gpt, by: str, learning_rate: float) -> tuple[nn.Module, Any, Any]:
    """The model as ``--by`` says, an optimizer of its parameters, and the accelerator where there is one."""
    model: nn.Module = gpt
    accelerator: Any = None
    if by in ("ddp", "dlrover") and dist.is_initialized():
        model = DistributedDataParallel(gpt)
    if by == "fully-shard":
        for block in gpt.blocks:
            fully_shard(block)
        fully_shard(gpt)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    if by == "accelerate":
        from accelerate import Accelerator  # for those who ask: it takes a second to import

        accelerator = Accelerator(cpu=not torch.cuda.is_available())
        model, optimizer = accelerator.prepare(gpt, optimizer)
    return model, optimizer, accelerator


def train(options: argparse.Namespace, device: torch.device, rank: int) -> None:
    """Train as many steps as the knob ``steps`` says, or until a rank asks to stop."""
    torch.manual_seed(0)
    windows = Windows(make_text(20_000), options.context, options.batch_size)
    gpt = Gpt(GptShape(num_characters=len(windows.alphabet), context=options.context)).to(device)
    model, optimizer, accelerator = wrapped(gpt, options.by, options.learning_rate)
    trainer = ElasticTrainer(
        model,
        windows,
        global_batch_size=options.global_batch_size,
        use_fsdp=options.by == "fully-shard",
        accelerator=accelerator,
        follow_options=FollowOptions(config_file=options.config_file, agree_every_steps=options.agree_every_steps),
        shared_storage_path=options.checkpoints,
        checkpoint_interval=CheckpointInterval(steps=options.checkpoint_every) if options.checkpoints else None,
    )
    optimizer = trainer.prepare(optimizer)
    if options.by == "dlrover":
        trainer.reset()  # at the beginning of an epoch, and there is one
    num_windows = checksum = 0  # of this rank's, in the step under way
    began = time.monotonic()
    loss = torch.tensor(math.nan)

    def micro_step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """A function, so that it can come again in smaller micro-batches where memory does not suffice."""
        logits = model(inputs.to(device))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        if accelerator is not None:
            accelerator.backward(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with trainer, ExitStack() as stack:
        samples = stack.enter_context(open(options.samples, "a")) if options.samples and rank == 0 else None
        for inputs, targets in windows:
            if trainer.global_step >= trainer.knob(
                "steps", options.steps
            ):  # a run that is resumed may be there already
                break
            gpt.set_dropout(trainer.knob("dropout", 0.0))
            taken = trainer.run(micro_step, inputs, targets)
            if taken is None:  # the whole step comes again
                num_windows = checksum = 0
                continue
            loss = taken
            num_windows += len(inputs)
            checksum = zlib.crc32(inputs.numpy().tobytes(), checksum)
            if not trainer.sync_gradients:
                continue
            step = trainer.global_step
            if samples is not None:
                print(step, f"{checksum:08x}", file=samples, flush=True)
            if rank == 0 and step % options.log_every == 0:
                print(
                    f"step {step}: loss {loss.item():.3f}, learning rate {optimizer.effective_rates[0]:g}, "
                    f"{num_windows} windows in {trainer.num_micro_steps} micro-steps, "
                    f"{time.monotonic() - began:.1f} s",
                    flush=True,
                )
            num_windows = checksum = 0
            if trainer.should_stop:
                break
    if rank == 0:
        uniform = math.log(len(windows.alphabet))
        print(f"trained {trainer.global_step} steps: loss {loss.item():.3f} (guessing: {uniform:.3f})", flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", type=Path, help="default: config.json in the job's run directory")
    ways = ("plain", "ddp", "fully-shard", "accelerate", "dlrover")
    parser.add_argument("--by", choices=ways, default="ddp", help="how the model is wrapped; ddp with many processes")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--global-batch-size", type=int, default=32, help="windows per step, over all ranks")
    parser.add_argument("--batch-size", type=int, default=16, help="windows at once on one rank")
    parser.add_argument("--context", type=int, default=64, help="characters per window")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--agree-every-steps", type=lambda text: text if text == "auto" else int(text), default="auto")
    parser.add_argument("--checkpoints", type=Path, help="a folder that all processes share; default: none are saved")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    parser.add_argument("--samples", type=Path, help="a file that gets a checksum of rank 0's windows for every step")
    parser.add_argument("--log-every", type=int, default=50)
    return parser.parse_args()


def main() -> None:
    """Join the process group that a launcher describes, if one does, and train."""
    options = parse()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(levelname)s %(message)s")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(options, device, rank)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
