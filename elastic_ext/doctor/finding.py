"""Finding: one thing that is said of a machine, or of machines together, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

from elastic_ext.records.text import on_one_line

__all__ = [
    "SEVERITIES",
    "Finding",
    "Severity",
    "error",
    "is_wrong",
    "note",
    "ok",
    "sorted_findings",
    "tell_findings",
    "warning",
]

Severity = Literal["ok", "note", "warning", "error"]
"""How bad it is: as it should be; worth knowing; training is slower for it or may die of it; it can hardly run."""
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was found."""

    severity: Severity
    what: str
    why_it_matters: str = ""
    what_to_do: str = ""

    def to_record(self) -> dict[str, object]:
        """For a line of JSON."""
        return asdict(self)

    def in_words(self) -> str:
        """A few lines: what it is, why that matters, what to do."""
        lines = [f"{self.severity + ':':9}{on_one_line(self.what)}"]
        lines += [f"{'':9}{on_one_line(line)}" for line in (self.why_it_matters, self.what_to_do) if line]
        return "\n".join(lines)


def ok(what: str) -> Finding:
    """Something is as it should be."""
    return Finding(severity="ok", what=what)


def note(what: str, why: str, to_do: str = "") -> Finding:
    """Something is worth knowing."""
    return Finding(severity="note", what=what, why_it_matters=why, what_to_do=to_do)


def warning(what: str, why: str, to_do: str) -> Finding:
    """Training is slower for it, or may die of it."""
    return Finding(severity="warning", what=what, why_it_matters=why, what_to_do=to_do)


def error(what: str, why: str, to_do: str) -> Finding:
    """A job can hardly run."""
    return Finding(severity="error", what=what, why_it_matters=why, what_to_do=to_do)


def is_wrong(findings: Iterable[Finding]) -> bool:
    """Whether one of them is a warning or an error."""
    return any(finding.severity in ("warning", "error") for finding in findings)


def sorted_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The worst first, otherwise as they were."""
    return tuple(sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity)))


class Listener(Protocol):
    """Who is told of findings, such as a terminal."""

    def tell(self, record: Mapping[str, object], words: str) -> None: ...


def tell_findings(listener: Listener, findings: Iterable[Finding], about: str) -> None:
    """Tell all of them, and ``about`` what they are."""
    for finding in findings:
        listener.tell({"record": "finding", "about": about, **finding.to_record()}, finding.in_words())
