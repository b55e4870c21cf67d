"""Which volumes a Schedule backs up: the answers of Velero's own tests and documentation; selectors and wildcards."""

from typing import Any

import pytest

from nodeagent.coverage.policies import parse_policies
from nodeagent.coverage.selection import (
    BackupMethod,
    BackupSchedule,
    ServerDefaults,
    explain_fault,
    includes,
    parse_selector,
    select_volumes,
)
from tests.nodeagent.support.volume_scene import a_claim, a_cluster, a_pod, a_schedule, a_volume, an_object
from tests.support.objects import JsonDict

LEFT_OUT = {"velero.io/exclude-from-backup": "true"}
CACHE = {"name": "cache", "emptyDir": {}}
TOKEN = {"name": "default-token-x", "secret": {"secretName": "x"}}

CLUSTER = a_cluster(
    an_object("Namespace", "app", labels={"team": "a"}),
    an_object("Namespace", "app-test"),
    an_object("Namespace", "db"),
    an_object("Namespace", "off", labels=LEFT_OUT),
    a_claim("data", labels={"tier": "web"}),
    a_volume("data"),
    a_claim("logs"),
    a_volume("logs", size="100Gi", class_="slow"),
    a_claim("secret", labels=LEFT_OUT),
    a_volume("secret"),
    a_claim("pending", phase="Pending"),
    a_claim("share", class_="nfs"),
    a_volume("share", class_="nfs", nfs={"server": "nfs.example.com", "path": "/share"}),
    a_claim("data", "app-test"),
    a_volume("data", "app-test"),
    a_claim("main", "db", labels={"tier": "db", "velero.io/volume-group": "g"}),
    a_volume("main", "db"),
    a_claim("wal", "db", labels={"velero.io/volume-group": "g"}),
    a_volume("wal", "db"),
    a_claim("data", "off"),
    a_volume("data", "off"),
    a_pod("web-0", claims=["data", "share"], volumes=[CACHE, TOKEN], labels={"tier": "web"}),
    a_pod("job-1", claims=["logs"], phase="Succeeded"),
    a_pod("db-0", "db", claims=["main"], annotations={"backup.velero.io/backup-volumes": "main"}),
)

MOVED, FS, SNAPSHOT, SKIPPED, NONE = BackupMethod
ALL_MOVED = {
    "app/data": MOVED,
    "app/logs": MOVED,
    "app/share": NONE,
    "app-test/data": MOVED,
    "db/main": FS,
    "db/wal": MOVED,
}
APP = {key: method for key, method in ALL_MOVED.items() if key.startswith("app/")}
SNAPSHOTS = {key: SNAPSHOT if method is MOVED else method for key, method in ALL_MOVED.items()}


def policies(*rules: tuple[JsonDict, str], **more: object) -> str:
    parts = [f"- conditions: {conditions}\n  action: {{type: {action}}}" for conditions, action in rules]
    extra = "".join(f"{key}: {value}\n" for key, value in more.items())
    return "version: v1\nvolumePolicies:\n" + "\n".join(parts) + f"\n{extra}"


def selected(template: JsonDict, text: str = "", defaults: ServerDefaults | None = None) -> dict[str, BackupMethod]:
    schedule = BackupSchedule.from_wire(a_schedule("night", **template))
    found = parse_policies({"policies": text}) if text else None
    choices = select_volumes(schedule.spec.template, CLUSTER, defaults or ServerDefaults(), found)
    return {"/".join(key): choice.method for key, choice in choices.items()}


