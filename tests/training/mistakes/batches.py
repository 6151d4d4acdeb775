"""Batches: taken, left out, cut and shared out otherwise than steps count them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from tests.training.mistakes.causes import Room
from tests.training.mistakes.training import GLOBAL_BATCH, MICRO_BATCH, NUM_SAMPLES, Training

__all__ = ["BATCHES"]

BATCHES = Room()


@BATCHES.cause(
    "a batch is left out of its step",
    says=re.compile(
        r"2 batches were taken from the dataloader since the last commit, and micro-step 1 of the step begins now; at "
        r"most 1 may be taken by then, since a commit passes all of them, and each has its weight\. Loop over the "
        r"dataloader itself, .* For one that is not to be trained on call trainer\.backward\(loss \* 0, num_items=0\), "
        r"and for the others trainer\.backward\(losses\.sum\(\), num_items=len\(batch\)\)"
    ),
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
)
def leaves_the_first_batch_out(training: Training) -> None:
    training.prepare()
    for number, (inputs, targets) in enumerate(training.batches):
        if number == 0:
            continue
        with training.trainer.step():
            training.learn(inputs, targets)


@BATCHES.cause(
    "a step begins when the epoch's samples are used up",
    says="the dataloader has no samples left for a step; begin the next epoch",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
    num_committed=4,
)
def goes_on_after_the_last_batch(training: Training) -> None:
    training.prepare()
    training.go_on()
    with training.trainer.step():
        training.learn(torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))


@BATCHES.cause(
    "a loop over the trainer's dataloader runs within another one",
    says="only one loop over a trainer's loader runs at a time, and a newer one has begun; ",
    comes_as="ValueError",
    found="at once",
)
def loops_within_a_loop(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        next(iter(training.loader))
        with training.trainer.step():
            training.learn(inputs, targets)


@BATCHES.cause(
    "a sampler of a user's own shares out what the trainer shares out as well",
    says="SharesOut shares its samples out by itself, in a way of its own; with a trainer, give the loader the ",
    comes_as="ValueError",
    found="at once",
    num_ranks=(1, 2),
)
def shares_samples_out_twice(training: Training) -> None:
    sampler: Any = SharesOut(training.dataset, training.num_ranks, training.rank)
    training.prepare(loader=training.elastic_loader(sampler=sampler))


class SharesOut(DistributedSampler[Any]):
    """One that gives its rank a stretch of samples, and not every second one."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))


@BATCHES.cause(
    "the global batch is no whole number of torch's batches",
    says=re.compile(
        r"global_batch_size 18 is not a multiple of (4 \(1|8 \(2) ranks with micro-batches of 4\); use 16 or "
        r"(20|24), or "
        r"an ElasticDataLoader, which cuts any size"
    ),
    comes_as="ValueError",
    found="at once",
    num_ranks=(1, 2),
)
def asks_for_a_batch_that_does_not_fit(training: Training) -> None:
    training.prepare(loader=training.torch_loader(), global_batch_size=18)


@BATCHES.cause(
    "a global batch is given, and nothing says what a micro-batch is",
    says=f"global_batch_size is {GLOBAL_BATCH}, and the size of a micro-batch is not known; pass the "
    f"dataloader that the",
    comes_as="ValueError",
    found="at once",
)
def gives_no_micro_batch(training: Training) -> None:
    training.make([1, 2, 3])


@BATCHES.cause(
    "the trainer is told another micro-batch than the dataloader has",
    says="micro_batch_size is 8, and a dataloader has a batch size; give one of them",
    comes_as="ValueError",
    found="at once",
)
def gives_two_micro_batches(training: Training) -> None:
    training.make(micro_batch_size=8)


@BATCHES.cause(
    "ranks are to have unequal parts of a loader that gives all the same",
    says="share_weights needs a dataloader that gives ranks unequal parts, an ElasticDataLoader",
    comes_as="ValueError",
    found="at once",
)
def weighs_the_ranks_of_torchs_loader(training: Training) -> None:
    training.make(training.torch_loader(), share_weights=(1.0,))


