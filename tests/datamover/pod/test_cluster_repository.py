"""The BackupRepository of a transfer: found, created and awaited."""

import asyncio
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from core.clock import Deadline
from core.errors import RepositoryError, StorageOutageError
from core.kube.resources import BACKUP_REPOSITORIES
from core.models.storage import BackupRepository
from datamover.kopia.process import Kopia, KopiaAnswer
from datamover.kopia.storage_calls import WaitReporter, Waits
from datamover.pod.cluster import RepositoryAccess
from datamover.runtime.work_dir import WorkDir
from tests.datamover.support.pods import REPOSITORY, MoverPod, repository_manifest
from tests.datamover.support.trees import describe_tree
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

pytestmark = pytest.mark.processes


async def test_a_missing_backup_repository_is_created_and_awaited(pod: MoverPod, tree: Path) -> None:
    kube = FakeKube()
    fresh = MoverPod(kube, pod.folder)
    fresh.put_transfer("DataUpload")
    async with asyncio.TaskGroup() as group:
        running = group.create_task(fresh.run("data-upload", tree))
        await fresh.wait_for(lambda: "Data-Path-Waiting" in dict(fresh.events()))
        (created,) = fresh.stored()
        assert "Data-Path-Ready" not in dict(fresh.events())
        fresh.put_repository(phase="Ready")
    assert running.result() == 0
    assert dict(fresh.events())["Data-Path-Ready"] == f"BackupRepository velero/{REPOSITORY} is ready"
    assert created["spec"] == {
        "backupStorageLocation": "default",
        "maintenanceFrequency": "0s",
        "repositoryType": "kopia",
        "volumeNamespace": "app",
    }
    assert created["metadata"]["labels"] == {
        "velero.io/repository-type": "kopia",
        "velero.io/storage-location": "default",
        "velero.io/volume-namespace": "app",
    }


_PATH = "/backuprepositories"


@pytest.mark.cause("repository-not-ready")
@pytest.mark.looptime
async def test_a_repository_is_awaited_by_a_watch_and_created_again_when_deleted(tmp_path: Path) -> None:
    """If no controller makes it ready, the transfer fails; the mover does not poll meanwhile."""
    pod = MoverPod(FakeKube(), tmp_path, LoopClock())
    pod.put_repository(phase="New")
    pod.put_transfer("DataUpload")
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pod.run("data-upload", tmp_path))
        await pod.wait_for(lambda: any("watch" in one.query and _PATH in one.path for one in pod.kube.requests))
        before = len(pod.kube.requests)
        await asyncio.sleep(15)
        meanwhile = [one for one in pod.kube.requests[before:] if not one.path.endswith("/events")]
        pod.put_repository(phase="New", message="no node takes its pod")
        await pod.wait_for(lambda: "no node takes its pod" in str(pod.events()))
        await pod.context.client.delete(BACKUP_REPOSITORIES, "velero", REPOSITORY)
    assert running.result() == 12
    assert meanwhile == []
    waits = [message for reason, message in pod.events() if reason == "Data-Path-Waiting"]
    controller = "its controller (the Velero server, even with 0 replicas of its Deployment; else the leader)"
    not_ready, unscheduled = f"{controller} has not made it ready yet", "no node takes its pod"
    assert waits == [
        f"waiting for BackupRepository velero/{REPOSITORY}: {why}" for why in (not_ready, unscheduled, not_ready)
    ]
    shown = f"BackupRepository velero/{REPOSITORY} is still New"
    assert pod.message == f"{shown}: {controller} did not make it ready in time"
    assert [one["metadata"]["name"] for one in pod.stored()] == [REPOSITORY]


