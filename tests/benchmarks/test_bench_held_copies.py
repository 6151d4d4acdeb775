"""What the benchmark of copies for signals stands on: sides that differ in copies alone, which are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness import Readings, UnlikeWorkError, check_same_work
from benchmarks.held_copies import NAMES, Seen, check_copies, copies_in_words, sides_of_training, started
from benchmarks.held_copies_ranks import Block, Done, Task
from tests.support.thinning import the_first

pytestmark = pytest.mark.slow  # what it measures with is tried where that is changed

SMALL = Task(widths=(6, 8, 4), num_samples=2, num_steps=3)
MOST_BLOCKS = 200  # until memory for copies is made


@pytest.mark.parametrize("num_ranks", the_first([1, 2]))
def test_both_sides_come_to_the_same_state_and_one_of_them_is_copied_on_its_way(tmp_path: Path, num_ranks: int) -> None:
    seen = {copies: Seen() for copies in NAMES}
    work: dict[str, object] = {}
    with started(num_ranks, SMALL, tmp_path) as gangs:
        without, with_copies = sides_of_training(gangs, Block(2), SMALL, seen, "wall", "cpu")
        while not any(seen[True].num_copies) and len(seen[True].num_copies) < MOST_BLOCKS:
            for side in (without, with_copies):
                done = side.run()
                assert isinstance(done, Readings)
                assert min(done.values["wall"], done.values["cpu"]) > 0
                work[side.name] = done.work
            check_same_work(work)  # each block begins anew
        digests = [{answer.work[1] for answer in gangs[True].ask(Block(num_epochs))} for num_epochs in (0, 1, 2)]
        assert all(len(each) == 1 for each in digests), "the ranks' states differ"
        assert len(set.union(*digests)) == 3, "nothing was trained"
    assert any(seen[True].num_copies)
    assert not any(seen[False].num_copies)
    assert list(work) == list(NAMES.values())


@pytest.mark.parametrize(
    ("made", "others", "is_right"),
    [
        ([1, 2, 1], [0, 0, 0, 0, 0, 0], True),
        ([1, 0, 1], [0], True),
        ([1, 0], [0], False),
        ([0, 3, 0], [0], False),
        ([1, 1, 1], [0, 1], False),
        ([], [], False),
    ],
)
def test_copies_are_made_in_most_blocks_of_one_side_and_in_none_of_the_other(
    made: list[int], others: list[int], is_right: bool
) -> None:
    seen = {True: Seen(num_copies=made), False: Seen(num_copies=others)}
    if is_right:
        check_copies(seen)
        return
    with pytest.raises(UnlikeWorkError, match="the first is to make some in most of them, and the other none"):
        check_copies(seen)


def test_the_note_says_how_often_copies_were_made() -> None:
    seen = Seen()
    for num_copies, seconds in ((2, 6.0), (1, 8.0)):
        seen.add([_done(num_copies, seconds - 0.5), _done(num_copies, seconds + 0.5)])
    assert copies_in_words(seen).startswith(
        "save_on_signals=True made 3 copies in 2 blocks of 7 s (2, 1), one in 4.667 s of its training; "
    )


def _done(num_copies: int, seconds: float) -> Done:
    return Done(wall_seconds=seconds, cpu_seconds=seconds, num_copies=num_copies, state_bytes=1, work=(1, ""))
