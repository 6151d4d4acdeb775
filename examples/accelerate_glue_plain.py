"""Tell whether two sentences mean the same, with accelerate alone; accelerate_glue.py is the same with ElasticTrainer.

    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_glue_plain.py --cpu

Pairs of sentences are made here, of numbers, where a dataset and a tokenizer would stand otherwise.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

NUM_MEANINGS = 60  # each has two words: number m, and its synonym NUM_MEANINGS + m; 0 fills short sentences up
Pair = tuple[torch.Tensor, torch.Tensor, int]


def make_pairs(num_pairs: int, seed: int) -> list[Pair]:
    """Sentences with their paraphrase, in other words and another order, or with one that means something else."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(num_pairs):
        meanings = [draw.randint(1, NUM_MEANINGS) for _ in range(draw.randint(5, 9))]
        others = list(meanings)
        label = draw.randrange(2)
        if label == 0:
            for place in draw.sample(range(len(others)), 4):
                others[place] = draw.randint(1, NUM_MEANINGS)
        draw.shuffle(others)
        second = [meaning + NUM_MEANINGS * draw.randrange(2) for meaning in others]
        pairs.append((torch.tensor(meanings), torch.tensor(second), label))
    return pairs


def collate(pairs: Sequence[Pair]) -> dict[str, torch.Tensor]:
    firsts, seconds, labels = zip(*pairs, strict=True)
    return {
        "firsts": pad_sequence(list(firsts), batch_first=True),
        "seconds": pad_sequence(list(seconds), batch_first=True),
        "labels": torch.tensor(labels),
    }


class PairClassifier(nn.Module):
    """Two sentences in, as words; logits out for another meaning and for the same."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(2 * NUM_MEANINGS + 1, width, mode="sum", padding_idx=0)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, firsts: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        first, second = self.words(firsts), self.words(seconds)
        return self.head(torch.cat([(first - second).abs(), first * second], dim=-1))  # type: ignore[no-any-return]


def train(args: argparse.Namespace) -> list[float]:
    """The mean loss of every epoch, over all processes."""
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # one order, for any number of processes
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    set_seed(args.seed)
    train_pairs: Any = make_pairs(args.num_pairs, seed=1)
    eval_pairs: Any = make_pairs(200, seed=2)
    train_loader = DataLoader(train_pairs, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    eval_loader = DataLoader(eval_pairs, batch_size=64, collate_fn=collate)
    model = PairClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    num_steps = len(train_loader) * args.num_epochs // args.gradient_accumulation_steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / num_steps))
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    losses = []
    for epoch in range(args.num_epochs):
        model.train()
        epoch_losses: list[torch.Tensor] = []
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(batch["firsts"], batch["seconds"]), batch["labels"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            epoch_losses.append(loss.detach())
        losses.append(accelerator.gather(torch.stack(epoch_losses)).mean().item())
        accelerator.print(f"epoch {epoch}: loss {losses[-1]:.6f}, accuracy {evaluate(accelerator, model, eval_loader)}")
    return losses


def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> float:
    """The share of pairs that are told rightly."""
    model.eval()
    is_right: list[torch.Tensor] = []
    for batch in loader:
        with torch.no_grad():
            answers = model(batch["firsts"], batch["seconds"]).argmax(dim=-1)
        answers, labels = accelerator.gather_for_metrics((answers, batch["labels"]))
        is_right.append(answers == labels)
    return torch.cat(is_right).double().mean().item()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--batch-size", type=int, default=16, help="pairs per batch, on one process")
    parser.add_argument("--num-pairs", type=int, default=4096)
    parser.add_argument("--num-epochs", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--mixed-precision", choices=("no", "fp16", "bf16"), default="no")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    return parser.parse_args(words)


if __name__ == "__main__":
    train(parse())
    PartialState().destroy_process_group()
