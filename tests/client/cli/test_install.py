"""`nodeagent install --dry-run`: what each flag changes in the objects."""

from __future__ import annotations

import base64
import json
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from client.cli.install_flags import GROUPS, SERVER_FLAGS
from client.install.options import DEFAULT_IMAGE
from nodeagent.__main__ import main
from tests.support.golden import assert_golden_text

if TYPE_CHECKING:
    from collections.abc import Iterator

_ALONE = ("--no-default-backup-location", "--no-secret")
_BUCKET = ("--provider=aws", "--bucket=b", "--no-secret")
_APPLYING = {"--apply", "--dry-run", "--output", "--force-conflicts", "--wait", "--timeout"}
"""Flags about what is done with the objects."""


class _Objects:
    """The objects that were printed."""

    def __init__(self, text: str) -> None:
        self.all: list[Any] = json.loads(text)["items"]

    def named(self, kind: str) -> Any:
        found = [one for one in self.all if one["kind"] == kind]
        assert len(found) <= 1, f"several: {kind}"
        return found[0] if found else None

    @property
    def fields(self) -> Counter[str]:
        """A line for each value, with its path; elements of lists have no number."""
        return Counter(line for one in self.all for line in _flatten(f"{one['kind']} {one['metadata']['name']}: ", one))


def _flatten(path: str, value: Any) -> Iterator[str]:
    """Yield a line for each value; an element of a list that has no objects in it is one value."""
    match value:
        case dict():
            for key, one in value.items():
                yield from _flatten(f"{path}.{key}", one)
        case list():
            for one in value:
                nested = json.dumps(one).count("{") > 1
                yield from _flatten(f"{path}[]", one) if nested else [f"{path}[] = {json.dumps(one)}"]
        case _:
            yield f"{path} = {json.dumps(value)}"


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[_Objects, str]:
    code = main(["install", "--dry-run", "-o", "json", *words])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return _Objects(captured.out), captured.err


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "keys").write_text("[default]\n")
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\nx\n")
    (tmp_path / "config.json").write_text('{"loadConcurrency": {"globalConfig": 3}}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VELERO_NAMESPACE", raising=False)
    # A dry run accesses no cluster.
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    return tmp_path


_LINES = """
--provider=velero.io/aws
--bucket=c
--prefix=p/q
--backup-location-config 'region=r,"tags=a=b,c=d"' --backup-location-config=s3Url=http://x
--cacert=ca.pem
--image=r/x:1
--image-pull-policy=Always
--image-pull-secret=a,b --image-pull-secret=c
--use-node-agent
--use-node-agent-windows=false
--uploader-type=kopia
--features=EnableCSI
--agent-arg=--log-level=debug --agent-arg=--log-format=json
--node-agent-disable-host-path
--kubelet-root-dir=/var/lib/k0s/kubelet/
--privileged-node-agent
--http-proxy=http://p:1
--https-proxy=http://p:1
--no-proxy=.svc,10.0.0.0/8 --https-proxy=http://p:1
--node-agent-configmap=cm
--node-agent-config=config.json
--backup-repository-configmap=cm
--repo-maintenance-job-configmap=cm
--default-repo-maintain-frequency=2h
--node-agent-pod-cpu-request=1
--node-agent-pod-mem-request=0
--node-agent-pod-cpu-limit=2
--node-agent-pod-mem-limit=1Gi
--pod-labels=a=1,b=2
--pod-annotations='x.io/a=1 2'
--node-selector=disk=ssd
--toleration=a=1:NoSchedule,b:NoExecute --toleration=c --toleration=*
--node-agent-priority-class-name=high
--priority-classes
--service-account-name=mine
--mover-service-account-name=mine
--sa-annotations=iam.gke.io/gcp-service-account=a@b
--volume-secrets
--restore-tests
--openshift
--monitoring-namespace=prom
--namespace=other
"""
"""Each is about its first flag."""

_CASES = {line.partition("=")[0].partition(" ")[0]: line for line in _LINES.strip().splitlines()}
_WITHOUT_EFFECT = {"--use-node-agent", "--use-node-agent-windows", "--uploader-type"}
"""Values that would have one are errors."""


@pytest.mark.usefixtures("files")
def test_each_flag_changes_this_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    before, shown, idle = _run(capsys, *_BUCKET)[0].fields, "", set()
    for flag, line in _CASES.items():
        after = _run(capsys, *_BUCKET, *shlex.split(line))[0].fields
        changes = [*(f"- {one}" for one in before - after), *(f"+ {one}" for one in after - before)]
        idle |= set() if changes else {flag}
        shown += "\n".join([f"$ nodeagent install {line}", *sorted(changes, key=lambda one: (one[2:], one)), "", ""])
    assert_golden_text("cli/install-flags", shown.replace(DEFAULT_IMAGE, "DEFAULT-IMAGE"))
    assert idle == _WITHOUT_EFFECT


@pytest.mark.usefixtures("files")
def test_credentials_become_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    without, _ = _run(capsys, *_ALONE)
    assert without.named("Secret") is without.named("BackupStorageLocation") is None
    objects, _ = _run(capsys, "--no-default-backup-location", "--secret-file=keys")
    assert base64.b64decode(objects.named("Secret")["data"]["cloud"]) == b"[default]\n"


def test_every_flag_has_a_test_of_its_effect() -> None:
    others = {"--secret-file", "--no-secret", "--no-default-backup-location", "--crds-only"}
    tested = _CASES.keys() | others | _APPLYING
    assert {flag.name for group in GROUPS.values() for flag in group} == tested - {"--namespace"}


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
def test_a_line_of_velero_works_and_one_note_names_the_flags_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "--provider aws --plugins velero/velero-plugin-for-aws:v1.0.0 --bucket backups --secret-file ./keys "
        "--backup-location-config region=us-east-2 --snapshot-location-config region=us-east-2 --use-node-agent "
        "--velero-pod-cpu-request=1000m --use-volume-snapshots=false --default-volumes-to-fs-backup --wait"
    )
    objects, err = _run(capsys, *line.split())
    assert objects.named("BackupStorageLocation")["spec"]["config"] == {"region": "us-east-2"}
    assert err == (
        f"note: --image is not given: nodes must have {DEFAULT_IMAGE}, or a default registry that does\n"
        "note: flags of Velero's server have no effect here: --default-volumes-to-fs-backup, --plugins, "
        "--snapshot-location-config, --use-volume-snapshots, --velero-pod-cpu-request\n"
    )


def test_the_flags_of_velero_are_all_known() -> None:
    known = {flag.name for group in GROUPS.values() for flag in group} | set(SERVER_FLAGS)
    text = (Path(__file__).parents[2] / "data" / "velero-1.18.2" / "install-flags.txt").read_text(encoding="utf-8")
    assert set(text.split()) <= known
