"""What is told of a GPU's memory is what its allocator gives: measured by phase, and worked out without the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_ext import ElasticDataLoader
from elastic_ext.profile.memory.analyzer import ModelSizes, besides_bytes, capacity_bytes
from elastic_ext.profile.memory.samples import Readiness, sample_on
from elastic_ext.profile.phases import Phase
from elastic_ext.records.metrics import MemoryFacts
from tests.profile.memory.test_model_memory import words
from tests.profile.memory.test_model_memory_trainer import MICRO_BATCH, at, is_worked_out, sentences, train
from tests.support import memory_models

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
MIB = 1 << 20


def test_a_sample_has_the_peak_of_the_allocator() -> None:
    model, batch = memory_models.attention().to(DEVICE), tuple(each.to(DEVICE) for each in words(64))
    assert Readiness(DEVICE).can_sample()
    for _ in range(2):
        memory_models.cross_entropy(model(batch[0]), batch).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
    before = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    memory_models.cross_entropy(model(batch[0]), batch).backward()  # type: ignore[no-untyped-call]
    taken = torch.cuda.max_memory_allocated(DEVICE) - before
    model.zero_grad()
    sample = sample_on(DEVICE, model.parameters())
    sample.begin()
    sample.see(Phase.FORWARD)
    outputs = model(batch[0])
    sample.end_forward()
    outputs.register_hook(lambda gradient: sample.see(Phase.BACKWARD))
    loss = memory_models.cross_entropy(outputs, batch)
    del outputs
    loss.backward()  # type: ignore[no-untyped-call]
    peaks = sample.end(0)
    assert peaks is not None
    assert max(peaks.forward_bytes, peaks.loss_bytes, peaks.with_gradients_bytes) == pytest.approx(taken, rel=0.02)


def test_what_else_lies_there_is_besides_and_a_limit_is_the_capacity() -> None:
    model = memory_models.attention().to(DEVICE)
    sizes = ModelSizes(model, (), ())
    before = besides_bytes(DEVICE, torch.cuda.memory_allocated(DEVICE), sizes)
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE)
    after = besides_bytes(DEVICE, torch.cuda.memory_allocated(DEVICE), sizes)
    assert after - before >= kept.numel()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(0.25, DEVICE)
    try:
        assert capacity_bytes(DEVICE) <= 0.25 * total + MIB  # type: ignore[operator]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def test_larger_micro_batches_take_what_was_told(tmp_path: Path) -> None:
    """Worked out on no device, and corrected by what steps of one size took on this one."""
    loader = ElasticDataLoader(sentences(512), batch_size=MICRO_BATCH, collate_fn=_on_device)
    facts, _ = train(
        tmp_path,
        memory_models.attention().to(DEVICE),
        loader=loader,
        global_batch_size=64,
        model_factory=memory_models.attention,
        loss_fn=memory_models.cross_entropy,
        until=is_worked_out,
    )
    assert isinstance(facts, MemoryFacts) and facts.source == "fake" and facts.capacity_bytes is not None
    model, batch = memory_models.attention().to(DEVICE), tuple(each.to(DEVICE) for each in words(64))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before = torch.cuda.memory_allocated(DEVICE)
        memory_models.cross_entropy(model(batch[0]), batch).backward()  # type: ignore[no-untyped-call]
        taken = torch.cuda.max_memory_allocated(DEVICE) - before
        optimizer.step()
        optimizer.zero_grad()
    told = facts.scale * at(facts, 64).most_bytes(facts.gradient_bytes, has_gradients=False)
    given = sum(each.numel() * each.element_size() for each in batch)
    assert told == pytest.approx(taken + given, rel=0.1)


def _on_device(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.stack(each).to(DEVICE) for each in zip(*samples, strict=True))