MOVE: JsonDict = {"snapshotMoveData": True}
WEB: JsonDict = {"labelSelector": {"matchLabels": {"tier": "web"}}}
DB: JsonDict = {"labelSelector": {"matchLabels": {"tier": "db"}}}
OPT_OUT: JsonDict = {"defaultVolumesToFsBackup": True}
FS_ALL = {"app/data": FS, "app/share": FS, "app/web-0:cache": FS, "app/logs": NONE, "db/main": FS}
FS_APP = {key: method for key, method in FS_ALL.items() if key.startswith("app/")}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # pkg/util/collections: TestShouldInclude, TestExpandIncludesExcludes, TestResolveNamespaceList.
        pytest.param({}, ALL_MOVED, id="all namespaces, but not one with the label"),
        pytest.param({"includedNamespaces": ["app*"]}, APP | {"app-test/data": MOVED}, id="a pattern"),
        pytest.param({"excludedNamespaces": ["app*", "off"]}, {"db/main": FS, "db/wal": MOVED}, id="only excluded"),
        pytest.param({"includedNamespaces": ["off"]}, {}, id="the label of a namespace wins"),
        # pkg/backup: TestBackupResourceFiltering.
        pytest.param({"includedResources": ["deployments"]}, {}, id="no PVCs and no pods"),
        pytest.param({"includedResources": ["pvc"]}, ALL_MOVED | {"db/main": NONE}, id="a short name, no pods"),
        pytest.param({"includedResources": ["PersistentVolumeClaims", "Pods"]}, ALL_MOVED, id="other letters"),
        pytest.param({"excludedResources": ["persistentvolumeclaims"]}, {}, id="PVCs excluded, so no fs-backup"),
        pytest.param({"includedNamespaceScopedResources": ["persistentvolumeclaim", "pods"]}, ALL_MOVED, id="singular"),
        # pkg/backup: TestBackupItemCollection, pkg/itemblock/actions.
        pytest.param(WEB, {"app/data": MOVED, "app/share": NONE}, id="a pod brings its PVCs"),
        pytest.param(DB, {"db/main": FS, "db/wal": MOVED}, id="a PVC brings its pods and its group"),
        pytest.param(DB | {"volumeGroupSnapshotLabelKey": "other"}, {"db/main": FS}, id="groups by another label"),
        pytest.param(
            {"orLabelSelectors": [{"matchLabels": {"tier": "web"}}, {"matchLabels": {"tier": "db"}}]},
            {"app/data": MOVED, "app/share": NONE, "db/main": FS, "db/wal": MOVED},
            id="one of several selectors",
        ),
        pytest.param(
            {"labelSelector": {"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["web", "db"]}]}},
            {key: method for key, method in ALL_MOVED.items() if key != "db/main"} | {"db/main": FS},
            id="labels that an object lacks",
        ),
    ],
)
def test_volumes_that_a_schedule_selects(template: JsonDict, expected: dict[str, BackupMethod]) -> None:
    assert selected(MOVE | template) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # internal/volumehelper: TestVolumeHelperImpl_ShouldPerformSnapshot, …_ShouldPerformFSBackup.
        pytest.param({}, SNAPSHOTS, id="snapshots that stay"),
        pytest.param({"snapshotVolumes": False}, dict.fromkeys(ALL_MOVED, NONE) | {"db/main": FS}, id="no snapshots"),
        pytest.param(
            OPT_OUT,
            FS_ALL | {"app-test/data": SNAPSHOT, "db/wal": SNAPSHOT},
            id="opt-out, a finished pod is in the way",
        ),
        pytest.param(
            OPT_OUT | MOVE, FS_ALL | {"app-test/data": MOVED, "db/wal": MOVED}, id="opt-out beside the data mover"
        ),
        pytest.param(
            {"defaultVolumesToRestic": True, "defaultVolumesToFsBackup": False, "includedNamespaces": ["app"]},
            FS_APP,
            id="the old name of opt-out",
        ),
        pytest.param(OPT_OUT | {"includedResources": ["pods"]}, {"app/web-0:cache": FS}, id="pods without their PVCs"),
    ],
)
def test_the_method_that_a_schedule_uses(template: JsonDict, expected: dict[str, BackupMethod]) -> None:
    assert selected(template) == expected


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        # internal/resourcepolicies: TestGetResourceMatchedAction; site/content/docs/main/resource-filtering.md.
        pytest.param([({"storageClass": ["slow"]}, "skip")], {"app/logs": SKIPPED}, id="a storage class"),
        pytest.param([({"nfs": {}}, "fs-backup")], {"app/share": FS}, id="any NFS server"),
        pytest.param([({"nfs": {"server": "other.test"}}, "fs-backup")], {"app/share": NONE}, id="another NFS server"),
        pytest.param(
            [({"volumeTypes": ["emptyDir", "nfs"]}, "fs-backup")],
            {"app/share": FS, "app/web-0:cache": FS},
            id="types of volumes",
        ),
        pytest.param([({"pvcPhase": ["Bound"]}, "custom")], dict.fromkeys(APP, SNAPSHOT), id="a phase, another plugin"),
        pytest.param(
            [({"storageClass": ["slow"]}, "snapshot"), ({}, "skip")],
            {"app/logs": MOVED, "app/data": SKIPPED, "app/share": SKIPPED},
            id="the first that matches",
        ),
        pytest.param([({"storageClass": ["slow"]}, "fs-backup")], {"app/logs": NONE}, id="fs-backup, no pod that runs"),
    ],
)
def test_volume_policies_come_before_all_else(rules: Any, expected: dict[str, BackupMethod]) -> None:
    assert selected(MOVE | {"includedNamespaces": ["app"]}, policies(*rules)) == APP | expected


