"""How the documentation is built: Markdown pages, and the public names out of the library's docstrings.

A build reads nothing from the network. With ELASTIC_EXT_DOCS_ONLINE=1, as in `make docs-online`, names of Python and
torch link to their own documentation: the lists of these names are then fetched from there.
"""

from __future__ import annotations

import os
import re
import typing
from importlib import import_module, metadata
from typing import Any

project = "elastic_ext"
author = "the authors of elastic_ext"
version = release = metadata.version("elastic-ext")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns: list[str] = []
html_title = f"elastic_ext {version}"
html_theme = "furo"

if os.environ.get("ELASTIC_EXT_DOCS_ONLINE") == "1":
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }

linkcheck_anchors = False  # of pages that are put together by scripts
linkcheck_timeout = 30

myst_heading_anchors = 4

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}

# Every reference is looked for. Those that lead out of the library may lead nowhere: a build without the network knows
# no names of Python and torch.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!elastic_ext\b).*")]

# Internal types that public signatures name, and that no caller makes: they are left undocumented on purpose.
nitpick_ignore = [
    ("py:class", "elastic_ext.config.control_word.GatheredWords"),
    ("py:class", "elastic_ext.config.follower._Default"),
    ("py:class", "elastic_ext.config.watcher.FileWatcher"),
    ("py:class", "elastic_ext.ranks.heartbeat.Heartbeat"),
    ("py:class", "elastic_ext.ranks.group.Ranks"),
    ("py:class", "elastic_ext.ranks.world.World"),
    ("py:class", "elastic_ext.records.run_dir.StartSettings"),
    ("py:class", "elastic_ext.training.steps.state.StepState"),
    ("py:class", "elastic_ext.training.trainer._Default"),
    ("py:class", "elastic_ext.training.trainer._Result"),
    ("py:obj", "elastic_ext.data.loader._Sample"),
]

_TABLE = re.compile(r"<!-- table: ([\w.]+)\.(\w+) -->")


def with_tables(page: str) -> str:
    """``page`` with the tables that the library prints in place of their marks, each of which names a function."""
    return _TABLE.sub(lambda mark: str(getattr(import_module(mark[1]), mark[2])()), page)


def _read(app: Any, name: str, source: list[str]) -> None:
    source[0] = with_tables(source[0])


def _import_trainer() -> None:
    """Import the trainer with the types that its signatures name, which it imports for type checkers alone."""
    import_module("elastic_ext.training.prepare")  # as usual: among these modules such imports would be circles
    typing.TYPE_CHECKING = True  # type: ignore[misc]
    try:
        import_module("elastic_ext.training.trainer")
    finally:
        typing.TYPE_CHECKING = False  # type: ignore[misc]


def setup(app: Any) -> None:
    _import_trainer()
    app.connect("source-read", _read)
