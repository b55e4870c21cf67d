"""Copies of Secrets and ConfigMaps beside the PVC of an expose."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from core.errors import ExposeError
from core.kube.errors import ForbiddenError
from core.kube.resources import CONFIG_MAPS, PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS, SECRETS
from core.models.base import JsonDict
from core.models.names import COPY_LABEL, OWNER_UID_LABEL
from exposer.leaked_objects import delete_leaked_objects, list_leaked_objects
from exposer.model import NotOwnerError, Pending
from exposer.settings import BackupPVCSettings
from tests.exposer.support.cuts import CUTS, Cut, interruptions
from tests.exposer.support.scenes import BackupScene, RestoreScene
from tests.exposer.support.steps import AnyScene, check, clean_up, ensure, expose

NAMES = ("Secret/token", "ConfigMap/kms")
SECRET = {"type": "example.com/key", "data": {"key": "c2VjcmV0"}}
CONFIG = {"data": {"a": "b"}, "binaryData": {"c": "ZA=="}}


class Case:
    """A volume of either direction, whose namespace has both objects."""

    def __init__(self, scene: AnyScene, namespace: str) -> None:
        self.scene: Any = scene
        self.namespace = namespace
        self.world = scene.world
        self.put(SECRETS, "token", namespace, labels={"team": "a"}, annotations={"a": "b"}, **SECRET)
        self.put(SECRETS, "token", "other", data={"key": "b3RoZXI="})
        self.put(CONFIG_MAPS, "kms", namespace, **CONFIG)
        self.configure(*NAMES)

    @property
    def request(self) -> Any:
        return self.scene.request

    @property
    def uid(self) -> str:
        return str(self.request.owner.uid)

    def exposer(self, transport: Cut | None = None) -> Any:
        return self.scene.exposer(transport)

    def put(self, resource: Any, name: str, namespace: str, **fields: Any) -> None:
        self.world.put(resource, name, namespace=namespace, uid=f"{name}-of-{namespace}", **fields)

    def configure(self, *names: str) -> None:
        backup_pvcs = {"hostpath": BackupPVCSettings(copies=names)}
        settings = replace(self.request.settings, backup_pvcs=backup_pvcs, restore_copies=names)
        self.scene.request = replace(self.request, settings=settings)

    def record(self, *names: str) -> None:
        """Accept the transfer with these names."""
        self.scene.request = replace(self.request, copied=names)

    def copies(self) -> list[JsonDict]:
        """Return what the agent's namespace has of both kinds."""
        found = [*self.world.kube.objects(SECRETS), *self.world.kube.objects(CONFIG_MAPS)]
        return [one for one in found if one["metadata"]["namespace"] == "velero"]

    def names(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.copies()]

    async def wait(self) -> Pending | None:
        """Expose until it does not go on; return what for, which is what a check says."""
        found = await check(self)
        for _ in range(8):
            again = await ensure(self)
            await self.world.settle()
        assert found == again
        return found


def backup() -> Case:
    return Case(BackupScene(), "app")


def restore() -> Case:
    return Case(RestoreScene(), "app3")


Build = Callable[[], Case]
BOTH = pytest.mark.parametrize("build", [backup, restore])


@BOTH
async def test_what_is_named_is_copied_from_the_volumes_namespace_and_deleted_by_the_cleanup(build: Build) -> None:
    case = build()
    assert await check(case) is None
    assert case.request.copies.needed == NAMES
    await expose(case)
    secret, config = case.copies()
    assert {key: secret[key] for key in SECRET} == SECRET
    assert {key: config[key] for key in CONFIG} == CONFIG
    for copy in (secret, config):
        meta = copy["metadata"]
        assert meta["labels"] == {OWNER_UID_LABEL: case.uid, COPY_LABEL: case.uid}
        assert [one["uid"] for one in meta["ownerReferences"]] == [case.uid]
        assert "annotations" not in meta
    await clean_up(case)
    assert case.copies() == []
    kept = {one["metadata"]["uid"] for one in case.world.kube.objects(SECRETS)}
    assert kept == {f"token-of-{case.namespace}", "token-of-other"}


@BOTH
@CUTS
async def test_an_expose_that_is_interrupted_at_any_request_copies_once_and_leaves_nothing(
    build: Build, applied: bool
) -> None:
    async for case in interruptions(build, expose, applied=applied, least=8):
        await expose(case)
        assert len(case.copies()) == 2
        await clean_up(case)
        assert case.copies() == []


