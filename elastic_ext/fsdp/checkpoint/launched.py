"""Launched: what checkpoints have to know of how this process was started. Entry points read it, and hand it in."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Launched"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """How a process was started."""

    job: str | None
    """What the environment calls its job."""
    run_id: str | None
    """What the launcher calls it."""
    script: str | None
    """The file that is run, if there is one; an absolute path, whatever folder the process has gone to."""
    staging_folder: Path | None
    """Where an agent keeps what is being saved, if there is one."""

    @classmethod
    def in_environment(cls, environ: Mapping[str, str]) -> Launched:
        """This process, with its environment."""
        folder = environ.get("ELASTIC_EXT_STAGING_DIR")
        return cls(
            job=environ.get("ELASTIC_EXT_JOB") or None,
            run_id=environ.get("TORCHELASTIC_RUN_ID"),
            script=getattr(sys.modules.get("__main__"), "__file__", None),
            staging_folder=Path(folder).absolute() if folder else None,
        )
