"""What a driver says about changed blocks, with each fault and loss: all is read then, and restored byte for byte."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.kube.resources import SNAPSHOT_METADATA_SERVICES
from tests.cluster.bed import Bed, new_namespace
from tests.cluster.changes import MIB, Tracked, announced_changes, delete_base, open_tracked
from tests.testbed.api import Json
from tests.testbed.storage.changes import ChangesService
from tests.testbed.storage.objects import DRIVER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_FAULTS = {
    "fail:it broke": "Internal: it broke",
    "unavailable": "Unavailable: .*the storage restarts",
    "break:1": "Internal: the storage lost the rest",
    "break:99": "Internal: the storage lost the rest",
    "capacity": f"for it the volume has {48 * MIB + 4096} bytes, not {48 * MIB}",
    "overlap": r"it names 4096 bytes at 0, after \d+ of",
    "beyond": f"it names 4096 bytes at {48 * MIB}, after",
    "forget": "it does not name the bytes at 0, which have changed",
}


@pytest.fixture(scope="module")
def space(agent: Bed) -> Iterator[str]:
    with new_namespace(agent) as name:
        yield name


@pytest.fixture(scope="module")
def service(agent: Bed, space: str) -> Iterator[ChangesService]:
    with announced_changes(agent, space) as service:
        yield service


@pytest.fixture(scope="module")
def tracked(agent: Bed, space: str, service: ChangesService) -> Iterator[Tracked]:
    """A device with a backup that has a base."""
    with open_tracked(agent, space) as tracked:
        tracked.create(mib=48, filled_mib=24)
        tracked.back_up("first")
        yield tracked


def _back_up(tracked: Tracked, name: str, *, fault: str = "") -> Json:
    """Change little in many places, at the start and in a hole, and discard some; back that up, and restore it."""
    for at in range(20):
        tracked.write(at * MIB + 8192, 4096)
    tracked.write(0, 4096)
    tracked.write(40 * MIB, 8192)
    tracked.write(21 * MIB, -MIB)
    upload = tracked.back_up(name, fault=fault)
    assert tracked.restore(upload) == tracked.content[name]
    assert tracked.bases() == [upload["metadata"]["name"]]
    return upload


def _expect_full(tracked: Tracked, upload: Json, cause: str, *, asked: str = "what has changed is in doubt: ") -> None:
    (activity,) = upload["status"]["activities"]
    (warning,) = tracked.messages(upload, "Data-Path-Warning")
    assert upload["status"]["fallbackFull"] is True
    assert re.search(f"^read more than has changed, since {asked}{cause}", activity), activity
    assert re.search(f"^read more than has changed: {asked}{cause}", warning), warning


@pytest.mark.parametrize("fault", _FAULTS)
def test_an_answer_in_doubt_means_that_all_is_read(tracked: Tracked, fault: str) -> None:
    upload = _back_up(tracked, f"fault-{list(_FAULTS).index(fault)}", fault=fault)
    _expect_full(tracked, upload, _FAULTS[fault])


def test_blocks_of_one_length_say_the_same(tracked: Tracked) -> None:
    upload = _back_up(tracked, "fixed", fault="fixed")
    assert not upload["status"].keys() & {"activities", "fallbackFull"}
    assert 21 * MIB <= upload["status"]["incrementalBytes"] <= 22 * MIB


def test_a_device_that_has_grown_is_backed_up_with_its_end(tracked: Tracked) -> None:
    size = {"spec": {"resources": {"requests": {"storage": "50Mi"}}}}
    tracked.bed.user.kubectl("patch", "pvc", "data", "-n", tracked.space, "--type=merge", "-p", json.dumps(size))
    tracked.bed.user.wait("pvc/data", "jsonpath={.status.capacity.storage}=50Mi", namespace=tracked.space)
    tracked.write(49 * MIB + 512, 512)
    upload = _back_up(tracked, "grown")
    assert not upload["status"].keys() & {"activities", "fallbackFull"}
    assert tracked.content["grown"].size == 50 * MIB


def test_a_base_that_is_lost_means_that_all_is_read(tracked: Tracked) -> None:
    (base,) = tracked.bases()
    delete_base(tracked.bed, base)
    _expect_full(tracked, _back_up(tracked, "lost"), "NotFound: snapshot .* does not exist")


def test_a_service_that_another_authority_vouches_for_is_not_believed(tracked: Tracked, tmp_path: Path) -> None:
    spec = (tracked.bed.api.get(SNAPSHOT_METADATA_SERVICES, "", DRIVER) or {})["spec"]
    other = base64.b64encode((tracked.bed.folder / "control-plane" / "pki" / "ca.crt").read_bytes()).decode()
    tracked.bed.api.patch(SNAPSHOT_METADATA_SERVICES, {"spec": {"caCert": other}}, name=DRIVER)
    try:
        upload = _back_up(tracked, "distrusted")
    finally:
        tracked.bed.api.patch(SNAPSHOT_METADATA_SERVICES, {"spec": spec}, name=DRIVER)
    _expect_full(tracked, upload, "Unavailable: .*certificate signed by unknown authority")


def test_another_volume_of_the_same_name_takes_nothing_from_the_first(tracked: Tracked) -> None:
    tracked.bed.user.kubectl("delete", "pvc", "data", "-n", tracked.space)
    tracked.create(mib=48, filled_mib=1)
    upload = _back_up(tracked, "replaced")
    _expect_full(tracked, upload, r"snapshot \w+ is of the volume pvc-\S+, not pvc-", asked="")


def test_a_service_that_is_gone_means_that_all_is_read(tracked: Tracked, service: ChangesService) -> None:
    service.supervisor.stop()
    _expect_full(tracked, _back_up(tracked, "gone"), "Unavailable: .*connection refused")
