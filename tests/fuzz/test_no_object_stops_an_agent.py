"""2,000 malformed objects and answers, in `make check` 250 of them; `make fuzz` runs 100,000."""

import pytest

from tests.fuzz.run import fuzz

__all__: list[str] = []

_EXAMPLES = 250
_SEEDS = [0, *(pytest.param(seeded, marks=pytest.mark.thorough) for seeded in range(1, 8))]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeded", _SEEDS)
def test_no_object_stops_an_agent(seeded: int) -> None:
    assert fuzz(_EXAMPLES, seeded=seeded).examples >= _EXAMPLES
