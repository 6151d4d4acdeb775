"""Where a node's part of a job has its things: which job it is, and the run directory that is its own."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from elastic_ext.errors import in_words
from elastic_ext.records.run_dir import Settings
from elastic_ext.records.text import expanded

from .folder import NODES, NodeFolders, NodeTaken, is_held, with_cache
from .refusals import Refused

__all__ = ["folders_of", "is_in_worker", "settings_of"]

_NO_RUN = ("", "none")


def settings_of(options: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """What a command line and its environment say of the job; ValueError for what cannot be."""
    given_run_id = None if options.standalone or options.rdzv_id in _NO_RUN else options.rdzv_id
    return Settings.resolve(
        with_cache(environ),
        script=_script_of(options),
        job=options.job or environ.get("ELASTIC_EXT_JOB") or given_run_id,
        config_file=options.config_file,
    )


def folders_of(settings: Settings, host: str, *, is_given: bool) -> NodeFolders:
    """The node's own, which no other agent has; ``is_given`` where somebody has said which. Else Refused."""
    try:
        return NodeFolders.make(settings.run_dir if is_given else settings.run_dir / NODES / host, is_given=is_given)
    except NodeTaken as error:
        raise Refused(str(error)) from None
    except OSError as error:
        raise Refused(
            f"the run directory cannot be made: {in_words(error)}; give another one: ELASTIC_EXT_RUN_DIR"
        ) from error


def is_in_worker(environ: Mapping[str, str]) -> bool:
    """Whether the run directory in ``environ`` is that of the agent whose worker has started this one."""
    run_dir = environ.get("ELASTIC_EXT_RUN_DIR")
    try:
        return "ELASTIC_EXT_STAGING_DIR" in environ and bool(run_dir) and is_held(expanded(run_dir or ""))
    except (OSError, ValueError):  # which is refused where it is used
        return False


def _script_of(options: argparse.Namespace) -> str:
    """The file that is run, as far as its name tells."""
    name: str = options.training_script
    return f"{name.replace('.', '/')}.py" if options.module else name