@BOTH
@CUTS
async def test_a_cleanup_that_is_interrupted_at_any_request_is_continued(build: Build, applied: bool) -> None:
    async for case in interruptions(build, clean_up, applied=applied, least=6, prepare=expose):
        await clean_up(case)
        assert case.copies() == []


@BOTH
async def test_the_copies_outlast_pod_pvc_and_volume(build: Build) -> None:
    """A driver may need them to delete an encrypted volume."""
    case = build()
    await expose(case)
    case.world.reclaims = False
    for _ in range(6):
        assert len(case.copies()) == 2
        found = await case.exposer().clean_up(case.request)
        await case.world.settle()
    (volume,) = [one["metadata"]["name"] for one in case.world.kube.objects(PERSISTENT_VOLUMES)]
    assert found is not None
    assert found.message.startswith(f"PersistentVolume {volume} ")
    case.world.reclaims = True
    await case.world.settle()
    await clean_up(case)
    assert case.copies() == []


async def test_a_cleanup_waits_for_no_volume_that_an_administrator_has_given_to_another_pvc() -> None:
    case = restore()
    await expose(case)
    spec = {"persistentVolumeReclaimPolicy": "Retain", "claimRef": {"namespace": "a", "name": "b", "uid": "c"}}
    case.world.put(PERSISTENT_VOLUMES, "given", labels={OWNER_UID_LABEL: case.uid}, spec=spec)
    await clean_up(case)
    assert case.copies() == []


@BOTH
@pytest.mark.cause("copy-source-missing")
async def test_a_missing_source_is_waited_for_before_the_pvc_is_created(build: Build) -> None:
    case = build()
    await case.world.delete(SECRETS, f"{case.namespace}/token")
    before = len(case.world.kube.objects(PERSISTENT_VOLUME_CLAIMS))
    text = f"Secret {case.namespace}/token does not exist, and is to be copied for the volume"
    assert await case.wait() == Pending("CopySourceMissing", text, blocked=True)
    assert len(case.world.kube.objects(PERSISTENT_VOLUME_CLAIMS)) == before
    assert case.copies() == []


@BOTH
@pytest.mark.cause("copy-in-use")
async def test_a_transfer_waits_for_another_one_that_has_a_copy_of_that_name(build: Build) -> None:
    case = build()
    labels = {OWNER_UID_LABEL: "uid-9", COPY_LABEL: "uid-9"}
    case.put(SECRETS, "token", "velero", labels=labels, data={"key": "b3RoZXI="})
    text = "the copy of Secret token is in use by another transfer, until that is cleaned up"
    assert await case.wait() == Pending("CopyInUse", text)
    assert [one["data"] for one in case.copies()] == [{"key": "b3RoZXI="}]
    await case.world.delete(SECRETS, "velero/token")
    assert await check(case) is None
    await expose(case)
    assert case.copies()[0]["data"] == SECRET["data"]


FOREIGN = {
    "a user's": {},
    "of Velero's agent, for another transfer": {COPY_LABEL: "uid-of-another"},
    "of another owner": {OWNER_UID_LABEL: "uid-of-another"},
    "with labels that disagree": {OWNER_UID_LABEL: "uid-a", COPY_LABEL: "uid-b"},
}


@BOTH
@pytest.mark.parametrize("labels", FOREIGN.values(), ids=FOREIGN.keys())
@pytest.mark.cause("copy-name-taken")
async def test_an_object_that_is_no_copy_of_ours_is_neither_used_nor_changed_nor_deleted(
    build: Build, labels: dict[str, str]
) -> None:
    case = build()
    case.put(SECRETS, "token", "velero", labels=labels, **SECRET)
    before = case.copies()
    message = "Secret velero/token already exists and is no copy of this node agent, which needs that name for one"
    for step in (check, expose):
        with pytest.raises(ExposeError, match=f"^{message}$"):
            await step(case)
    await clean_up(case)
    assert case.copies() == before


@BOTH
async def test_a_copy_of_veleros_agent_for_the_same_transfer_is_used_and_deleted(build: Build) -> None:
    case = build()
    case.put(SECRETS, "token", "velero", labels={COPY_LABEL: case.uid}, **SECRET)
    assert await check(case) is None
    await expose(case)
    assert case.names() == ["token", "kms"]
    await clean_up(case)
    assert case.copies() == []


