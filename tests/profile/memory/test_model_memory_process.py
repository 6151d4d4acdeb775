"""The process that works out what a model's steps take: what it answers, what it does without, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from torch import nn

from elastic_ext.errors import ElasticError
from elastic_ext.profile.memory.analysis_client import AnalysisClient
from elastic_ext.profile.memory.model_description import describe, optimizer_kinds, parameter_kinds
from elastic_ext.profile.memory.questions import IS_ANALYSIS, MemoryAnswer, Origin, Question, refuse_in_analysis
from tests.profile.memory.test_model_memory import accounted, rows, words
from tests.support import memory_models
from tests.support.memory_models import WIDTH

ROOT = Path(__file__).resolve().parents[3]
WAIT_SECONDS = 100.0


def question_of(
    factory: str, model: nn.Module, batch: Any, /, *, loss: str | None = "cross_entropy", **other: Any
) -> Question:
    """Of a model with so many samples in its batch, of which it is given the first part."""
    size = batch[0].shape[0]
    values: dict[str, Any] = {
        "main": None,
        "factory": Origin(module="tests.support.memory_models", name=factory),
        "loss": None if loss is None else Origin(module="tests.support.memory_models", name=loss),
        "parameters": parameter_kinds(model),
        "is_training": True,
        "autocast": None,
        "given": describe((batch[0],), size, 0),
        "options": describe({}, size, 0),
        "batch": describe(batch, size, 0),
        "keeps_outputs": False,
        "blocks": (),
        "micro_batches": (size,),
        "ratios": (0.0,),
        "optimizers": optimizer_kinds(model, [torch.optim.AdamW(model.parameters())], is_on_accelerator=False),
    }
    return Question(**{**values, **other})


@contextmanager
def asked(question: Question, **options: Any) -> Iterator[AnalysisClient]:
    asking = AnalysisClient(question, **options)
    asking.start()
    try:
        yield asking
    finally:
        asking.close()


def answers_to(question: Question, **options: Any) -> list[MemoryAnswer]:
    with asked(question, **options) as asking:
        assert asking.wait(WAIT_SECONDS)
        return list(asking.answers)


def problem_of(question: Question, **options: Any) -> str:
    *_, last = answers_to(question, **options)
    assert last.problem is not None
    return last.problem


def test_a_question_goes_as_json_and_comes_back_as_it_was() -> None:
    question = question_of("attention", memory_models.attention(), words(4))
    assert Question.from_json(question.to_json()).to_json() == question.to_json()


def test_what_it_answers_is_what_the_same_step_takes_here() -> None:
    model, batch = memory_models.attention(), words(4)
    answers = answers_to(question_of("attention", model, batch))
    assert [each.problem for each in answers] == [None] * len(answers)
    (passes,) = [each.passes for each in answers if each.passes is not None]
    here = accounted(model, batch).peaks
    assert passes.backward_bytes == pytest.approx(here.backward_bytes, rel=0.01)
    assert passes.loss_bytes == pytest.approx(here.loss_bytes + sum(each.numel() * 8 for each in batch), rel=0.01)
    (update,) = [each.update_bytes for each in answers if each.update_bytes is not None]
    assert update > 0
    (flops,) = [each.flops_per_sample for each in answers if each.flops_per_sample is not None]
    weights = sum(each.numel() for each in model.parameters() if each.dim() == 2) - memory_models.CLASSES * WIDTH
    assert flops > 5.9 * weights * batch[0].shape[1]  # the products with weights, forward and twice backward, and more


@pytest.mark.slow
def test_blocks_that_are_computed_again_take_less_and_sizes_are_worked_out_one_by_one() -> None:
    blocks = tuple(f"layers.{number}" for number in range(4))
    question = question_of(
        "attention", memory_models.attention(), words(4), blocks=blocks, ratios=(0.0, 1.0, 0.5), micro_batches=(4, 8, 1)
    )
    found = {(each.micro_batch, each.activation_checkpoint): each for a in answers_to(question) if (each := a.passes)}
    assert list(found) == [(size, ratio) for ratio in (0.0, 1.0, 0.5) for size in (4, 8, 1)]
    for size in (1, 4, 8):
        none, half, every = (found[size, ratio].forward_bytes for ratio in (0.0, 0.5, 1.0))
        assert none > 1.3 * half > 1.5 * every


def test_a_size_that_fails_is_told_and_the_others_are_worked_out() -> None:
    question = question_of("normalised", memory_models.normalised(), rows(4), micro_batches=(4, 1, 2))
    *others, last = answers_to(question)
    assert [each.passes.micro_batch for each in others if each.passes] == [4, 2]
    assert last.problem is not None
    assert last.problem.startswith("a step of 1 sample on fake tensors, which have no memory, failed: ValueError: ")


@pytest.mark.slow
def test_types_and_autocast_are_those_of_training() -> None:
    full = answers_to(question_of("attention", memory_models.attention(), words(8)))
    half = answers_to(question_of("attention", memory_models.attention().bfloat16(), words(8)))
    cast = answers_to(question_of("attention", memory_models.attention(), words(8), autocast="bfloat16"))
    forward = [next(each.passes.forward_bytes for each in found if each.passes) for found in (full, half, cast)]
    assert forward[1] == pytest.approx(forward[0] / 2, rel=0.05)
    assert forward[1] < forward[2] < forward[0]


@pytest.mark.slow
def test_outputs_that_the_loop_holds_are_counted() -> None:
    batch = words(8)
    taken = []
    for keeps in (False, True):
        answers = answers_to(question_of("attention", memory_models.attention(), batch, keeps_outputs=keeps))
        taken.append(next(each.passes.backward_bytes for each in answers if each.passes))
    assert taken[1] - taken[0] == pytest.approx(batch[0].numel() * memory_models.CLASSES * 4, rel=0.5)


@pytest.mark.slow
def test_a_model_that_gives_its_loss_needs_no_function() -> None:
    model, batch = memory_models.with_loss(), rows(4)
    given = describe(batch, 4, 0)
    answers = answers_to(question_of("with_loss", model, batch, loss=None, given=given, batch=None))
    assert any(each.passes is not None for each in answers)
    problem = problem_of(question_of("layers", memory_models.layers(), batch, loss=None, batch=None))
    assert "the model gives no loss, and loss_fn was not given" in problem


@pytest.mark.slow
def test_what_is_printed_is_no_answer() -> None:
    answers = answers_to(question_of("prints", memory_models.layers(), rows(4)))
    assert any(each.passes is not None for each in answers) and all(each.problem is None for each in answers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "model", "why"),
    [
        (
            "other_layers",
            memory_models.layers,
            r"another model than .*0\.weight is of shape \(8, 6\) instead of \(16, 6\)",
        ),
        ("other_names", memory_models.layers, "the model that is trained has no 1.bias"),
        ("no_module", memory_models.layers, "model_factory gives a str; allowed: a torch.nn.Module"),
        ("picks", memory_models.picks, "a step of 4 samples on fake tensors, .* failed: DynamicOutputShapeException"),
        ("exits", memory_models.layers, "importing the code of model_factory in another process failed: SystemExit: 3"),
        ("kills_itself", memory_models.layers, "the process that predicts memory was killed by SIGABRT"),
        (
            "takes_memory",
            memory_models.layers,
            "model_factory could not be called .*Unable to allocate",
        ),
        ("nowhere", memory_models.layers, "has no attribute 'nowhere'"),
    ],
)
def test_why_it_is_not_worked_out_is_told_in_words(factory: str, model: Callable[[], nn.Module], why: str) -> None:
    problem = problem_of(question_of(factory, model(), rows(4)))
    assert re.search(why, problem), problem


@pytest.mark.slow
def test_a_loss_that_is_none_is_told() -> None:
    problem = problem_of(question_of("layers", memory_models.layers(), rows(4), loss="layers"))
    assert "a step of 4 samples on fake tensors, which have no memory, failed" in problem


def test_it_takes_no_longer_than_it_may_and_no_process_stays() -> None:
    with asked(question_of("is_slow", memory_models.layers(), rows(4)), most_seconds=2.0) as asking:
        assert asking.wait(WAIT_SECONDS)
        assert [each.problem for each in asking.answers] == ["the memory of steps was not predicted within 2 seconds"]
    assert children() == []


def test_closing_ends_it_whatever_it_is_at() -> None:
    with asked(question_of("is_slow", memory_models.layers(), rows(4))) as asking:
        until = time.monotonic() + WAIT_SECONDS
        while not children() and time.monotonic() < until:
            time.sleep(0.01)
        assert children()
    assert asking.is_over
    assert children() == []
    asking.close()


def test_a_question_that_nobody_reads_is_not_waited_for_however_long_it_is() -> None:
    question = question_of("layers", memory_models.layers(), rows(4), options=describe({"text": "x" * (1 << 20)}, 4, 0))
    sleeps = (sys.executable, "-c", "import time; time.sleep(600)")
    assert problem_of(question, most_seconds=1.0, command=sleeps) == (
        "the memory of steps was not predicted within 1 seconds"
    )
    with asked(question, command=sleeps) as asking:
        until = time.monotonic() + WAIT_SECONDS
        while not children("sleep(600)"):
            assert time.monotonic() < until
            time.sleep(0.01)
    assert asking.is_over
    assert children("sleep(600)") == []


class LookedAround(NamedTuple):
    answers: list[MemoryAnswer]
    found: list[Any]
    """By the user's code, in the process that answers."""


