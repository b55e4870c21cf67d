from datetime import timedelta

import pytest

from core.errors import ConfigError
from datamover.kopia.snapshots import read_checkpoint_interval

_VARIABLE = "DATA_MOVER_CHECKPOINT_INTERVAL"


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("", timedelta(minutes=10)),
        ("10s", timedelta(seconds=10)),
        ("5m", timedelta(minutes=5)),
        ("45m", timedelta(minutes=45)),
    ],
)
def test_the_interval_of_checkpoints_is_a_duration(text: str, interval: timedelta) -> None:
    assert read_checkpoint_interval({_VARIABLE: text}) == interval


@pytest.mark.parametrize("text", ["0", "9s", "46m", "-1m", "often"])
def test_an_interval_that_kopia_does_not_accept_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{_VARIABLE}: "):
        read_checkpoint_interval({_VARIABLE: text})
