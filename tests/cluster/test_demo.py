"""The demonstration's path on a real kubelet, with less data than the demonstration moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.bed.demo import Demo

if TYPE_CHECKING:
    from tests.cluster.conftest import Bed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_volume_comes_back_as_it_was(agent: Bed) -> None:
    demo = Demo(agent.env, agent.user, data_bytes=150_000_000, least_readings=1)
    assert demo.run() == []