@pytest.fixture(scope="module")
def looked_around(tmp_path_factory: pytest.TempPathFactory) -> LookedAround:
    """What came of a question longer than a pipe, with what is no text in the path of modules, asked on a rank."""
    folder = tmp_path_factory.mktemp("looks")
    (folder / "looks_around.py").write_text(
        textwrap.dedent(
            f"""
            import json, os, resource, sys, torch
            from torch import nn
            def made():
                found = [os.nice(0), torch.get_num_threads(), resource.getrlimit(resource.RLIMIT_CPU)[0] > 0,
                         "RANK" in os.environ, torch.cuda.is_available(), os.getcwd(), sys.argv]
                with open({str(folder / "found.json")!r}, "w") as file:
                    json.dump(found, file)
                return nn.Linear(6, 5)
            """
        )
    )
    batch = describe((*rows(4), "x" * (1 << 20)), 4, 0)
    origin = Origin(module="looks_around", name="made")
    with pytest.MonkeyPatch.context() as around:
        around.setattr(sys, "path", [str(folder), *sys.path, Path("/nowhere")])
        around.setattr(sys, "argv", [Path(sys.argv[0]), *sys.argv[1:]])
        around.setenv("RANK", "0")
        answers = answers_to(question_of("layers", nn.Linear(6, 5), rows(4), factory=origin, batch=batch))
    return LookedAround(answers, json.loads((folder / "found.json").read_text()))