def test_a_policy_may_leave_pvcs_out() -> None:
    """Source: CombineWithPolicy in pkg/util/collections/includes_excludes.go."""
    text = policies(({}, "snapshot"), includeExcludePolicy="{excludedNamespaceScopedResources: [pvc]}")
    assert selected(MOVE, text) == {}
    chosen = {"includedNamespaceScopedResources": ["pvc"], "includedNamespaces": ["app"]}
    assert selected(MOVE | chosen, text) == dict.fromkeys(APP, MOVED) | {"app/share": NONE}


def test_the_server_decides_what_a_schedule_leaves_open() -> None:
    only_app = {"includedNamespaces": ["app"]}
    assert selected({}, defaults=ServerDefaults(move_data=True)) == ALL_MOVED
    by_files = ServerDefaults(fs_backup=True)
    assert selected(only_app, defaults=by_files) == FS_APP
    assert selected(only_app | {"defaultVolumesToFsBackup": False}, defaults=by_files) == {
        key: SNAPSHOTS[key] for key in APP
    }
    # Its policies follow those of the schedule.
    skipping = ServerDefaults(policies=parse_policies({"p": policies(({}, "skip"))}))
    found = selected(MOVE | only_app, policies(({"storageClass": ["slow"]}, "snapshot")), skipping)
    assert found == dict.fromkeys(APP, SKIPPED) | {"app/logs": MOVED}


@pytest.mark.parametrize(
    ("annotations", "template", "expected"),
    [
        ({"backup.velero.io/backup-volumes": "data,other"}, {}, FS),
        ({"backup.velero.io/backup-volumes": "other"}, {}, SNAPSHOT),
        ({"backup.velero.io/backup-volumes-excludes": "data"}, OPT_OUT, SNAPSHOT),
        ({"backup.velero.io/backup-volumes-excludes": "data"}, OPT_OUT | {"snapshotVolumes": False}, SKIPPED),
        ({"pre.hook.backup.velero.io/command": "dump"}, {"snapshotVolumes": False}, SNAPSHOT),
        ({}, {"snapshotVolumes": False}, NONE),
    ],
    ids=["opt-in", "another one", "opt-out", "opt-out without snapshots", "hooks only", "nothing"],
)
def test_annotations_choose_the_method(annotations: JsonDict, template: JsonDict, expected: BackupMethod) -> None:
    cluster = a_cluster(a_claim("data"), a_volume("data"), a_pod("web-0", claims=["data"], annotations=annotations))
    schedule = BackupSchedule.from_wire(a_schedule("night", **template))
    (choice,) = select_volumes(schedule.spec.template, cluster, ServerDefaults()).values()
    assert choice.method is expected
    assert bool(choice.why) is not choice.method.copies


