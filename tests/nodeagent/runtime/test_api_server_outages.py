"""Outages: the first good answer after a failed one ends them."""

import pytest

from nodeagent.runtime.api_server import Outages


@pytest.mark.parametrize(
    ("statuses", "ends"),
    [
        pytest.param([200, 201, 404], 0, id="none"),
        pytest.param([0, 0], 0, id="not ended yet"),
        pytest.param([0, 0, 200, 200], 1, id="no answers"),
        pytest.param([500, 503, 200], 1, id="errors of the server"),
        pytest.param([0, 409], 1, id="a rejection is an answer"),
        pytest.param([0, 200, 0, 200], 2, id="twice"),
    ],
)
def test_the_first_good_answer_after_a_failed_one_is_reported(statuses: list[int], ends: int) -> None:
    reported: list[int] = []
    outages = Outages()
    outages.subscribe(lambda: reported.append(1))
    for status in statuses:
        outages.observe(status)
    assert len(reported) == ends