@pytest.mark.looptime
async def test_a_repository_that_changes_all_the_time_is_read_once_a_second(tmp_path: Path) -> None:
    pod = MoverPod(FakeKube(), tmp_path, LoopClock())

    async def change() -> None:
        for number in range(1000):
            pod.kube.put(_ready("app-dr", "default") | {"status": {"phase": "New", "message": str(number)}})
            await asyncio.sleep(0.01)
        pod.kube.put(_ready("app-dr", "default"))

    changing = asyncio.create_task(change())
    await asyncio.sleep(0)
    found = await _ensure_repository(pod, timedelta(minutes=1))
    await changing
    assert found.name == "app-dr-default-kopia"
    lists = [one for one in pod.kube.requests if "labelSelector" in one.query and "watch" not in one.query]
    assert len(lists) <= 13


_EDITED = "re-establish on BSL change, create or delete"
"""What a Velero server writes when a location was edited, until it has opened the repository again."""


@pytest.mark.parametrize(
    ("phase", "why", "shown"),
    [
        ("New", "no node takes its pod", "still New"),
        ("NotReady", "no node takes its pod", "not ready"),
        ("NotReady", _EDITED, "still NotReady"),
    ],
    ids=["new", "not ready", "location edited"],
)
async def test_a_wait_for_a_repository_ends_with_what_it_is_pending_for(
    tmp_path: Path, phase: str, why: str, shown: str
) -> None:
    pod = MoverPod(FakeKube(), tmp_path)
    pod.kube.put(_ready("app-dr", "default") | {"status": {"phase": phase, "message": why}})
    with pytest.raises(RepositoryError, match=rf"velero/app-dr-default-kopia is {shown}: {why}$"):
        await _ensure_repository(pod)


async def _ensure_repository(pod: MoverPod, within: timedelta = timedelta()) -> BackupRepository:
    """Return the repository of a volume of namespace app-dr, in location default."""
    deadline = Deadline.after(pod.clock, within)
    return await pod.context.reader.ensure_repository("app-dr", "default", deadline=deadline, reporter=WaitReporter())


def _ready(volume_namespace: str, location: str, **metadata: Any) -> JsonDict:
    manifest = repository_manifest(volume_namespace, location)
    return manifest | {"metadata": manifest["metadata"] | metadata, "status": {"phase": "Ready"}}


_APP_DR = _ready("app-dr", "default")


@pytest.mark.cause("repository-mismatch")
@pytest.mark.parametrize(
    ("other", "pairs"),
    [
        (_ready("app", "dr-default"), ('"app"', '"dr-default"')),
        (_ready("app", "dr-default", labels=_APP_DR["metadata"]["labels"]), ('"app"', '"dr-default"')),
        (_ready("other", "default", labels=_APP_DR["metadata"]["labels"]), ('"other"', '"default"')),
        (_APP_DR | {"spec": _APP_DR["spec"] | {"repositoryType": "restic"}}, ('"app-dr"', '"default"', '"restic"')),
    ],
    ids=["name", "name and labels", "labels", "type"],
)
async def test_another_namespaces_or_locations_is_not_used(
    tmp_path: Path, other: JsonDict, pairs: tuple[str, ...]
) -> None:
    pod = MoverPod(FakeKube(), tmp_path)
    before = pod.kube.put(other)
    with pytest.raises(RepositoryError) as failed:
        await _ensure_repository(pod)
    assert pod.stored() == [before]
    found, wanted = str(failed.value).split(", not for ")
    assert f"BackupRepository velero/{other['metadata']['name']} is for " in found
    assert all(word in found for word in pairs)
    assert all(word in wanted for word in ('"app-dr"', '"default"', '"kopia"'))


@pytest.mark.parametrize("repository_type", ["kopia", ""])
async def test_a_repository_without_labels_is_used_by_its_spec(tmp_path: Path, repository_type: str) -> None:
    pod = MoverPod(FakeKube(), tmp_path)
    wanted = _ready("app-dr", "default", labels={})
    pod.kube.put(wanted | {"spec": _APP_DR["spec"] | {"repositoryType": repository_type}})
    # Users can edit labels: this one has the wanted one's.
    pod.kube.put(_ready("a", "other", labels=_APP_DR["metadata"]["labels"]))
    found = await _ensure_repository(pod)
    assert (found.name, found.spec.volume_namespace) == ("app-dr-default-kopia", "app-dr")
    if repository_type:
        pod.kube.put(_ready("app-dr", "default", name="z"))
        assert (await _ensure_repository(pod)).name == "z"