@pytest.mark.parametrize(
    "pod",
    [
        a_pod("web-0", claims=["data"], mounted=False),
        a_pod("web-0", claims=["data"], phase="Pending"),
        a_pod("web-0", claims=["data"], deleting=True),
        a_pod("web-0", claims=["data"], labels=LEFT_OUT),
    ],
    ids=["not mounted", "pending", "deleting", "left out"],
)
def test_fs_backup_needs_a_running_pod_that_mounts_the_volume(pod: JsonDict) -> None:
    """Source: BackupPodVolumes in pkg/podvolume/backupper.go; such a pod keeps the volume from being snapshotted."""
    cluster = a_cluster(a_claim("data"), a_volume("data"), pod)
    template = BackupSchedule.from_wire(a_schedule("night", **OPT_OUT)).spec.template
    assert [one.method for one in select_volumes(template, cluster, ServerDefaults()).values()] == [NONE]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        # pkg/util/collections: TestValidateNamespaceIncludesExcludes; pkg/controller: TestBackupValidationFailed.
        ({"includedNamespaces": ["*", "app"]}, "has * beside others"),
        ({"includedNamespaces": ["a|b"]}, "no name or pattern"),
        ({"includedNamespaces": ["a["]}, "no name or pattern"),
        ({"includedNamespaces": ["app"], "excludedNamespaces": ["app"]}, "included and excluded"),
        ({"excludedNamespaces": ["*"]}, "all namespaces"),
        ({"includedResources": ["pods"], "includedNamespaceScopedResources": ["pods"]}, "older and newer"),
        ({"includedResources": ["*", "pods"]}, "* beside others"),
        ({"excludedNamespaceScopedResources": ["*", "pods"]}, "* beside others"),
        ({"includedResources": ["pods"], "excludedResources": ["pods"]}, "resource pods is included and excluded"),
        ({"excludedResources": ["*"]}, "all resources"),
        ({"includedNamespaceScopedResources": ["pods"], "excludedNamespaceScopedResources": ["*"]}, "* beside"),
        ({"labelSelector": {}, "orLabelSelectors": [{}]}, "both labelSelector"),
    ],
)
def test_a_template_that_the_server_rejects(template: JsonDict, words: str) -> None:
    fault = explain_fault(BackupSchedule.from_wire(a_schedule("night", **template)).spec.template)
    assert fault is not None
    assert words in fault


def test_a_valid_template_has_no_fault() -> None:
    nulls: JsonDict = {"includedNamespaces": None, "labelSelector": None, "hooks": {"resources": None}}
    template: JsonDict = {"includedNamespaces": ["app-[a-c]*"], "excludedNamespaces": ["app-b"]} | nulls
    template |= {"excludedNamespaceScopedResources": ["*"]}
    assert explain_fault(BackupSchedule.from_wire(a_schedule("night", **template)).spec.template) is None


LABELS = {"tier": "web", "env": "prod", "empty": ""}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("tier==web,env=prod", True),
        ("tier=db", False),
        ("tier!=db", True),
        ("other!=x", True),
        ("tier!=web", False),
        ("tier in (web, db)", True),
        ("tier notin (web)", False),
        ("other notin (web)", True),
        ("tier", True),
        ("other", False),
        ("!other", True),
        ("! tier", False),
        ("empty=", True),
        ("env=prod , tier in (web)", True),
    ],
)
def test_a_label_selector(text: str, expected: bool) -> None:
    assert parse_selector(text).matches(LABELS) is expected


@pytest.mark.parametrize("text", ["=web", "a=b c=d", "tier in web", "tier in (web", "a,,b", "!", "(x)", "size>5"])
def test_text_that_is_no_label_selector(text: str) -> None:
    with pytest.raises(ValueError, match="not a label selector"):
        parse_selector(text)


@pytest.mark.parametrize(
    ("included", "excluded", "name", "expected"),
    [
        # Velero, pkg/util/collections/includes_excludes_test.go, TestShouldInclude.
        ([], [], "foo", True),
        (["*"], [], "foo", True),
        (["foo", "baz"], [], "bar", False),
        (["*"], ["foo"], "bar", True),
        (["foo"], ["foo"], "foo", False),
        (["*.bar"], [], "foo.bar", True),
        (["*"], ["*.bar"], "foo.bar", False),
        # pkg/util/wildcard/expand_test.go.
        (["ns-[0-9]"], [], "ns-7", True),
        (["ns-[0-9]"], [], "ns-x", False),
        (["test-?"], [], "test-1", True),
        (["test-?"], [], "test-12", False),
    ],
)
def test_included_and_excluded_names(included: list[str], excluded: list[str], name: str, expected: bool) -> None:
    assert includes(name, included, excluded) is expected