def test_a_question_longer_than_a_pipe_is_answered_and_what_is_no_text_in_the_path_of_modules_is_passed_over(
    looked_around: LookedAround,
) -> None:
    assert [each.problem for each in looked_around.answers if each.problem is not None] == []
    assert any(each.passes is not None for each in looked_around.answers)


def test_it_gives_way_has_one_thread_and_no_ranks(looked_around: LookedAround) -> None:
    """What the user's code finds around it."""
    assert looked_around.found == [19, 1, True, False, False, os.getcwd(), sys.argv]


def test_a_process_that_cannot_be_started_is_told() -> None:
    problem = problem_of(question_of("layers", memory_models.layers(), rows(4)), command=("/nowhere/python",))
    assert "the process that predicts memory failed" in problem and "/nowhere/python" in problem


def test_what_is_no_answer_is_told() -> None:
    says = (sys.executable, "-c", "print('{]')")
    assert "not worked out" not in (
        told := problem_of(question_of("layers", memory_models.layers(), rows(4)), command=says)
    )
    assert "the process that predicts memory failed" in told


def children(words: str = "analysis_process") -> list[int]:
    """Children of this process that have such words in their command."""
    found = []
    for each in psutil.Process().children():
        try:
            if words in " ".join(each.cmdline()):
                found.append(each.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_it_ends_with_the_process_that_asks(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time
            import psutil
            from tests.support import memory_models
            from tests.profile.memory.test_model_memory import rows
            from tests.profile.memory.test_model_memory_process import question_of, children
            from elastic_ext.profile.memory.analysis_client import AnalysisClient
            AnalysisClient(question_of("is_slow", memory_models.layers(), rows(4))).start()
            while not children():
                time.sleep(0.01)
            print(*children(), flush=True)
            time.sleep(100)
            """
        )
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=env, text=True) as asker:
        assert asker.stdout is not None
        number = int(asker.stdout.readline())
        process = psutil.Process(number)
        asker.send_signal(signal.SIGKILL)
        gone, _ = psutil.wait_procs([process], timeout=WAIT_SECONDS)
    assert gone


def test_no_trainer_is_made_where_a_script_is_imported_for_its_factory() -> None:
    refuse_in_analysis({})
    with pytest.raises(ElasticError, match="imports the script for its model_factory"):
        refuse_in_analysis({IS_ANALYSIS: "1"})