@BATCHES.cause(
    "the batches of torch's loader are made smaller between two epochs",
    says="the dataloader's batches were changed from 4 to 2 samples; leave them as they are, or use an "
    "ElasticDataLoader,",
    comes_as="ValueError",
    found="at once",
)
def changes_the_batch_size_by_hand(training: Training) -> None:
    sampler = BatchSampler(SequentialSampler(training.dataset), MICRO_BATCH, drop_last=False)
    loader = torch.utils.data.DataLoader(training.dataset, batch_sampler=sampler)
    training.prepare(loader=loader)
    sampler.batch_size = 2
    training.trainer.reset()


@BATCHES.cause(
    "the size of an ElasticDataLoader's batch sampler is set beside the trainer",
    says="batch_size of the batch_sampler was set to 2, and a trainer says how many samples a batch has; "
    "leave it at 4,",
    comes_as="ValueError",
    found="at once",
)
def changes_the_batch_sampler_by_hand(training: Training) -> None:
    sampler = BatchSampler(SequentialSampler(training.dataset), MICRO_BATCH, drop_last=False)
    training.prepare(loader=training.elastic_loader_of(sampler))
    sampler.batch_size = 2
    next(training.batches)


@BATCHES.cause(
    "the dataloader follows a config file beside the trainer's",
    says="config_file is for a loader without a trainer, and this loader's trainer follows the config file itself; ",
    comes_as="ValueError",
    found="at once",
)
def has_the_loader_follow_a_file(training: Training) -> None:
    training.prepare(loader=training.elastic_loader(config_file=training.folder / "own.json"))


@BATCHES.cause(
    "torch's loader gives every rank all samples",
    says=f"each of 2 replicas of the model takes all {NUM_SAMPLES} samples of its dataset, since the dataloader's "
    "RandomSampler shares nothing out: an epoch has each sample 2 times, unless each rank's dataset "
    "holds others; use an "
    "ElasticDataLoader, which gives each rank its part of every step, or sampler=DistributedSampler(dataset)",
    comes_as="warning",
    found="at once",
    num_ranks=(2,),
    is_mended=False,
)
def shares_nothing_out(training: Training) -> None:
    training.prepare(loader=training.torch_loader(shuffle=True))
    training.go_on()


class OfAll(BatchSampler):
    """One of a user's own, which no rank has a part in."""


@BATCHES.cause(
    "a batch sampler of one's own gives every rank the same batches",
    says="the batch samplers of all ranks draw the same batches: each sample is trained on 2 times in an "
    "epoch; have the ",
    comes_as="warning",
    found="at once",
    num_ranks=(2,),
    is_mended=False,
)
def draws_the_same_batches(training: Training) -> None:
    sampler = OfAll(SequentialSampler(training.dataset), MICRO_BATCH, drop_last=False)
    training.prepare(loader=training.elastic_loader_of(sampler), global_batch_size=None)
    with training.trainer.epoch(0):
        training.go_on()


