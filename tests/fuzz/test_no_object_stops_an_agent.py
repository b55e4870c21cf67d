"""2,000 malformed objects and answers, in `make test` 500 of them; `make fuzz` runs 100,000."""

import pytest

from tests.fuzz.run import fuzz

_EXAMPLES = 250


@pytest.mark.timeout(1800)
@pytest.mark.sample("0", "6")  # the two that reach most
@pytest.mark.parametrize("seeded", range(8))
def test_no_object_stops_an_agent(seeded: int) -> None:
    assert fuzz(_EXAMPLES, seeded=seeded).examples >= _EXAMPLES
