"""A transfer of each kind that is interrupted halfway, each in another way, and completes as if it had not been."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby

import pytest

from tests.cluster.bed import Bed
from tests.cluster.followed import PHASES, Followed, recorded_events
from tests.cluster.gate import Gate, open_gate
from tests.cluster.interruptions import INTERRUPTIONS
from tests.cluster.scenes import wait_released
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.cluster.site import DATA_BYTES, Site
from tests.cluster.writers import Writer, observed

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="failing"), pytest.mark.timeout(WITH_LOCKS)]

_STRUCK = {
    "DataUpload": "kill-mover",
    "PodVolumeBackup": "kill-kopia",
    "DataDownload": "memory",
    "PodVolumeRestore": "eviction",
}
"""How the transfer of each kind is interrupted."""


@dataclass
class Ended:
    """What became of the transfers.

    Attributes:
        differences: What they have kept or restored otherwise than it was.
        writers: Who could write to the volumes that were restored.
        double_writers: Those who could at the same time as another one.
    """

    transfers: dict[str, Followed]
    differences: dict[str, list[str]]
    writers: list[Writer]
    double_writers: list[str]


@pytest.fixture(scope="module")
def ended(agent: Bed, module_space: str, rows: set[str]) -> Iterator[Ended]:
    """Backups, and a restore of each."""
    with ExitStack() as stack:
        gate, observer = stack.enter_context(open_gate()), stack.enter_context(observed(module_space))
        stack.enter_context(relies_on(agent, Shared.AGENTS))
        site = Site(agent, module_space, gate.url)
        site.prepare()
        location = site.open_place("kept")
        transfers: dict[str, Followed] = {}
        stack.callback(lambda: site.remove(transfers.values(), location))
        if "DataUpload" in rows:
            transfers["DataUpload"] = upload = site.upload("du", location=location)
            _interrupt(agent, gate, "DataUpload", upload)
            transfers["DataDownload"] = site.download("dd", of=upload)
            _interrupt(agent, gate, "DataDownload", transfers["DataDownload"])
        if "PodVolumeBackup" in rows:
            transfers["PodVolumeBackup"] = backup = site.backup("pvb", location=location)
            _interrupt(agent, gate, "PodVolumeBackup", backup)
            transfers["PodVolumeRestore"] = site.restore("pvr", of=backup)
            _interrupt(agent, gate, "PodVolumeRestore", transfers["PodVolumeRestore"])
        for each in transfers.values():
            wait_released(agent, each.transfer)
        differences = {kind: site.differences(each) for kind, each in transfers.items()}
        yield Ended(transfers, differences, observer.writers, observer.double_writers)


def _interrupt(bed: Bed, gate: Gate, kind: str, transfer: Followed) -> None:
    """Interrupt a transfer halfway; return when it has completed.

    One after the other: while a mover is held for others, its own storage does not answer, which ends it too.
    """
    gate.shut(passes_bytes=DATA_BYTES // 2, together=True)
    transfer.start()
    transfer.wait_phase("InProgress")
    gate.wait_held(str(transfer.pod()["status"]["podIP"]))
    INTERRUPTIONS[_STRUCK[kind]].strike(bed, gate, [transfer])
    transfer.wait_interrupted()
    gate.open()
    transfer.wait_phase("Completed")


@pytest.mark.sample("Data*")
@pytest.mark.parametrize("kind", _STRUCK)
def test_it_completes_and_a_velero_server_sees_what_it_sees_of_any_other(ended: Ended, kind: str) -> None:
    transfer = ended.transfers[kind]
    assert transfer.phases == PHASES
    assert transfer.done_bytes == sorted(transfer.done_bytes)
    assert transfer.last["status"]["progress"]["bytesDone"] == transfer.last["status"]["progress"]["totalBytes"]
    assert "message" not in transfer.last["status"]
    assert ended.differences[kind] == []
    events = transfer.data_path_events()
    started = len(events) - events[::-1].index("Data-Path-Started") - 1
    # On a slow machine it may wait for its storage.
    moving = [event for event in events[started:] if event not in {"Data-Path-Waiting", "Data-Path-Ready"}]
    assert [event for event, _ in groupby(moving)] == recorded_events(kind)
    # One whose kopia was killed reports its own failure.
    assert "Data-Path-Completed" not in events[:started]


@pytest.mark.sample("Data*")
@pytest.mark.parametrize("kind", _STRUCK)
def test_its_attempts_and_their_nodes_are_recorded(ended: Ended, kind: str) -> None:
    transfer = ended.transfers[kind]
    assert transfer.number == 2, transfer.attempts
    assert transfer.stage == "Running"
    (cause,) = transfer.causes
    assert cause in INTERRUPTIONS[_STRUCK[kind]].causes
    (event,) = transfer.events("Interrupted")
    assert re.fullmatch("attempt 1 was interrupted: .+; attempt 2 begins in 1s", event, re.DOTALL)
    assert event in {version["status"].get("message") for version in transfer.versions if "status" in version}
    nodes = [version["status"]["node"] for version in transfer.versions if version.get("status", {}).get("node")]
    # A PodVolumeBackup has its node in its spec.
    nodes = nodes or [transfer.transfer["spec"]["node"]]
    assert transfer.attempts["interruptions"][0]["node"] == nodes[0]
    assert transfer.last["metadata"]["labels"]["nodeagent.io/node"] == nodes[-1]


def test_no_target_volume_has_two_writers(ended: Ended) -> None:
    restores = [kind for kind in ended.transfers if kind.endswith(("Download", "Restore"))]
    assert len({writer.pod for writer in ended.writers}) >= 2 * len(restores) > 0
    assert ended.double_writers == []