class Unseeded(RandomSampler):
    """One that draws another order on each rank."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        order = list(range(NUM_SAMPLES))
        first = torch.distributed.get_rank() + 1
        return iter(order[first:] + order[:first])


@BATCHES.cause(
    "a sampler draws another order on each rank",
    says="the ranks' samplers draw different orders, and samples would come twice or never (rank 0: ",
    comes_as="RanksDisagreeError",
    found="at once",
    num_ranks=(2,),
)
def draws_different_orders(training: Training) -> None:
    training.prepare(loader=training.elastic_loader(sampler=Unseeded(training.dataset)))


@BATCHES.cause(
    "a step stops having a global batch in its middle",
    says="fix_total_batch_size changed in the middle of a step; change it between two steps",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
    is_mended=False,
)
def changes_the_kind_of_step_in_its_middle(training: Training) -> None:
    training.prepare()
    for number, (inputs, targets) in enumerate(training.batches):
        with training.trainer.step(fix_total_batch_size=number == 0):
            training.learn(inputs, targets)


@BATCHES.cause(
    "some micro-steps of a step are functions, and others are not",
    says="a step that trainer.run() began goes on in `with trainer.step():`; take all micro-steps of a step "
    "in the same way",
    comes_as="StepError",
    found="at once",
    is_mended=False,
)
def mixes_functions_and_blocks(training: Training) -> None:
    training.prepare()
    inputs, targets = next(training.batches)
    training.trainer.run(training.learn, inputs, targets)
    training.go_on()


@BATCHES.cause(
    "a step with torch's loader fails, and its samples do not come again",
    says="a step was rolled back, and its samples do not come again: this dataloader cannot hand them out twice; an "
    "ElasticDataLoader can hand them out again",
    comes_as="warning",
    found="at once",
    is_mended=False,
)
def rolls_back_what_cannot_come_again(training: Training) -> None:
    training.prepare(loader=training.torch_loader())
    for number, (inputs, targets) in enumerate(training.batches):
        try:
            with training.trainer.step():
                if number == 1:
                    raise KeyError("as if a sample was damaged")
                training.learn(inputs, targets)
        except KeyError:
            pass


@BATCHES.cause(
    "two batches are fetched within a micro-step",
    says=re.compile(r"2 batches were taken from the dataloader since the last commit, and micro-step 1 of the step .*"),
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
    is_mended=False,
    num_committed=1,
)
def fetches_two_within_a_step(training: Training) -> None:
    training.prepare(global_batch_size=MICRO_BATCH * training.num_ranks)
    batches = iter(training.batches)
    held = [next(batches)]
    while held:
        with training.trainer.step():
            held += [next(batches), next(batches)]
            training.learn(*held.pop(0))


@BATCHES.cause(
    "the loop is over another dataloader than the trainer's",
    says="the loop has taken no batch from the dataloader that ElasticTrainer was given (ElasticDataLoader), and "
    "trains on others: a step would count ",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
)
def loops_over_another_loader(training: Training) -> None:
    training.prepare()
    for inputs, targets, _ in training.torch_loader():
        with training.trainer.step():
            training.learn(inputs, targets)


@BATCHES.cause(
    "the loop is over a dataloader of smaller batches than torch's that the trainer has",
    says="the model was given 2 samples, and the batch that the trainer's dataloader makes has 4: steps are counted "
    "and weighed by the dataloader's. ",
    comes_as="warning",
    found="sampled",
    is_mended=False,
)
def loops_over_smaller_batches(training: Training) -> None:
    training.prepare(loader=training.torch_loader())
    for inputs, targets, _ in training.dataset_in_twos():
        with training.trainer.step():
            training.learn(inputs, targets)


@BATCHES.cause(
    "samples are filtered out of batches within the step",
    says="the model was given 3 samples, and the batch that the trainer's dataloader makes has 4: steps are counted "
    "and weighed by the dataloader's. Give",
    comes_as="warning",
    found="sampled",
    num_ranks=(1, 2),
)
def filters_samples(training: Training) -> None:
    training.prepare()
    for inputs, targets in training.batches:
        with training.trainer.step():
            training.learn(inputs[:3], targets[:3])


@BATCHES.cause(
    "each batch is trained on twice",
    says="a step of 4 micro-steps was taken with 2 batches of the trainer's dataloader: samples that are trained on "
    "more than once, or come from elsewhere, count as the dataloader's. ",
    comes_as="warning",
    found="at once",
    is_mended=False,
)
def trains_twice_on_each_batch(training: Training) -> None:
    training.prepare()
    for number, (inputs, targets) in enumerate(training.batches):
        for _ in range(2 if number < 8 else 0):
            with training.trainer.step():
                training.learn(inputs, targets)


@BATCHES.cause(
    "the batch in hand is trained on after its step was taken back",
    says="the batch in hand was taken from the dataloader before its step was taken back, and comes again: it would be "
    "trained on twice. ",
    comes_as="StepError",
    found="at once",
    num_ranks=(1, 2),
)
def goes_on_with_the_batch_in_hand(training: Training) -> None:
    training.prepare()
    batches = iter(training.batches)
    inputs, targets = next(batches)
    while True:
        try:
            with training.trainer.step():
                inputs, targets = next(batches)
                raise OSError("a disk that was full")
        except OSError:
            with training.trainer.step():
                training.learn(inputs, targets)