@BOTH
@pytest.mark.parametrize(
    ("namespace", "path"),
    [("volume", "secrets/token"), ("volume", "configmaps/kms"), ("velero", "configmaps/kms")],
    ids=["secrets", "configmaps", "configmaps of the agent's namespace"],
)
@pytest.mark.cause("copy-forbidden")
async def test_without_the_permission_a_transfer_fails_and_names_it(build: Build, namespace: str, path: str) -> None:
    case = build()
    place = case.namespace if namespace == "volume" else namespace
    action = "to copy what the volume needs: apply deploy/volume-secrets"
    message = f"no permission to get {path.partition('/')[0]} in namespace {place}, {action}"
    for step in (check, expose):
        case.world.kube.fail_next("GET", f"/namespaces/{place}/{path}", 403)
        with pytest.raises(ExposeError, match=message):
            await step(case)
    case.world.kube.fail_next("GET", "/namespaces/velero/configmaps/kms", 403)
    await clean_up(case)
    assert case.copies() == []


@BOTH
async def test_a_cleanup_does_not_pass_for_done_while_a_recorded_copy_cannot_be_read(build: Build) -> None:
    case = build()
    case.record(*NAMES)
    case.world.kube.fail_next("GET", "/namespaces/velero/configmaps/kms", 403)
    with pytest.raises(ForbiddenError):
        await clean_up(case)


@BOTH
@pytest.mark.parametrize(
    ("configured", "recorded", "copied"),
    [
        pytest.param(NAMES, NAMES, ["token", "kms"], id="recorded"),
        # The leader has reserved only the recorded names.
        pytest.param(NAMES, ("ConfigMap/kms",), ["kms"], id="configured after the transfer was accepted"),
        pytest.param(
            ("Secret/token",),
            ("ConfigMap/kms", "Secret/token", "Secret/../x", "Secret/", "Pod/token", "Secret", "/"),
            ["token"],
            id="not configured, whatever the annotation says",
        ),
    ],
)
async def test_what_is_configured_and_recorded_is_copied_and_deleted_after_the_configuration_has_changed(
    build: Build, configured: tuple[str, ...], recorded: tuple[str, ...], copied: list[str]
) -> None:
    case = build()
    case.configure(*configured)
    case.record(*recorded)
    await expose(case)
    assert case.names() == copied
    case.configure()
    await clean_up(case)
    assert case.copies() == []


async def test_nothing_is_copied_for_another_class_nor_for_a_volume_of_the_agents_namespace() -> None:
    case = backup()
    assert replace(case.request, storage_class="other").copies.possible == ()
    assert replace(restore().request, target_namespace="velero").copies.possible == ()


@BOTH
async def test_an_expose_and_its_cleanup_read_no_secret_unless_one_is_configured(build: Build) -> None:
    case = build()
    case.configure()
    transport = Cut(case.world.kube)
    await expose(case, transport)
    await clean_up(case, transport)
    assert [call for call in transport.calls if "/secrets" in call or "/configmaps" in call] == []


@BOTH
async def test_the_copies_of_a_run_whose_transfer_has_ended_are_deleted_by_it(build: Build) -> None:
    case = build()

    async def guard(*, sure: bool) -> None:
        if len(case.copies()) == 2:
            raise NotOwnerError("final", ended=True)

    with pytest.raises(NotOwnerError):
        await expose(case, guard=guard)
    assert case.copies() == []


@BOTH
@pytest.mark.parametrize("listed", [True, False], ids=["with copies", "without"])
async def test_leaked_copies_are_deleted_after_the_volume_and_no_other_object(build: Build, listed: bool) -> None:
    case = build()
    await expose(case)
    case.put(SECRETS, "labeled", "velero", labels={OWNER_UID_LABEL: case.uid}, **SECRET)
    case.put(SECRETS, "of-velero", "velero", labels={COPY_LABEL: case.uid}, **SECRET)
    for _ in range(20):
        for leaked in (await list_leaked_objects(case.world.client, "velero", copies=listed)).values():
            if await delete_leaked_objects(case.world.client, leaked):
                volumes = [one["metadata"]["name"] for one in case.world.kube.objects(PERSISTENT_VOLUMES)]
                assert len(case.copies()) == 4 or not volumes
        await case.world.settle()
    assert case.names() == (["labeled", "of-velero"] if listed else ["labeled", "of-velero", "token", "kms"])


async def test_leaked_objects_are_listed_without_the_permission_for_copies() -> None:
    case = backup()
    await expose(case)
    case.world.kube.fail_next("GET", "/namespaces/velero/secrets", 403)
    (leaked,) = (await list_leaked_objects(case.world.client, "velero", copies=True)).values()
    assert len(leaked.of(PODS)) == len(leaked.of(CONFIG_MAPS)) == 1