async def test_a_transfer_does_not_write_to_the_repository_of_another_namespace(pod: MoverPod, tree: Path) -> None:
    before = sorted(pod.repository.rglob("*"))
    pod.kube.put(_ready("app", "default", name="app-dr-default-kopia", labels=_APP_DR["metadata"]["labels"]))
    pod.put_transfer("DataUpload", sourceNamespace="app-dr")
    assert await pod.run("data-upload", tree) == 12
    assert 'app-dr-default-kopia is for volume namespace "app"' in pod.message
    assert pod.reasons() == ["Data-Path-Started", "Data-Path-Failed", "Data-Path-Stopped"]
    assert sorted(pod.repository.rglob("*")) == before


async def test_a_repository_is_not_opened_in_another_location(tmp_path: Path) -> None:
    pod = MoverPod(FakeKube(), tmp_path)
    location = await pod.context.reader.location("default")
    other = BackupRepository.parse(pod.kube.put(_ready("app", "dr-default")))
    folder = WorkDir(tmp_path, tmp_path / "cache")
    with pytest.raises(RepositoryError, match=r'"dr-default" .*, not for .* "default"'):
        await RepositoryAccess(pod.context, folder, Waits()).resolve(location, other)


@pytest.mark.parametrize(
    ("config", "spec", "moved"),
    [
        ({"s3Url": "https://new:9000", "region": "r"}, {}, True),
        ({"s3Url": "https://old:9000", "region": "r"}, {"accessMode": "ReadOnly"}, False),
        (None, {}, False),
    ],
    ids=["address", "access mode", "no answer"],
)
async def test_a_storage_that_does_not_answer_is_compared_with_its_location(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, str] | None, spec: JsonDict, *, moved: bool
) -> None:
    refused = KopiaAnswer("", 1, b"", ["dial tcp 10.0.0.1:9000: connect: connection refused"])
    monkeypatch.setattr(Kopia, "call", AsyncMock(return_value=refused))
    pod, folder = MoverPod(FakeKube(), tmp_path), WorkDir(tmp_path, tmp_path / "cache")
    pod.put_secret("keys", "cloud", "[default]\naws_access_key_id=KEY\naws_secret_access_key=SECRET\n")
    keys = {"name": "keys", "key": "cloud"}
    pod.put_location({"s3Url": "https://old:9000", "region": "r"}, credential=keys)
    location = await pod.context.reader.location("default")
    repository = await RepositoryAccess(pod.context, folder, Waits()).resolve_namespace(location, "app")
    if config:
        pod.put_location(config, credential=keys, **spec)
    else:
        pod.kube.fail_next("GET", "backupstoragelocations", "lost", times=100)
    found = await repository.probe()
    assert (found.error, found.moved) == (StorageOutageError, moved)
    assert ("BackupStorageLocation default was changed meanwhile: " in found.message) is moved


@pytest.mark.parametrize("change", [{}, {"accessMode": "ReadOnly"}], ids=["directory", "read-only"])
async def test_a_location_that_changes_meanwhile_is_used_as_it_is(
    pod: MoverPod, tree: Path, change: dict[str, str]
) -> None:
    """The repository was made ready there, and not where the location was when the mover started."""
    old, new = pod.folder / "backups", pod.folder / "corrected"
    shutil.copytree(old, new)
    before = describe_tree(old)
    pod.put_repository(phase="New")
    pod.put_transfer("DataUpload")
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pod.run("data-upload", tree))
        await pod.wait_for(lambda: "Data-Path-Waiting" in pod.reasons())
        pod.put_location({"fspath": str(new)}, provider="velero.io/fs", **change)
        pod.put_repository(phase="Ready")
    assert (running.result(), "is read-only" in pod.message) == ((12, True) if change else (0, False))
    assert describe_tree(old) == before
    assert (describe_tree(new) == before) == bool(change)
