"""2,000 malformed objects and answers; `make fuzz` runs 100,000."""

import pytest

from tests.fuzz.run import fuzz

__all__: list[str] = []

_EXAMPLES = 500


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeded", range(4))
def test_no_object_stops_an_agent(seeded: int) -> None:
    assert fuzz(_EXAMPLES, seeded=seeded).examples >= _EXAMPLES
