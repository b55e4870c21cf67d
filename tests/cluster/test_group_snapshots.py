"""DataUploads of snapshots that were taken as a group (VolumeGroupSnapshot), as a Velero server makes them.

The CSI driver deletes each member alone, or refuses that, with or without saying so before.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from core.kube.resources import EVENTS, PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS, Resource
from tests.cluster.bed import Bed
from tests.cluster.breakage import break_storage
from tests.cluster.handkopia import open_kopia
from tests.cluster.listing import everything
from tests.cluster.scenes import Volume, open_place, wait_released
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.processes import wait_for
from tests.testbed.storage.objects import GROUP_CLASS, GROUP_CLASS_TOGETHER

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="moving"), pytest.mark.timeout(WITH_LOCKS)]

_GROUP_API = "groupsnapshot.storage.k8s.io"
_LABEL = "velero.io/volume-group"
_CLAIMS = ("data", "log")
_BYTES = 3_000_000
_FILL = "import random; open('/data/file', 'wb').write(random.Random({!r}).randbytes({}))"

_GROUP_FINALIZER = "snapshot.storage.kubernetes.io/volumesnapshot-in-group-protection"
_SOURCE_FINALIZER = "snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection"

_ROWS = [*product(("v1beta1", "v1beta2", "v1"), ("alone", "together")), ("v1", "refused")]
"""Versions of the API, and how members are deleted: alone, or only together; `refused`: the driver does not say so."""

_REFUSED = ("delete", "/", "fail:it is of a group")
"""The fault of all members of groups, which no VolumeSnapshot is known to be for."""

_REFUSED_AFTER = "20s"
"""The operation timeout; it also limits each step before."""


@dataclass(frozen=True)
class _Server:
    """Takes snapshots of the claims of a group, and leaves them as members of none.

    Source: Velero v1.18.3, pkg/backup/actions/csi/pvc_action.go (getVolumeSnapshotReference, newDataUpload): with
    v1beta2, as main at d2241adba does; v1.17.2 does the same with v1beta1.

    Attributes:
        space: Their namespace, also the name of the backup and of its storage location.
    """

    bed: Bed
    space: str
    version: str

    def take(self, group: str, snapshot_class: str) -> dict[str, Json]:
        """Return the snapshots of all claims whose label names the group, by claim; the group itself is gone."""
        spec = {
            "volumeGroupSnapshotClassName": snapshot_class,
            "source": {"selector": {"matchLabels": {_LABEL: group}}},
        }
        labels = {**self._labels, _LABEL: group}
        body = {
            "metadata": {"namespace": self.space, "generateName": f"velero-{group}-", "labels": labels},
            "spec": spec,
        }
        taken = self.bed.api.create(self._groups, body)["metadata"]
        wait_for("the members", lambda: self._find_members(taken).keys() == set(_CLAIMS))
        members = self._find_members(taken)
        for member in members.values():
            self._remove_from_group(member)
        self._delete_group(taken["name"])
        for member in members.values():
            self._set_group(member, taken["name"])
        return members

    def upload(self, claim: str, snapshot: str) -> Json:
        """The DataUpload of a member. Its Backup, which owns it, is not in this cluster."""
        body = Volume(self.bed, self.space, claim).upload(
            f"{self.space}-{claim}", snapshot=snapshot, location=self.space
        )
        body["metadata"]["labels"] = self._labels
        body["spec"]["csiSnapshot"]["snapshotClass"] = ""  # members have none
        return body

    @property
    def _labels(self) -> dict[str, str]:
        return {"velero.io/backup-name": self.space, "velero.io/backup-uid": f"uid-{self.space}"}

    @property
    def _groups(self) -> Resource:
        return Resource("VolumeGroupSnapshot", "volumegroupsnapshots", _GROUP_API, self.version)

    @property
    def _contents(self) -> Resource:
        contents = "VolumeGroupSnapshotContent", "volumegroupsnapshotcontents"
        return Resource(*contents, _GROUP_API, self.version, namespaced=False)

    def _find_members(self, group: Json) -> dict[str, Json]:
        """The snapshots of a group that name it, by their claims."""
        return {
            snapshot["spec"]["source"]["persistentVolumeClaimName"]: snapshot
            for snapshot in self.bed.api.objects(VOLUME_SNAPSHOTS, self.space)
            if snapshot.get("status", {}).get("volumeGroupSnapshotName") == group["name"]
            and group["uid"] in [owner["uid"] for owner in snapshot["metadata"].get("ownerReferences", [])]
        }

    def _remove_from_group(self, member: Json) -> None:
        """Remove the marks of the group from a member; return once the snapshot controller has seen it.

        A server leaves the status as it is, and does not wait. This snapshot controller would then delete the members
        with their group: as long as the group exists, it makes each snapshot a member again whose status names it.
        Source: external-snapshotter v8.6.0, pkg/common-controller: addVolumeGroupSnapshotOwnership,
        processGroupSnapshotWithDeletionTimestamp.
        """
        meta = member["metadata"]
        self._set_group(member, None)
        left = [one for one in meta["finalizers"] if one not in {_GROUP_FINALIZER, _SOURCE_FINALIZER}]
        changed = {"ownerReferences": [], "finalizers": left, "labels": self._labels}
        self.bed.api.patch(VOLUME_SNAPSHOTS, {"metadata": changed}, name=meta["name"], namespace=self.space)

        def is_seen() -> bool:
            found = self.bed.api.get(VOLUME_SNAPSHOTS, self.space, meta["name"])
            assert found is not None
            return _SOURCE_FINALIZER in found["metadata"].get("finalizers", [])

        wait_for(f"snapshot {meta['name']} alone", is_seen)

    def _set_group(self, member: Json, name: str | None) -> None:
        status = {"status": {"volumeGroupSnapshotName": name}}
        self.bed.api.patch(
            VOLUME_SNAPSHOTS, status, name=member["metadata"]["name"], namespace=self.space, sub="status"
        )

    def _delete_group(self, name: str) -> None:
        """Delete a group in the cluster, not on the storage."""
        group = self.bed.api.get(self._groups, self.space, name)
        assert group is not None
        content: str = group["status"]["boundVolumeGroupSnapshotContentName"]
        self.bed.api.patch(self._contents, {"spec": {"deletionPolicy": "Retain"}}, name=content)
        self.bed.api.delete(self._contents, "", content)
        self.bed.api.delete(self._groups, self.space, name)
        wait_for("the end of the group", lambda: self.bed.api.get(self._groups, self.space, name) is None)
        wait_for("the end of its content", lambda: self.bed.api.get(self._contents, "", content) is None)


@pytest.fixture
def group(agent: Bed, space: str) -> Iterator[str]:
    """A group of claims with data, by its name, and a storage location for them."""
    for claim in _CLAIMS:
        Volume(agent, space, claim).fill(_FILL.format(claim, _BYTES))
        agent.api.patch(PERSISTENT_VOLUME_CLAIMS, {"metadata": {"labels": {_LABEL: "db"}}}, name=claim, namespace=space)
    with open_place(agent, space), relies_on(agent, Shared.AGENTS):
        yield "db"


@pytest.mark.sample("v1beta2-together")
@pytest.mark.parametrize(("version", "how"), _ROWS)
def test_members_of_a_group_are_backed_up_and_leave_nothing_that_can_be_deleted(
    agent: Bed, space: str, group: str, tmp_path: Path, version: str, how: str
) -> None:
    before = everything(agent, space)
    server = _Server(agent, space, version)
    members = server.take(group, GROUP_CLASS_TOGETHER if how == "together" else GROUP_CLASS)
    stored = {claim: agent.folder / "snapshots" / _handle(agent, member) for claim, member in members.items()}
    for claim in _CLAIMS:
        (Volume(agent, space, claim).path() / "file").write_text("written after the snapshot")
    uploads = [server.upload(claim, member["metadata"]["name"]) for claim, member in members.items()]
    if how == "refused":
        for upload in uploads:
            upload["spec"]["operationTimeout"] = _REFUSED_AFTER
    names = {upload["spec"]["sourcePVC"]: upload["metadata"]["name"] for upload in uploads}
    with break_storage(agent, space, [_REFUSED] if how == "refused" else []):
        agent.user.apply(*uploads)
        ended = {upload["spec"]["sourcePVC"]: wait_released(agent, upload, "Completed") for upload in uploads}
    left = everything(agent, space) - before
    with open_kopia(agent, space, prefix=space) as kopia:
        for claim, transfer in ended.items():
            assert "message" not in transfer["status"]
            kopia.run("snapshot", "restore", transfer["status"]["snapshotID"], str(tmp_path / claim))
            assert (tmp_path / claim / "file").read_bytes() == random.Random(claim).randbytes(_BYTES)
    resources = {f"{NAMESPACE} dataupload.velero.io/{name}" for name in names.values()}
    assert left == {*resources, f"{NAMESPACE} backuprepository.velero.io/{space}-{space}-kopia"}
    for claim, path in stored.items():
        assert path.exists() is (how != "alone")
        assert _reports(agent, names[claim], path.name) is (how != "alone")
    # The driver was not asked for what it says that it refuses.
    assert f"{path.name} is deleted only with" not in (agent.folder / "logs" / "csi-snapshotter.log").read_text()


def _handle(bed: Bed, member: Json) -> str:
    content = bed.api.get(VOLUME_SNAPSHOT_CONTENTS, "", member["status"]["boundVolumeSnapshotContentName"])
    assert content is not None
    return str(content["status"]["snapshotHandle"])


def _reports(bed: Bed, upload: str, handle: str) -> bool:
    """Whether a DataUpload has reported, once and as a Warning, that its snapshot stays on the storage."""
    events = bed.api.objects(EVENTS, NAMESPACE)
    found = [e for e in events if e["involvedObject"]["name"] == upload and e["reason"] == "SnapshotInGroup"]
    for event in found:
        assert event["type"] == "Warning"
        assert event["message"].endswith(f" deletes only together: {handle} stays on the storage")
    assert sum(event.get("count", 1) for event in found) <= 1
    return bool(found)
