"""The limits of a data mover in the annotation of its custom resource."""

import pytest

from core.models.transfer_settings import BandwidthLimits

_KEY = "nodeagent.io/bandwidth"


def test_limits_are_written_and_read() -> None:
    limits = BandwidthLimits(upload_bytes_per_second=5)
    assert limits.to_json() == '{"uploadBytesPerSecond":5}'
    assert BandwidthLimits.of({_KEY: limits.to_json()}) == limits
    assert BandwidthLimits.of({_KEY: "{}"}) == BandwidthLimits()


@pytest.mark.parametrize("text", ["", "x", '{"uploadBytesPerSecond":-1}', '{"uploadBytesPerSecond":"5"}'])
def test_no_limits_are_those_of_an_absent_or_invalid_annotation(text: str) -> None:
    assert BandwidthLimits.of({_KEY: text}) is None
    assert BandwidthLimits.of({}) is None
