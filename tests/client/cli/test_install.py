"""`nodeagent install --dry-run`: what each flag changes in the objects."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml

from client.cli.install_flags import GROUPS, SERVER_FLAGS
from client.install.options import DEFAULT_IMAGE
from nodeagent.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Callable

_ALONE = ("--no-default-backup-location", "--no-secret")
_BUCKET = ("--provider=aws", "--bucket=b", "--no-secret")
_PEM = "-----BEGIN CERTIFICATE-----\nx\n"
_APPLYING = {"--apply", "--dry-run", "--output", "--force-conflicts", "--wait", "--timeout"}
"""Flags about what is done with the objects."""


class _Objects:
    """The objects that were printed."""

    def __init__(self, text: str) -> None:
        self.all: list[Any] = json.loads(text)["items"]

    def named(self, kind: str, name: str = "") -> Any:
        found = [one for one in self.all if one["kind"] == kind and name in {"", one["metadata"]["name"]}]
        assert len(found) <= 1, f"several: {kind}"
        return found[0] if found else None

    @property
    def pod(self) -> Any:
        daemonset = self.named("DaemonSet", "node-agent")
        return daemonset["spec"]["template"]["spec"]

    @property
    def template(self) -> Any:
        return self.named("DaemonSet", "node-agent")["spec"]["template"]["metadata"]

    @property
    def container(self) -> Any:
        return self.pod["containers"][0]

    @property
    def environment(self) -> dict[str, str]:
        return {one["name"]: one.get("value", "") for one in self.container["env"]}

    @property
    def location(self) -> Any:
        return (self.named("BackupStorageLocation") or {}).get("spec")

    def kinds(self, kind: str) -> list[str]:
        return [one["metadata"]["name"] for one in self.all if one["kind"] == kind]


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[_Objects, str]:
    code = main(["install", "--dry-run", "-o", "json", *words])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return _Objects(captured.out), captured.err


def _has_rule(objects: _Objects, kind: str, resource: str, name: str) -> bool:
    rules = [rule for one in objects.all if one["kind"] == kind for rule in one["rules"]]
    return any(resource in rule["resources"] and name in rule.get("resourceNames", []) for rule in rules)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "keys").write_text("[default]\n")
    (tmp_path / "ca.pem").write_text(_PEM)
    (tmp_path / "config.json").write_text('{"loadConcurrency": {"globalConfig": 3}}')
    (tmp_path / "broken.json").write_text('{"loadConcurrency": {"globalConfig": "many"}}')
    (tmp_path / "empty").write_text("\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VELERO_NAMESPACE", raising=False)
    # A dry run accesses no cluster.
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    return tmp_path


class _Case(NamedTuple):
    """A flag, words with it, what is compared, and its value without the flag and with it."""

    flag: str
    words: tuple[str, ...]
    look: Callable[[_Objects], Any]
    without: Any
    expected: Any


_CASES = (
    _Case("--provider", ("--provider=velero.io/aws",), lambda o: o.location["provider"], "aws", "velero.io/aws"),
    _Case("--bucket", ("--bucket=c",), lambda o: o.location["objectStorage"]["bucket"], "b", "c"),
    _Case("--prefix", ("--prefix=p/q",), lambda o: o.location["objectStorage"].get("prefix"), None, "p/q"),
    _Case(
        "--backup-location-config",
        ("--backup-location-config", 'region=r,"tags=a=b,c=d"', "--backup-location-config=s3Url=http://x"),
        lambda o: o.location.get("config"),
        None,
        {"region": "r", "tags": "a=b,c=d", "s3Url": "http://x"},
    ),
    _Case(
        "--cacert",
        ("--cacert=ca.pem",),
        lambda o: base64.b64decode(o.location["objectStorage"].get("caCert", "")).decode(),
        "",
        _PEM,
    ),
    _Case("--image", ("--image=r/x:1",), lambda o: o.container["image"], DEFAULT_IMAGE, "r/x:1"),
    _Case(
        "--image-pull-policy",
        ("--image-pull-policy=Always",),
        lambda o: o.container["imagePullPolicy"],
        "IfNotPresent",
        "Always",
    ),
    _Case(
        "--image-pull-secret",
        ("--image-pull-secret=a,b", "--image-pull-secret=c"),
        lambda o: [one["name"] for one in o.pod.get("imagePullSecrets", [])],
        [],
        ["a", "b", "c"],
    ),
    # Other values are errors.
    _Case("--use-node-agent", ("--use-node-agent",), lambda o: o.kinds("DaemonSet"), ["node-agent"], ["node-agent"]),
    _Case(
        "--use-node-agent-windows",
        ("--use-node-agent-windows=false",),
        lambda o: o.kinds("DaemonSet"),
        ["node-agent"],
        ["node-agent"],
    ),
    # kopia is the only uploader, and the default.
    _Case(
        "--uploader-type", ("--uploader-type=kopia",), lambda o: o.kinds("DaemonSet"), ["node-agent"], ["node-agent"]
    ),
    _Case(
        "--features", ("--features=EnableCSI",), lambda o: "--features=EnableCSI" in o.container["args"], False, True
    ),
    _Case(
        "--agent-arg",
        ("--agent-arg=--log-level=debug", "--agent-arg=--log-format=json"),
        lambda o: o.container["args"][2:],
        [],
        ["--log-level=debug", "--log-format=json"],
    ),
    _Case(
        "--node-agent-disable-host-path",
        ("--node-agent-disable-host-path",),
        lambda o: [one["name"] for one in o.pod["volumes"]],
        ["scratch", "cloud-credentials", "host-pods"],
        ["scratch", "cloud-credentials"],
    ),
    _Case(
        "--kubelet-root-dir",
        ("--kubelet-root-dir=/var/lib/k0s/kubelet/",),
        lambda o: o.pod["volumes"][2]["hostPath"]["path"],
        "/var/lib/kubelet/pods",
        "/var/lib/k0s/kubelet/pods",
    ),
    _Case(
        "--privileged-node-agent",
        ("--privileged-node-agent",),
        lambda o: o.container["securityContext"].get("privileged"),
        None,
        True,
    ),
    _Case("--http-proxy", ("--http-proxy=http://p:1",), lambda o: o.environment.get("HTTP_PROXY"), None, "http://p:1"),
    _Case(
        "--https-proxy", ("--https-proxy=http://p:1",), lambda o: o.environment.get("HTTPS_PROXY"), None, "http://p:1"
    ),
    _Case(
        "--no-proxy",
        ("--https-proxy=http://p:1", "--no-proxy=.svc,10.0.0.0/8"),
        lambda o: o.environment.get("NO_PROXY", "").endswith(".svc,10.0.0.0/8"),
        False,
        True,
    ),
    _Case(
        "--node-agent-configmap",
        ("--node-agent-configmap=cm",),
        lambda o: ("--node-agent-configmap=cm" in o.container["args"], _has_rule(o, "Role", "configmaps", "cm")),
        (False, False),
        (True, True),
    ),
    _Case(
        "--node-agent-config",
        ("--node-agent-config=config.json",),
        lambda o: {} if (found := o.named("ConfigMap")) is None else json.loads(*found["data"].values()),
        {},
        {"loadConcurrency": {"globalConfig": 3}},
    ),
    _Case(
        "--backup-repository-configmap",
        ("--backup-repository-configmap=cm",),
        lambda o: ("--backup-repository-configmap=cm" in o.container["args"], _has_rule(o, "Role", "configmaps", "cm")),
        (False, False),
        (True, True),
    ),
    _Case(
        "--repo-maintenance-job-configmap",
        ("--repo-maintenance-job-configmap=cm",),
        lambda o: "--repo-maintenance-job-configmap=cm" in o.container["args"],
        False,
        True,
    ),
    _Case(
        "--default-repo-maintain-frequency",
        ("--default-repo-maintain-frequency=2h",),
        lambda o: o.container["args"][2:],
        [],
        ["--default-repo-maintain-frequency=2h"],
    ),
    _Case(
        "--node-agent-pod-cpu-request",
        ("--node-agent-pod-cpu-request=1",),
        lambda o: o.container["resources"]["requests"].get("cpu"),
        "50m",
        "1",
    ),
    _Case(
        "--node-agent-pod-mem-request",
        ("--node-agent-pod-mem-request=0",),
        lambda o: o.container["resources"]["requests"].get("memory"),
        "128Mi",
        None,
    ),
    _Case(
        "--node-agent-pod-cpu-limit",
        ("--node-agent-pod-cpu-limit=2",),
        lambda o: o.container["resources"]["limits"].get("cpu"),
        None,
        "2",
    ),
    _Case(
        "--node-agent-pod-mem-limit",
        ("--node-agent-pod-mem-limit=1Gi",),
        lambda o: o.container["resources"]["limits"].get("memory"),
        "512Mi",
        "1Gi",
    ),
    _Case(
        "--pod-labels", ("--pod-labels=a=1,b=2",), lambda o: {"a", "b"} & set(o.template["labels"]), set(), {"a", "b"}
    ),
    _Case(
        "--pod-annotations",
        ("--pod-annotations=x.io/a=1 2",),
        lambda o: o.template["annotations"].get("x.io/a"),
        None,
        "1 2",
    ),
    _Case("--node-selector", ("--node-selector=disk=ssd",), lambda o: o.pod.get("nodeSelector"), None, {"disk": "ssd"}),
    _Case(
        "--toleration",
        ("--toleration=a=1:NoSchedule,b:NoExecute", "--toleration=c", "--toleration=*"),
        lambda o: o.pod.get("tolerations"),
        None,
        [
            {"key": "a", "operator": "Equal", "value": "1", "effect": "NoSchedule"},
            {"key": "b", "operator": "Exists", "effect": "NoExecute"},
            {"key": "c", "operator": "Exists"},
            {"operator": "Exists"},
        ],
    ),
    _Case(
        "--node-agent-priority-class-name",
        ("--node-agent-priority-class-name=high",),
        lambda o: o.pod.get("priorityClassName"),
        None,
        "high",
    ),
    _Case(
        "--priority-classes",
        ("--priority-classes",),
        lambda o: (len(o.kinds("PriorityClass")), o.pod.get("priorityClassName")),
        (0, None),
        (3, "velero-node-agent"),
    ),
    _Case(
        "--service-account-name",
        ("--service-account-name=mine",),
        lambda o: (o.kinds("ServiceAccount"), o.pod["serviceAccountName"]),
        (["node-agent", "node-agent-mover"], "node-agent"),
        # Without a file of credentials, it is the account of data movers too.
        ([], "mine"),
    ),
    _Case(
        "--mover-service-account-name",
        ("--mover-service-account-name=mine",),
        lambda o: (o.kinds("ServiceAccount"), o.container["args"][1]),
        (["node-agent", "node-agent-mover"], "--mover-service-account=node-agent-mover"),
        (["node-agent"], "--mover-service-account=mine"),
    ),
    _Case(
        "--sa-annotations",
        ("--sa-annotations=iam.gke.io/gcp-service-account=a@b",),
        lambda o: o.named("ServiceAccount", "node-agent-mover")["metadata"].get("annotations"),
        None,
        {"iam.gke.io/gcp-service-account": "a@b"},
    ),
    _Case(
        "--volume-secrets", ("--volume-secrets",), lambda o: "node-agent-volume-secrets" in o.kinds("Role"), False, True
    ),
    _Case(
        "--restore-tests",
        ("--restore-tests",),
        lambda o: "node-agent-restore-test" in o.kinds("ServiceAccount"),
        False,
        True,
    ),
    _Case("--openshift", ("--openshift",), lambda o: len(o.kinds("SecurityContextConstraints")), 0, 2),
    _Case(
        "--monitoring-namespace",
        ("--monitoring-namespace=prom",),
        lambda o: "prom" in json.dumps(o.named("NetworkPolicy")),
        False,
        True,
    ),
    _Case("--namespace", ("--namespace=other",), lambda o: o.kinds("Namespace"), ["velero"], ["other"]),
)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("case", _CASES, ids=[case.flag for case in _CASES])
def test_a_flag_changes_the_objects(capsys: pytest.CaptureFixture[str], case: _Case) -> None:
    assert any(word.startswith(case.flag) for word in case.words)
    assert case.look(_run(capsys, *_BUCKET)[0]) == case.without
    assert case.look(_run(capsys, *_BUCKET, *case.words)[0]) == case.expected


@pytest.mark.usefixtures("files")
def test_credentials_become_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    without, _ = _run(capsys, *_ALONE)
    assert without.named("Secret") is without.named("BackupStorageLocation") is None
    objects, _ = _run(capsys, "--no-default-backup-location", "--secret-file=keys")
    assert base64.b64decode(objects.named("Secret")["data"]["cloud"]) == b"[default]\n"


def test_every_flag_has_a_test_of_its_effect() -> None:
    tested = {case[0] for case in _CASES} | {
        "--secret-file",
        "--no-secret",
        "--no-default-backup-location",
        "--crds-only",
    }
    assert {flag.name for group in GROUPS.values() for flag in group} == (tested | _APPLYING) - {"--namespace"}


@pytest.mark.usefixtures("files")
def test_both_formats_are_the_same_list(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*_BUCKET, "--image=a", "--toleration=*"]
    objects, err = _run(capsys, *words)
    assert err == ""
    assert main(["install", "--dry-run=true", *words]) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text) == {"apiVersion": "v1", "kind": "List", "items": objects.all}
    assert "&id" not in text


@pytest.mark.usefixtures("files")
def test_definitions_alone_are_printed_whatever_other_flags_say(capsys: pytest.CaptureFixture[str]) -> None:
    objects, _ = _run(capsys, "--crds-only", "--bucket=-x", "--secret-file=none", "--timeout=x", "-n", "A")
    assert {one["kind"] for one in objects.all} == {"CustomResourceDefinition"}
    assert len(objects.all) == 6


@pytest.mark.usefixtures("files")
def test_a_documented_line_of_velero_works_and_one_note_names_the_flags_of_the_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = (
        "--provider aws --plugins velero/velero-plugin-for-aws:v1.0.0 --bucket backups --secret-file ./keys "
        "--backup-location-config region=us-east-2 --snapshot-location-config region=us-east-2 --use-node-agent "
        "--velero-pod-cpu-request=1000m --use-volume-snapshots=false --default-volumes-to-fs-backup --wait"
    )
    objects, err = _run(capsys, *line.split())
    assert objects.location["config"] == {"region": "us-east-2"}
    assert err == (
        f"note: --image is not given: nodes must have {DEFAULT_IMAGE}, or a default registry that does\n"
        "note: flags of Velero's server have no effect here: --default-volumes-to-fs-backup, --plugins, "
        "--snapshot-location-config, --use-volume-snapshots, --velero-pod-cpu-request\n"
    )


def test_the_flags_of_velero_are_all_known() -> None:
    known = {flag.name for group in GROUPS.values() for flag in group} | set(SERVER_FLAGS)
    text = (Path(__file__).parents[2] / "data" / "velero-1.18.2" / "install-flags.txt").read_text(encoding="utf-8")
    assert set(text.split()) <= known
