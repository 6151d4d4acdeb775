"""What a job is called, and the folder on shared storage that is called after it. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

__all__ = ["check_job", "folder_name", "job_name", "newest_folder", "quoted"]

_MOST_CHARACTERS = 100
_MOST_BYTES = 200  # of a file name's 255, less the time and what else is put to it
_RANDOM = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?4[0-9a-f]{3}-?[89ab][0-9a-f]{3}-?[0-9a-f]{12}", re.IGNORECASE)
_STAMP = re.compile(r"_(\d{8}-\d{6})")
_STAMP_CHARACTERS = 16


def job_name(argument: str | None, run_id: str | None, script: str | None) -> str:
    """The name under which a job finds its checkpoints again when it is restarted.

    ``argument`` if it is given; else the launcher's ``run_id``, unless that says nothing ("none") or is new at every
    start (a random UUID, as of `torchrun --standalone`); else the script's name, with a mark of where it lies, so that
    two scripts train.py do not share a folder. ValueError says what cannot be a name, and where there is none: a
    notebook has no script of its own.
    """
    if argument is not None:
        return check_job(argument)
    if run_id and run_id != "none" and _RANDOM.fullmatch(run_id) is None:
        return check_job(run_id)
    if not script:
        raise ValueError(
            "the job has no name, and no script to be called after (a notebook, or python -c); give job=, by which its "
            "checkpoints are found again"
        )
    path = Path(script).absolute()
    mark = hashlib.sha256(str(path).encode(errors="surrogateescape")).hexdigest()[:8]
    return check_job(f"{path.stem[: _MOST_CHARACTERS // 4]}-{mark}")


def check_job(job: str) -> str:
    """``job`` itself; ValueError if it cannot be a job's name."""
    if not isinstance(job, str):
        raise ValueError(f"job is {job!r}; allowed: text")
    if not 1 <= len(job) <= _MOST_CHARACTERS or len(quoted(job)) > _MOST_BYTES:
        raise ValueError(
            f"job is {job[:120]!r}, which has {len(job)} characters and takes {len(quoted(job))} in a folder's name; "
            f"allowed: 1 to {_MOST_CHARACTERS} characters that take at most {_MOST_BYTES}; give a shorter name"
        )
    return job


def quoted(job: str) -> str:
    """``job`` as part of a file's name: all but letters, digits and ``_.-~`` as %XX, and so a first dot."""
    text = quote(job, safe="", errors="surrogateescape")
    return "%2E" + text[1:] if text.startswith(".") else text


def folder_name(job: str, now: datetime) -> str:
    """The name of the folder that ``job`` gets at ``now``; unlike jobs get unlike names, whatever they hold."""
    return f"{quoted(job)}_{now:%Y%m%d-%H%M%S}"


def newest_folder(names: Iterable[str], job: str) -> str | None:
    """The newest among ``names`` that was made for exactly this job, None where there is none."""
    own = (name for name in names if name[:-_STAMP_CHARACTERS] == quoted(job) and _is_stamp(name[-_STAMP_CHARACTERS:]))
    return max(own, default=None)


def _is_stamp(text: str) -> bool:
    return _STAMP.fullmatch(text) is not None
