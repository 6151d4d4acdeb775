"""Exchange: how ranks compare what should be the same on all: pulses first, control words where those call for them.

What else the words say, and what is done about it, is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .control_word import AgreedWord, ControlWord
from .decide import start_differences
from .errors import RanksDisagreeError

if TYPE_CHECKING:
    from .ranks.group import PendingSum, Ranks

__all__ = ["Exchange"]


class Exchange:
    """One rank's part; all ranks make the same calls in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.word: ControlWord | None = None
        """Whose pulse is under way."""
        self._pulse: PendingSum | None = None

    def compare_start(self, values: Mapping[str, object]) -> None:
        """Raise on all ranks unless all start with these values."""
        answers = [json.loads(data) for data in self._ranks.gather(json.dumps(values).encode(), "starting")]
        differences = start_differences(answers)
        if differences:
            raise RanksDisagreeError(f"ranks start with different values; give all ranks the same: {differences}")

    def start(self, word: ControlWord) -> None:
        """Begin a pulse, to be read later."""
        self.word = word
        self._pulse = self._ranks.start_sum([word.pulse], "agreeing")

    def read(self) -> AgreedWord | None:
        """Finish the pulse under way: every rank's word, or None where there was no need of them."""
        word, pulse = self.word, self._pulse
        assert word is not None
        assert pulse is not None
        self.drop()
        return self._read_unless_alike(word, pulse.result(), "agreeing")

    def compare(self, word: ControlWord, doing: str) -> AgreedWord | None:
        """As ``start`` and ``read``, at once: raise on all ranks unless all are here."""
        return self._read_unless_alike(word, self._ranks.sum([word.pulse], doing), doing)

    def drop(self) -> None:
        """Give up the pulse under way."""
        self.word = self._pulse = None

    def _read_unless_alike(self, word: ControlWord, pulses: list[int], doing: str) -> AgreedWord | None:
        """Every rank's word, or None where all pulses say that there is no need. Raises if ranks have come apart."""
        if pulses == [word.pulse * self._ranks.world_size] and not word.has_news:
            return None
        words = self._ranks.gather(word.to_bytes(), doing)
        agreed = AgreedWord(words=tuple(ControlWord.from_bytes(data) for data in words))
        if agreed.differing:
            raise RanksDisagreeError(f"ranks differ in {', '.join(agreed.differing)}: {agreed.account}")
        return agreed
