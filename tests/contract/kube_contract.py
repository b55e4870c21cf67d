"""The project's requirements on an API server, as tests to be inherited.

A subclass defines the fixture `bench`. Custom resources are used where validation of built-in
kinds would be in the way: a DataUpload holds anything a test wants to see.
"""

import json

import pytest

from core.clock import SystemClock
from core.kube.client import Deletion, Selection
from core.kube.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    KubeError,
    NotFoundError,
    NotServedError,
    UnknownPathError,
    UnreachableError,
    raise_for_status,
)
from core.kube.events import EventRecorder, ObjectRef
from core.kube.resources import CONFIG_MAPS, DATA_UPLOADS, EVENTS, PERSISTENT_VOLUMES, PODS, Resource
from core.kube.transport import Request
from core.kube.watch import ChangeKind
from tests.contract.bench import HOLD, Bench
from tests.support.objects import JsonDict


def _meta(obj: JsonDict) -> JsonDict:
    meta: JsonDict = obj["metadata"]
    return meta


class KubeContract:
    """The tests."""

    # -- create, read, patch, delete -----------------------------------------------------------

    async def test_created_object_has_a_uid_of_the_server_version_and_time(self, bench: Bench) -> None:
        created = await bench.config_map("a", uid="mine")
        assert {"uid", "resourceVersion", "creationTimestamp"} <= _meta(created).keys()
        found: JsonDict = await bench.client.get(CONFIG_MAPS, bench.namespace, "a")
        assert (found["data"], _meta(found)["uid"]) == ({"key": "value"}, _meta(created)["uid"])
        assert _meta(created)["uid"] != "mine"
        with pytest.raises(AlreadyExistsError):
            await bench.config_map("a")

    async def test_generated_names_differ(self, bench: Bench) -> None:
        manifest = bench.build_config_map("", generateName="some-")
        del manifest["metadata"]["name"]
        names = {_meta(await bench.client.create(CONFIG_MAPS, manifest))["name"] for _ in range(2)}
        assert len(names) == 2
        assert all(name.startswith("some-") for name in names)

    async def test_invalid_name_is_rejected(self, bench: Bench) -> None:
        with pytest.raises(InvalidError):
            await bench.config_map("Not_A_Name")

    async def test_absent_object_is_not_found(self, bench: Bench) -> None:
        client = bench.client
        assert await client.read(CONFIG_MAPS, bench.namespace, "a") is None
        assert await client.delete(CONFIG_MAPS, bench.namespace, "a") is Deletion.NOT_FOUND
        with pytest.raises(NotFoundError):
            await bench.patch(CONFIG_MAPS, "a", {"data": {"key": "new"}})
        with pytest.raises(KubeError, match=f"get ConfigMap {bench.namespace}/a: 404 NotFound"):
            await client.get(CONFIG_MAPS, bench.namespace, "a")

    async def test_merge_patch_sets_replaces_and_removes(self, bench: Bench) -> None:
        await bench.config_map("a", labels={"one": "1", "two": "2"}, annotations={"n": "1"})
        patch = {"metadata": {"labels": {"one": None, "three": "3"}, "annotations": None}, "data": {"more": "x"}}
        patched = await bench.patch(CONFIG_MAPS, "a", patch)
        assert _meta(patched)["labels"] == {"two": "2", "three": "3"}
        assert "annotations" not in _meta(patched)
        assert patched["data"] == {"key": "value", "more": "x"}
        emptied = await bench.patch(CONFIG_MAPS, "a", {"metadata": {"labels": {"two": None, "three": None}}})
        assert "labels" not in _meta(emptied)
        unchanged = await bench.patch(CONFIG_MAPS, "a", {"data": {"key": "value"}})
        assert _meta(unchanged)["resourceVersion"] == _meta(emptied)["resourceVersion"]

    async def test_patch_with_current_uid_and_version_is_applied(self, bench: Bench) -> None:
        meta = _meta(await bench.upload("a"))
        fence = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
        patched = await bench.patch(DATA_UPLOADS, "a", {"metadata": fence, "status": {"phase": "Accepted"}})
        assert patched["status"] == {"phase": "Accepted"}
        assert _meta(patched)["resourceVersion"] != meta["resourceVersion"]

    @pytest.mark.parametrize("resource", [CONFIG_MAPS, DATA_UPLOADS], ids=["built-in", "custom"])
    async def test_patch_with_another_uid_or_an_older_version_conflicts(self, bench: Bench, resource: Resource) -> None:
        created = await (bench.config_map("a") if resource is CONFIG_MAPS else bench.upload("a"))
        await bench.patch(resource, "a", {"metadata": {"labels": {"x": "1"}}})
        for fence in ({"uid": "another"}, {"resourceVersion": _meta(created)["resourceVersion"]}):
            with pytest.raises(ConflictError):
                await bench.patch(resource, "a", {"metadata": fence | {"labels": {"x": "2"}}})

    async def test_custom_resource_is_pruned_to_its_schema(self, bench: Bench) -> None:
        await bench.upload("a")
        patched = await bench.patch(DATA_UPLOADS, "a", {"status": {"phase": "New", "unheardOf": 1}, "extra": {}})
        assert patched["status"] == {"phase": "New"}
        assert "extra" not in patched

    async def test_delete_with_a_uid_removes_no_other_object(self, bench: Bench) -> None:
        created = await bench.config_map("a")
        assert await bench.client.delete(CONFIG_MAPS, bench.namespace, "a", uid="another") is Deletion.CONFLICT
        assert await bench.client.read(CONFIG_MAPS, bench.namespace, "a") is not None
        deletion = await bench.client.delete(CONFIG_MAPS, bench.namespace, "a", uid=_meta(created)["uid"])
        assert deletion is Deletion.DONE
        assert await bench.client.read(CONFIG_MAPS, bench.namespace, "a") is None

    async def test_unscheduled_pod_is_deleted_at_once(self, bench: Bench) -> None:
        await bench.client.create(PODS, bench.build_pod("a"))
        assert await bench.client.delete(PODS, bench.namespace, "a") is Deletion.DONE
        assert await bench.client.read(PODS, bench.namespace, "a") is None

    # -- finalizers ----------------------------------------------------------------------------

    async def test_finalizer_blocks_a_deletion_until_it_is_removed(self, bench: Bench) -> None:
        await bench.upload("a", finalizers=[HOLD])
        assert await bench.client.delete(DATA_UPLOADS, bench.namespace, "a") is Deletion.STARTED
        held = await bench.client.get(DATA_UPLOADS, bench.namespace, "a")
        assert "deletionTimestamp" in _meta(held)
        assert await bench.client.delete(DATA_UPLOADS, bench.namespace, "a") is Deletion.STARTED
        assert await bench.client.get(DATA_UPLOADS, bench.namespace, "a") == held
        changed = await bench.patch(DATA_UPLOADS, "a", {"status": {"message": "held"}})
        assert _meta(changed)["deletionTimestamp"] == _meta(held)["deletionTimestamp"]
        with pytest.raises(InvalidError):
            await bench.patch(DATA_UPLOADS, "a", {"metadata": {"finalizers": [HOLD, HOLD + "-2"]}})
        await bench.patch(DATA_UPLOADS, "a", {"metadata": {"finalizers": None}})
        assert await bench.client.read(DATA_UPLOADS, bench.namespace, "a") is None

    # -- lists ---------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("selector", "expected"),
        [
            ("app=x", {"a", "b"}),
            ("app=x,tier=web", {"a"}),
            ("tier", {"a", "c"}),
            ("!tier", {"b"}),
            ("app!=x", {"c"}),
            ("tier in (web, db)", {"a", "c"}),
            ("tier notin (web)", {"b", "c"}),
        ],
    )
    async def test_label_selector_chooses(self, bench: Bench, selector: str, expected: set[str]) -> None:
        await bench.config_map("a", labels={"app": "x", "tier": "web"})
        await bench.config_map("b", labels={"app": "x"})
        await bench.config_map("c", labels={"tier": "db"})
        found = await bench.client.list(bench.selection(label_selector=selector))
        # A real server creates a ConfigMap with its certificate in each namespace.
        assert {_meta(obj)["name"] for obj in found} - {"kube-root-ca.crt"} == expected

    async def test_field_selector_chooses_events_by_object_and_reason(self, bench: Bench) -> None:
        recorder = EventRecorder(bench.client, SystemClock(), component="test", host="node-a")
        about = ObjectRef.of(await bench.upload("a"))
        await recorder.record(about, "Data-Path-Progress", "{}")
        await recorder.record(about, "Data-Path-Started", "started")
        await recorder.record(ObjectRef.of(await bench.upload("b")), "Data-Path-Progress", "{}")
        selector = f"involvedObject.uid={about.uid},reason=Data-Path-Progress"
        found: list[JsonDict] = await bench.client.list(bench.selection(EVENTS, field_selector=selector))
        assert [(event["involvedObject"]["name"], event["message"]) for event in found] == [("a", "{}")]

    async def test_field_selector_chooses_by_name_and_no_unknown_field(self, bench: Bench) -> None:
        await bench.upload("a")
        await bench.upload("b")
        found = await bench.client.list(bench.selection(DATA_UPLOADS, field_selector="metadata.name=b"))
        assert [_meta(obj)["name"] for obj in found] == ["b"]
        with pytest.raises(InvalidError):
            await bench.client.list(bench.selection(DATA_UPLOADS, field_selector="spec.sourcePVC=data"))

    async def test_list_comes_in_pages_of_one_moment(self, bench: Bench) -> None:
        for name in "abcde":
            await bench.upload(name)
        path = DATA_UPLOADS.path(bench.namespace)
        first = await _list_page(bench, path, limit="2")
        await bench.upload("aa")
        second = await _list_page(bench, path, limit="10", **{"continue": first["metadata"]["continue"]})
        names = [_meta(obj)["name"] for obj in first["items"] + second["items"]]
        assert names == ["a", "b", "c", "d", "e"]
        assert not second["metadata"].get("continue")
        assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]

    async def test_listed_objects_have_kind_and_version(self, bench: Bench) -> None:
        await bench.config_map("a")
        found = await bench.client.list(bench.selection())
        assert {(obj["apiVersion"], obj["kind"]) for obj in found} == {("v1", "ConfigMap")}

    async def test_cluster_scoped_object_has_no_namespace(self, bench: Bench) -> None:
        spec = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": "/nowhere"},
            "persistentVolumeReclaimPolicy": "Retain",
        }
        name = f"pv-{bench.namespace}"
        manifest = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
        created = await bench.client.create(PERSISTENT_VOLUMES, manifest)
        assert "namespace" not in _meta(created)
        patch = {"spec": {"claimRef": {"namespace": bench.namespace, "name": "target"}}}
        patched = await bench.client.patch(PERSISTENT_VOLUMES, "", name, patch)
        assert patched["spec"]["claimRef"]["name"] == "target"

    # -- watches -------------------------------------------------------------------------------

    async def test_watch_has_the_changes_after_the_list(self, bench: Bench) -> None:
        await bench.upload("a")
        async with bench.watch(bench.selection(DATA_UPLOADS)) as watching:
            created = await bench.upload("b")
            assert await watching.next_name() == ("ADDED", "b")
            await bench.patch(DATA_UPLOADS, "a", {"status": {"phase": "Accepted"}})
            assert await watching.next_name() == ("MODIFIED", "a")
            await bench.client.delete(DATA_UPLOADS, bench.namespace, "b")
            change = await watching.next()
        assert (change.kind, _meta(change.obj)["name"]) == (ChangeKind.DELETED, "b")
        assert int(_meta(change.obj)["resourceVersion"]) > int(_meta(created)["resourceVersion"])

    async def test_held_deletion_is_a_change_first(self, bench: Bench) -> None:
        await bench.upload("a", finalizers=[HOLD])
        async with bench.watch(bench.selection(DATA_UPLOADS)) as watching:
            await bench.client.delete(DATA_UPLOADS, bench.namespace, "a")
            marked = await watching.next()
            await bench.patch(DATA_UPLOADS, "a", {"metadata": {"finalizers": None}})
            deleted = await watching.next()
        assert marked.kind is ChangeKind.MODIFIED
        assert "deletionTimestamp" in _meta(marked.obj)
        assert deleted.kind is ChangeKind.DELETED

    async def test_leaving_and_entering_a_selection_read_as_deletion_and_addition(self, bench: Bench) -> None:
        await bench.upload("a", labels={"node": "x"})
        async with bench.watch(bench.selection(DATA_UPLOADS, label_selector="node=x")) as watching:
            await bench.patch(DATA_UPLOADS, "a", {"metadata": {"labels": {"node": "y"}}})
            left = await watching.next()
            await bench.patch(DATA_UPLOADS, "a", {"metadata": {"labels": {"node": "x"}}})
            entered = await watching.next()
        assert (left.kind, _meta(left.obj)["labels"]) == (ChangeKind.DELETED, {"node": "x"})
        assert (entered.kind, _meta(entered.obj)["labels"]) == (ChangeKind.ADDED, {"node": "x"})

    async def test_watch_continues_from_a_version_until_its_time_is_over(self, bench: Bench) -> None:
        created = await bench.upload("a")
        await bench.upload("b")
        query = {"resourceVersion": _meta(created)["resourceVersion"], "timeoutSeconds": "1"}
        async with bench.stream(DATA_UPLOADS, **query) as lines:
            (line,) = [line async for line in lines]
        assert b'"b"' in line

    async def test_watch_from_before_all_history_is_gone(self, bench: Bench) -> None:
        await bench.upload("a")
        async with bench.stream(DATA_UPLOADS, resourceVersion="1") as lines:
            event = json.loads(await anext(lines))
        assert (event["type"], event["object"]["code"]) == ("ERROR", 410)

    async def test_large_object_comes_in_one_line(self, bench: Bench) -> None:
        version = _meta(await bench.config_map("a"))["resourceVersion"]
        async with bench.stream(CONFIG_MAPS, resourceVersion=version) as lines:
            await bench.patch(CONFIG_MAPS, "a", {"data": {"key": "x" * 500_000}})
            line = await anext(lines)
        assert len(line) > 500_000

    # -- rejections ----------------------------------------------------------------------------

    async def test_watch_of_an_absent_kind_is_rejected_on_entering(self, bench: Bench) -> None:
        with pytest.raises(UnknownPathError):
            async with bench.stream(Resource("Nothing", "nothings", "velero.io")):
                pass

    @pytest.mark.parametrize("group", ["velero.io", "nothing.example.com"])
    async def test_an_object_of_an_absent_kind_does_not_exist(self, bench: Bench, group: str) -> None:
        absent = Resource("Nothing", "nothings", group)
        assert await bench.client.read(absent, bench.namespace, "a") is None
        assert await bench.client.delete(absent, bench.namespace, "a") is Deletion.NOT_FOUND
        with pytest.raises(NotServedError, match=f"list Nothing {bench.namespace}: nothings.{group}/v1 is not served"):
            await bench.client.list(Selection(absent, bench.namespace))

    async def test_silence_breaks_a_watch(self, bench: Bench) -> None:
        version = _meta(await bench.upload("a"))["resourceVersion"]
        query = {"watch": "true", "resourceVersion": version}
        request = Request("GET", DATA_UPLOADS.path(bench.namespace), query, timeout_seconds=0.3)
        with pytest.raises(UnreachableError):
            async with bench.transport.stream(request) as lines:
                await anext(lines)


async def _list_page(bench: Bench, path: str, **query: str) -> JsonDict:
    response = await bench.transport.request(Request("GET", path, query))
    raise_for_status(response.status, response.body, attempted=f"list {path}")
    page: JsonDict = json.loads(response.body)
    return page
