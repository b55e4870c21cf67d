"""Values that `nodeagent install` rejects: each in one line with the flag, the value and what is allowed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

from client.cli.install import build_options, install
from client.install.options import InstallOptions, LocationOptions
from nodeagent.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path

_LOCATION = ("--provider=aws", "--bucket=b")
_EFFECTS = "NoSchedule, PreferNoSchedule, NoExecute"


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("[default]\n")
    (tmp_path / "flat").write_text("aws_access_key_id=a\n")
    (tmp_path / "quoted").write_text("[default]\naws_access_key_id=“a”\n")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "broken.json").write_text('{"loadConcurrency": {"globalConfig": "many"}}')
    (tmp_path / "list.json").write_text("[]")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--apply=maybe"], '--apply: "maybe" is not allowed: expected true or false'),
        (["--dry-run=2"], '--dry-run: "2" is not allowed: expected true or false'),
        (["--wait", "soon"], '--wait: "soon" is not allowed: expected true or false'),
        (["--force-conflicts=no"], '--force-conflicts: "no" is not allowed: expected true or false'),
        (["-o", "xml"], '--output: "xml" is not allowed: expected one of yaml, json'),
        (["--timeout=soon"], '--timeout: "soon" is not allowed: expected a duration such as 30s, 10m or 1h30m'),
        (["--timeout=0s"], '--timeout: "0s" is not allowed: expected a duration such as 30s, 10m or 1h30m'),
        (["--namespace=My_Space"], '--namespace: "My_Space" is not allowed: expected at most 63 of a-z, 0-9 and -'),
        (["--provider=swift"], '--provider: "swift" is not allowed: expected one of aws, azure, gcp, fs, or any with'),
        (["--bucket=-b"], '--bucket: "-b" is not allowed: expected a name such as backups'),
        (["--bucket=a/b"], '--bucket: "a/b" is not allowed: expected a name such as backups'),
        (["--prefix=a b"], '--prefix: "a b" is not allowed: expected a path such as clusters/east'),
        (["--prefix=/a//b"], '--prefix: "a//b" is not allowed: expected a path such as clusters/east'),
        (["--bucket="], "--bucket is required: use --no-default-backup-location if there is to be no location"),
        (["--provider="], "--provider is required: use --no-default-backup-location if there is to be no location"),
        (
            ["--backup-location-config=region"],
            '--backup-location-config: "region" is not allowed: expected key1=',
        ),
        (
            ["--backup-location-config=prefix=a"],
            '--backup-location-config: "prefix=a" is not allowed: expected --prefix, since this key is ignored',
        ),
        (
            ["--backup-location-config=s3Url=https://h/a"],
            "--backup-location-config: s3Url: invalid S3 URL: it must not have a path",
        ),
        (
            ["--backup-location-config=s3ForcePathStyle=yes"],
            '--backup-location-config: "s3ForcePathStyle=yes" is not allowed: expected true or',
        ),
        (
            ["--backup-location-config=region=“r”"],
            '--backup-location-config: "region=“r”" is not allowed: expected no typographic quotes, and no',
        ),
        (
            ["--backup-location-config=region=r, profile=p"],
            '--backup-location-config: " profile=p" is not allowed: expected no typographic',
        ),
        (["--no-secret=0", "--secret-file=flat"], "--secret-file: flat has no section [default], in which the keys"),
        (["--no-secret=0", "--secret-file=quoted"], "--secret-file: quoted has typographic quotes: write it again"),
        (
            ["--no-secret=0", "--secret-file=keys", "--backup-location-config=profile=p"],
            "--secret-file: keys has no section [p], in which the keys must be",
        ),
        (
            ["--agent-arg=--metrics-address=:9999"],
            '--agent-arg: "--metrics-address=:9999" is not allowed: expected a flag that install does not set',
        ),
        (["--cacert=keys"], "--cacert: keys has no certificate in PEM"),
        (["--cacert=none"], "--cacert: none cannot be read: No such file or directory"),
        (["--no-secret=false"], "one of --secret-file and --no-secret is required"),
        (["--secret-file=keys"], "--secret-file and --no-secret exclude each other"),
        (["--no-secret=0", "--secret-file=none"], "--secret-file: none cannot be read: No such file or directory"),
        (["--no-secret=0", "--secret-file=empty"], "--secret-file: empty is empty"),
        (["--no-secret=0", "--secret-file=binary"], "--secret-file: binary is not a text file in UTF-8"),
        (["--no-default-backup-location"], "--bucket and --no-default-backup-location exclude each other"),
        (["--image=a//:@"], '--image: "a//:@" is not allowed: expected such as registry.example.com/node-agent:1.0'),
        (
            ["--agent-arg=--mover-service-account=x"],
            '--agent-arg: "--mover-service-account=x" is not allowed: expected a flag that install does not set',
        ),
        (["--kubelet-root-dir=/"], '--kubelet-root-dir: "/" is not allowed: expected an absolute path'),
        (
            ["--node-agent-pod-cpu-limit=1e400"],
            '--node-agent-pod-cpu-limit: "1e400" is not allowed: expected a quantity',
        ),
        (["--image=a b"], '--image: "a b" is not allowed: expected such as registry.example.com/node-agent:1.0'),
        (
            ["--image-pull-policy=always"],
            '--image-pull-policy: "always" is not allowed: expected one of Always, IfNotPresent, Never (did you mean',
        ),
        (["--image-pull-secret=a,"], '--image-pull-secret: "" is not allowed: expected the name of an object'),
        (["--use-node-agent=nay"], '--use-node-agent: "nay" is not allowed: expected true or false'),
        (["--use-node-agent=false"], "--use-node-agent=false is not allowed: there would be no agents"),
        (["--use-node-agent-windows=x"], '--use-node-agent-windows: "x" is not allowed: expected true or false'),
        (["--use-node-agent-windows"], "--use-node-agent-windows is not supported any more: there is no agent"),
        (["--uploader-type=restic"], '--uploader-type: "restic" is not allowed: expected one of kopia'),
        (
            ["--agent-arg=--loglevel=x"],
            '--agent-arg: "--loglevel=x" is not allowed: expected a flag',
        ),
        (["--agent-arg=--help"], '--agent-arg: "--help" is not allowed: expected a flag of nodeagent serve and its'),
        (["--node-agent-disable-host-path=x"], '--node-agent-disable-host-path: "x" is not allowed: expected true'),
        (["--kubelet-root-dir=kubelet"], '--kubelet-root-dir: "kubelet" is not allowed: expected an absolute path'),
        (["--kubelet-root-dir=/a/../b"], '--kubelet-root-dir: "/a/../b" is not allowed: expected an absolute path'),
        (["--privileged-node-agent=x"], '--privileged-node-agent: "x" is not allowed: expected true or false'),
        (["--http-proxy=user:hidden@p"], "--http-proxy: the value is not allowed: expected a URL such as http://"),
        (["--no-proxy=.svc"], "--no-proxy needs --http-proxy or --https-proxy: otherwise there is no proxy"),
        (["--https-proxy=p"], "--https-proxy: the value is not allowed: expected a URL such as http://"),
        (["--node-agent-configmap=A"], '--node-agent-configmap: "A" is not allowed: expected the name of an object'),
        (
            ["--node-agent-config=broken.json"],
            "--node-agent-config: broken.json: loadConcurrency.globalConfig",
        ),
        (["--node-agent-config=list.json"], "--node-agent-config: list.json: "),
        (["--backup-repository-configmap=_"], '--backup-repository-configmap: "_" is not allowed: expected the name'),
        (["--repo-maintenance-job-configmap=_"], '--repo-maintenance-job-configmap: "_" is not allowed: expected the'),
        (
            ["--default-repo-maintain-frequency=-1h"],
            '--default-repo-maintain-frequency: "-1h" is not allowed: expected a duration such as',
        ),
        (["--node-agent-pod-cpu-request=lots"], '--node-agent-pod-cpu-request: "lots" is not allowed: expected a quan'),
        (
            ["--node-agent-pod-cpu-limit=-1"],
            '--node-agent-pod-cpu-limit: "-1" is not allowed: expected a quantity',
        ),
        (
            ["--node-agent-pod-mem-request=1Gi", "--node-agent-pod-mem-limit=512Mi"],
            '--node-agent-pod-mem-request: "1Gi" is not allowed: expected at most --node-agent-pod-mem-limit, which is',
        ),
        (["--node-agent-pod-mem-limit=1GB"], '--node-agent-pod-mem-limit: "1GB" is not allowed: expected a quantity'),
        (
            ["--pod-labels=role=x"],
            '--pod-labels: "role=x" is not allowed: expected other keys than name, role, ',
        ),
        (["--pod-labels=a=b c"], '--pod-labels: "a=b c" is not allowed: expected key=value, both valid in a label'),
        (["--pod-annotations=a b=c"], '--pod-annotations: "a b=c" is not allowed: expected key=value, with a key'),
        (["--node-selector=disk"], '--node-selector: "disk" is not allowed: expected key1=value1,key2=value2'),
        (
            ["--toleration=a:Never"],
            '--toleration: "a:Never" is not allowed: expected key=value:EFFECT',
        ),
        (["--toleration==x"], '--toleration: "=x" is not allowed: expected'),
        (["--node-agent-priority-class-name=/"], '--node-agent-priority-class-name: "/" is not allowed: expected the'),
        (["--priority-classes=x"], '--priority-classes: "x" is not allowed: expected true or false'),
        (
            ["--priority-classes", "--node-agent-priority-class-name=a"],
            "--node-agent-priority-class-name and --priority-classes exclude each other",
        ),
        (["--service-account-name=A"], '--service-account-name: "A" is not allowed: expected the name of an object'),
        (["--mover-service-account-name=A"], '--mover-service-account-name: "A" is not allowed: expected the name'),
        (["--sa-annotations=x"], '--sa-annotations: "x" is not allowed: expected key1=value1,key2=value2'),
        (["--volume-secrets=x"], '--volume-secrets: "x" is not allowed: expected true or false'),
        (["--openshift=x"], '--openshift: "x" is not allowed: expected true or false'),
        (["--monitoring-namespace=a.b"], '--monitoring-namespace: "a.b" is not allowed: expected at most 63 of'),
        (["--crds-only=x"], '--crds-only: "x" is not allowed: expected true or false'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_value_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["install", "--dry-run", *_LOCATION, "--no-secret", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1
    assert "hidden" not in captured.err


@pytest.mark.parametrize(
    ("words", "request_and_limit"),
    [
        (["--node-agent-pod-mem-limit=64Mi"], ("64Mi", "64Mi")),
        (["--node-agent-pod-mem-request=1Gi"], ("1Gi", "1Gi")),
        (["--node-agent-pod-mem-limit=0"], ("128Mi", "0")),
    ],
    ids=["limit", "request", "no limit"],
)
def test_a_default_gives_way_to_what_was_typed(
    capsys: pytest.CaptureFixture[str], words: list[str], request_and_limit: tuple[str, str]
) -> None:
    assert main(["install", "--dry-run", "-o", "json", "--image=a", *_LOCATION, "--no-secret", *words]) == 0
    objects = json.loads(capsys.readouterr().out)["items"]
    (daemonset,) = [one for one in objects if one["kind"] == "DaemonSet"]
    resources = daemonset["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert (resources["requests"]["memory"], resources.get("limits", {}).get("memory", "0")) == request_and_limit


@pytest.mark.parametrize(
    ("words", "account", "note"),
    [
        (["--no-secret"], "velero", "data movers run as ServiceAccount velero: use --mover-service-account-name for"),
        (
            ["--secret-file=keys"],
            "node-agent-mover",
            "data movers run as ServiceAccount node-agent-mover: use --mover-service-account-name or --sa-annotations",
        ),
    ],
    ids=["identity", "file"],
)
def test_movers_have_the_credentials_of_the_account_that_is_named(
    capsys: pytest.CaptureFixture[str], words: list[str], account: str, note: str
) -> None:
    """Documented lines of `velero install` name an account with a cloud identity, or credentials."""
    own = ["--service-account-name=velero", "--image=a"]
    assert main(["install", "--dry-run", *_LOCATION, *own, *words]) == 0
    captured = capsys.readouterr()
    assert f"--mover-service-account={account}\n" in captured.out
    assert captured.err.startswith(f"note: {note}")


def test_any_provider_with_an_address_is_s3(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--provider=swift", "--bucket=b", "--backup-location-config=s3Url=http://s"]
    assert main(["install", "--dry-run", "--no-secret", *words]) == 0
    assert "provider: swift\n" in capsys.readouterr().out


_EVERY_OPTION = """
--provider=aws --bucket=b --prefix=p --backup-location-config=region=r --cacert=ca.pem --secret-file=keys
--image=i:1 --image-pull-policy=Always --image-pull-secret=s --features=f --agent-arg=--log-level=debug
--node-agent-disable-host-path --kubelet-root-dir=/k --privileged-node-agent
--http-proxy=http://p --https-proxy=http://p --no-proxy=.svc
--node-agent-config=good.json --backup-repository-configmap=r --repo-maintenance-job-configmap=m
--node-agent-pod-cpu-request=1 --node-agent-pod-mem-request=1Mi
--node-agent-pod-cpu-limit=2 --node-agent-pod-mem-limit=2Mi
--pod-labels=a=b --pod-annotations=a=b --node-selector=a=b --toleration=* --node-agent-priority-class-name=high
--service-account-name=a --mover-service-account-name=m --sa-annotations=a=b
--volume-secrets --restore-tests --openshift --monitoring-namespace=prom
"""


def test_every_option_of_an_installation_has_a_flag(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    (tmp_path / "good.json").write_text('{"loadConcurrency": {"globalConfig": 3}}')
    given = install.make_context("install", _EVERY_OPTION.split()).params
    found = asdict(build_options(given, "other"))
    standard = asdict(InstallOptions(location=LocationOptions(provider="", bucket="")))
    same = {key for key in found if found[key] == standard[key]}
    for part in ("agent", "proxy", "location"):
        same |= {f"{part}.{key}" for key in found[part] if found[part][key] == standard[part][key]}
    resources = found["agent"]["resources"], standard["agent"]["resources"]
    same |= {key for key in resources[0] if resources[0][key] == resources[1][key]}
    # It excludes a class by name.
    assert same == {"priority_classes"}
