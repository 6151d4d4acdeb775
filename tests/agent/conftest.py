"""What the tests of agents share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def agents_are_forked(forked_jobs: None) -> None:
    """Agents need not import torch first. The workers that they start are new interpreters, as ever, but where a test
    has them forked too (tests/support/forking_agent.py)."""
