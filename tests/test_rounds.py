"""What a rank tells of the file it holds, whenever the watching thread replaces it."""

from __future__ import annotations

import pytest

from elastic_ext.agree import Agreement
from elastic_ext.config import ElasticConfig
from elastic_ext.ranks import Ranks


class Arriving:
    """A source whose config arrives at its n-th reading, as a watcher's may at any time."""

    refusal = None

    def __init__(self, at_reading: int) -> None:
        self._left = at_reading
        self._config = ElasticConfig(version=1)

    @property
    def held(self) -> ElasticConfig | None:
        self._left -= 1
        return self._config if self._left < 0 else None


@pytest.mark.parametrize("reading", range(12))
def test_a_config_is_taken_whichever_reading_it_arrives_at(reading: int) -> None:
    agreement = Agreement(Ranks.alone(), Arriving(reading), ElasticConfig(version=0), every=1)
    agreement.start(step=0)
    for step in range(1, 20):
        agreement.boundary(step=step)
    assert agreement.config.version == 1
