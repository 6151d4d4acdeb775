"""What tests of members that come and go share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.worlds import agents_store


@pytest.fixture
def port() -> Iterator[int]:
    """The port of the store that agents hold."""
    with agents_store() as number:
        yield number
