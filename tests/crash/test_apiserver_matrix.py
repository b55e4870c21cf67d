"""Whichever write fails in whichever way, a transfer reaches the same end, before a real kube-apiserver.

Everything beside the API server is simulated: no kubelet, no storage, no controllers. `make test`
has a good run of each kind and stops the agent after each write of a DataDownload; `make
crash-matrix` has every write of every kind break in every way.
"""

import time

import pytest

from core.models.base import JsonDict
from tests.crash.matrix import CHANGES, LEDGER, Matrix, open_matrix
from tests.crash.worlds import LEASE_SECONDS, is_write
from tests.nodeagent.support.harness import Fault, Fuse
from tests.nodeagent.support.transfers import TRANSFERS
from tests.support.apiserver import ApiServer

_LEAST_WRITES = 12
_RETRY_WRITES = 6
"""Interruption, its Event, the deletion of the pod, the request for the next attempt, its beginning, its pod."""
_SPREAD = 4
"""By so many writes one good run differs from another: how often a pending reason is reported depends on time."""


def _expect_good(kind: str, found: JsonDict) -> None:
    made, deleted = CHANGES[kind]
    assert found["status"]["phase"] == "Completed", found
    assert found["data"], found
    changes = {key: value for key, value in found.items() if "namespace" in key}
    assert changes == {
        "made in the agent's namespace": [LEDGER],
        "deleted from the agent's namespace": [],
        "made in the volume's namespace": made,
        "deleted from the volume's namespace": deleted,
    }


async def _check(matrix: Matrix, kind: str, faults: list[Fault]) -> int:
    """Let every write of a kind fail; returns how many runs that took."""
    calm, began = Fuse(counts=is_write), time.monotonic()
    (expected,) = await matrix.play(kind, [calm])
    # An agent of many on a slow machine renews its Lease late.
    matrix.lease_seconds = max(LEASE_SECONDS, round((time.monotonic() - began) / 2))
    _expect_good(kind, expected)
    writes = len(calm.counted)
    assert writes >= _LEAST_WRITES
    fuses = [Fuse(counts=is_write, at=at, fault=fault) for fault in faults for at in range(writes)]
    for fuse, found in zip(fuses, await matrix.play(kind, fuses), strict=True):
        where = f"{fuse.fault.name} at {fuse.at}: {fuse.counted[fuse.at : fuse.at + 1]}"
        assert fuse.blown.is_set() or fuse.at >= writes - _SPREAD, where
        assert found == expected, where
    return len(fuses)


@pytest.mark.integration
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("fault", [Fault.STOP_AFTER, pytest.param(Fault.STOP_BEFORE, marks=pytest.mark.thorough)])
async def test_the_agent_may_be_stopped_at_every_write_of_a_data_download(apiserver: ApiServer, fault: Fault) -> None:
    async with open_matrix(apiserver) as matrix:
        await _check(matrix, "DataDownload", [fault])


@pytest.mark.integration
@pytest.mark.timeout(2400)
async def test_every_kind_completes_although_its_first_attempt_is_interrupted(apiserver: ApiServer) -> None:
    async with open_matrix(apiserver, interrupted=1) as matrix:
        fuses = {kind: Fuse(counts=is_write) for kind in TRANSFERS}
        results = await matrix.play_all(list(fuses.items()))
        for (kind, calm), found in zip(fuses.items(), results, strict=True):
            _expect_good(kind, found)
            assert len(calm.counted) >= _LEAST_WRITES + _RETRY_WRITES


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_every_write_of_an_interrupted_transfer_may_be_the_one_that_breaks(
    apiserver: ApiServer, kind: str
) -> None:
    async with open_matrix(apiserver, interrupted=1) as matrix:
        assert await _check(matrix, kind, list(Fault)) >= len(Fault) * (_LEAST_WRITES + _RETRY_WRITES)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_every_write_of_every_kind_may_be_the_one_that_breaks(apiserver: ApiServer, kind: str) -> None:
    async with open_matrix(apiserver) as matrix:
        assert await _check(matrix, kind, list(Fault)) >= len(Fault) * _LEAST_WRITES
