"""Values that `nodeagent install` rejects: each in one line with the flag, the value and what is allowed."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import pytest

from nodeagent.__main__ import main
from tests.support.golden import assert_golden_text

if TYPE_CHECKING:
    from pathlib import Path

_LOCATION = ("--provider=aws", "--bucket=b")


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


_WRONG = """
--apply=maybe
--wait soon
-o xml
--timeout=soon
--namespace=My_Space
--provider=swift
--bucket=-b
--prefix=/a//b
--bucket=
--provider=
--backup-location-config=region
--backup-location-config=prefix=a
--backup-location-config=s3Url=https://h/a
--backup-location-config=s3ForcePathStyle=yes
'--backup-location-config=region=“r”'
'--backup-location-config=region=r, profile=p'
--no-secret=0 --secret-file=flat
--no-secret=0 --secret-file=quoted
--no-secret=0 --secret-file=keys --backup-location-config=profile=p
--agent-arg=--metrics-address=:9999
--cacert=keys
--cacert=none
--no-secret=false
--secret-file=keys
--no-secret=0 --secret-file=empty
--no-secret=0 --secret-file=binary
--no-default-backup-location
--image=a//:@
--kubelet-root-dir=/
--node-agent-pod-cpu-limit=1e400
--image-pull-policy=always
--image-pull-secret=a,
--use-node-agent=false
--use-node-agent-windows
--uploader-type=restic
--agent-arg=--loglevel=x
--agent-arg=--help
--kubelet-root-dir=kubelet
--kubelet-root-dir=/a/../b
--http-proxy=user:hidden@p
--no-proxy=.svc
--node-agent-configmap=A
--node-agent-config=broken.json
--node-agent-config=list.json
--default-repo-maintain-frequency=-1h
--node-agent-pod-cpu-request=lots
--node-agent-pod-cpu-limit=-1
--node-agent-pod-mem-request=1Gi --node-agent-pod-mem-limit=512Mi
--pod-labels=role=x
'--pod-labels=a=b c'
'--pod-annotations=a b=c'
--node-selector=disk
--toleration=a:Never
--toleration==x
--priority-classes --node-agent-priority-class-name=a
--monitoring-namespace=a.b
--crds-only=x
"""


def test_each_wrong_value_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for line in _WRONG.strip().splitlines():
        code = main(["install", "--dry-run", *_LOCATION, "--no-secret", *shlex.split(line)])
        captured = capsys.readouterr()
        assert (code, captured.out, captured.err.count("\n")) == (2, "", 1), line
        assert "hidden" not in captured.err
        shown.append(f"$ nodeagent install {line}\n{captured.err}")
    assert_golden_text("cli/install-errors", "\n".join(shown))


@pytest.mark.parametrize(
    ("words", "request_and_limit"),
    [
        (["--node-agent-pod-mem-limit=64Mi"], ("64Mi", "64Mi")),
        (["--node-agent-pod-mem-request=1Gi"], ("1Gi", "1Gi")),
        (["--node-agent-pod-mem-limit=0"], ("128Mi", "0")),
    ],
    ids=["limit", "request", "no limit"],
)
def test_a_default_gives_way(
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
