"""How the documentation is built: Markdown pages, and the public names out of the library's docstrings."""

from __future__ import annotations

from importlib import metadata

project = "elastic_ext"
author = "the authors of elastic_ext"
version = release = metadata.version("elastic-ext")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns: list[str] = []
html_theme = "alabaster"
html_theme_options = {
    "description": "Change a PyTorch training run while it trains",
    "fixed_sidebar": True,
    "page_width": "1100px",
}

myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}

# Every reference is looked for. Those that lead out of the library (to Python's and torch's own documentation) are not
# followed, so that a build needs no network.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!elastic_ext\b).*")]

# Internal types that public signatures name, and that no caller makes: they are left undocumented on purpose.
nitpick_ignore = [
    ("py:class", "elastic_ext.config.control_word.AgreedWord"),
    ("py:class", "elastic_ext.config.control_word.Purpose"),
    ("py:class", "elastic_ext.config.follower._Default"),
    ("py:class", "elastic_ext.ranks.heartbeat.Pulse"),
    ("py:class", "elastic_ext.ranks.group.Ranks"),
    ("py:class", "elastic_ext.records.run_dir.Settings"),
    ("py:class", "elastic_ext.training.steps.state.StepState"),
    ("py:class", "elastic_ext.training.trainer._Default"),
    ("py:class", "elastic_ext.training.trainer._Result"),
    ("py:obj", "elastic_ext.data.loader._Sample"),
]
