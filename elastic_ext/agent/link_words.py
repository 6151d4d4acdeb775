"""What an agent tells of its master: once each time that something has changed: pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_ext.records.text import age_in_words

__all__ = ["LinkNews", "LinkState", "LinkStory"]

LinkState = Literal["joined", "absent", "refused", "fenced"]
_GOES_ON = "training goes on"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkNews:
    """A line for the journal."""

    kind: str
    text: str
    is_bad: bool = False


class LinkStory:
    """What has happened between an agent and its master so far."""

    def __init__(self) -> None:
        self._state: LinkState | None = None
        self._refusal = ""  # that was told since the master was last there
        self._has_met = False
        self._since = 0.0

    def see(self, state: LinkState, words: str, *, now: float) -> LinkNews | None:
        """How it stands at ``now``, for the reason in ``words``; None where that was told before."""
        if state == self._state != "refused":
            return None
        was_away = self._has_met and self._state != "joined"
        away_seconds = now - self._since
        news = self._news(state, words, was_away=was_away, away_seconds=away_seconds)
        if state != self._state and (state == "joined" or self._state in ("joined", None)):
            self._since = now
        self._state = state
        self._has_met = self._has_met or state == "joined"
        self._refusal = words if state == "refused" else "" if state == "joined" else self._refusal
        return news

    def _news(self, state: LinkState, words: str, *, was_away: bool, away_seconds: float) -> LinkNews | None:
        if state == "joined":
            if was_away:
                return LinkNews(kind="master-back", text=f"{words}, after {age_in_words(away_seconds)} without it")
            return LinkNews(kind="master-joined", text=words)
        if state == "refused":
            if words == self._refusal:
                return None
            return LinkNews(kind="master-refused", text=f"{words}; {_GOES_ON} without it", is_bad=True)
        if state == "fenced":
            text = f"{words}; this agent speaks with it no more, and {_GOES_ON}"
            return LinkNews(kind="master-fenced", text=text, is_bad=True)
        if self._state == "joined":
            return LinkNews(kind="master-lost", text=f"the master is lost: {words}; {_GOES_ON}, and it is looked for")
        if self._state is None:
            return LinkNews(kind="master-absent", text=f"{words}; {_GOES_ON} without it, and it is looked for")
        return None  # it was refused or away before, and is told of when it is back
