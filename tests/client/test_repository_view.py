"""The lines that connect kopia by hand, which a shell runs without harm; and what a decision means for a user."""

import shlex
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from client.leader_page import LeaderDecision
from client.repository_view import NextMaintenance, build_connect_lines, compute_next
from core.contract import MaintenanceMode
from core.errors import ConfigError
from core.models.base import JsonDict
from core.models.storage import BackupRepository, BackupStorageLocation
from nodeagent.maintenance.record import MaintenanceRecord
from nodeagent.maintenance.rules import Decision, Hold, MaintenanceView
from tests.nodeagent.support.hand_clock import NOON
from tests.support.golden import assert_golden_text

_HOSTILE = "b'; touch /tmp/x; $(id) `id` \"\n"


def _lines(
    provider: str = "aws", config: JsonDict | None = None, kubectl_flags: Sequence[str] = (), **spec: Any
) -> list[str]:
    meta = {"namespace": "velero", "uid": "u"}
    repository: JsonDict = {
        "metadata": {**meta, "name": "app-default-kopia"},
        "spec": {"volumeNamespace": "app", "backupStorageLocation": "default", "maintenanceFrequency": "1h"},
    }
    storage = {"bucket": "backups", "prefix": "/p/", **spec.pop("storage", {})}
    location: JsonDict = {
        "metadata": {**meta, "name": "default"},
        "spec": {"provider": provider, "config": config or {}, "objectStorage": storage, **spec},
    }
    typed = {"apiVersion": "velero.io/v1"}
    return build_connect_lines(
        BackupRepository.parse({**typed, "kind": "BackupRepository", **repository}),
        BackupStorageLocation.parse({**typed, "kind": "BackupStorageLocation", **location}),
        kubectl_flags,
    )


def _words(lines: list[str]) -> list[str]:
    return shlex.split(lines[-1])


def test_the_lines_for_a_bucket() -> None:
    config = {"s3Url": "http://minio:9000", "region": "us-east-1", "profile": "backup"}
    lines = _lines(config=config, credential={"name": "keys", "key": "cloud"})
    assert_golden_text("cli/repo-connect-command", "".join(f"{line}\n" for line in lines))


def test_a_bucket_of_amazon_with_inherited_credentials() -> None:
    lines = _lines(config={"region": "cn-north-1"})
    assert {"--endpoint=s3.cn-north-1.amazonaws.com.cn", "--prefix=p/kopia/app/"} <= set(_words(lines))
    assert "kubectl get secret cloud-credentials -n velero" in lines[2]
    assert "--endpoint=s3.amazonaws.com" in _words(_lines(config={"region": "us-east-2"}))


def test_the_user_and_password_of_an_address_are_not_shown() -> None:
    lines = _lines(config={"s3Url": "https://me:secret@minio:9000"})
    assert "--endpoint=minio:9000" in _words(lines)
    assert "secret@" not in "".join(lines)


def test_kubectl_reads_each_secret_in_the_cluster_of_the_command() -> None:
    flags = ("--context=blue", "--kubeconfig=/my config")
    lines = _lines(storage={"caCertRef": {"name": "ca", "key": "ca.crt"}}, kubectl_flags=flags)
    assert "".join(lines).count("kubectl --context=blue '--kubeconfig=/my config' get secret") == 4
    assert "".join(lines).count("kubectl") == 4


def test_a_directory_needs_the_password_alone() -> None:
    lines = _lines("velero.io/fs", {"fspath": "/mnt/x"})
    assert len(lines) == 3
    assert _words(lines)[:5] == ["kopia", "repository", "connect", "filesystem", "--path=/mnt/x/p/kopia/app"]


@pytest.mark.parametrize(
    ("config", "storage", "flag"),
    [
        ({"s3Url": "https://m", "insecureSkipTLSVerify": "true"}, {}, "--disable-tls-verification"),
        ({"s3Url": "https://m"}, {"caCert": "YWJj"}, "--root-ca-pem-base64=YWJj"),
        ({"s3Url": "https://m"}, {"caCertRef": {"name": "ca", "key": "ca.crt"}}, '{{index .data "ca.crt"}}'),
    ],
    ids=["unverified", "authority", "authority in a Secret"],
)
def test_tls_is_as_in_the_location(config: JsonDict, storage: JsonDict, flag: str) -> None:
    assert flag in _lines(config=config, storage=storage)[-1]


def test_what_a_location_says_is_never_run_by_the_shell() -> None:
    lines = _lines(config={"region": _HOSTILE}, storage={"bucket": _HOSTILE})
    assert f"--bucket={_HOSTILE}" in _words(lines)
    assert f"--region={_HOSTILE}" in _words(lines)


@pytest.mark.parametrize(
    ("provider", "config", "spec", "message"),
    [
        ("azure", {}, {}, "BackupStorageLocation default: no command for the provider azure"),
        ("aws", {"profile": "a b"}, {}, '"a b" is no name of a profile'),
        ("aws", {}, {"credential": {"name": "keys", "key": 'a"}}'}}, "is no key of a Secret"),
    ],
    ids=["provider", "profile", "key"],
)
def test_what_cannot_be_used_is_an_error(provider: str, config: JsonDict, spec: JsonDict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _lines(provider, config, **spec)


_HOUR = timedelta(hours=1)


@pytest.mark.parametrize("hold", Hold)
def test_every_hold_is_explained(hold: Hold) -> None:
    explained = NextMaintenance.of_decision(Decision(hold), MaintenanceRecord(), NOON)
    assert explained.hold == hold
    assert explained.reason not in {"", str(hold)}


def test_a_hold_or_time_of_a_later_version_is_shown_as_it_is() -> None:
    said = NextMaintenance.of_leader(LeaderDecision(hold="paused", due="soon"), MaintenanceRecord(), NOON)
    assert (said.hold, said.reason, said.due) == ("paused", "paused", None)


@pytest.mark.parametrize(
    ("next_full", "due", "mode"),
    [(None, None, "quick"), (NOON + _HOUR, None, "quick"), (NOON, None, "full"), (NOON + _HOUR, NOON + _HOUR, "full")],
    ids=["no schedule", "later", "now", "at the due time"],
)
def test_the_mode_is_what_kopia_has_due_then(next_full: datetime | None, due: datetime | None, mode: str) -> None:
    record = MaintenanceRecord.from_wire({"at": NOON, "nextFull": next_full})
    assert NextMaintenance.of_decision(Decision(due_at=due), record, NOON).mode == mode
    assert NextMaintenance.of_decision(Decision(due_at=due), MaintenanceRecord(), NOON).mode == "", "none has run"


def test_what_is_not_known_makes_no_time_too_late() -> None:
    """Nothing has changed, as the fingerprint of the view says: the leader would wait for a week."""
    nexts: dict[str, Any] = {"next_quick": NOON + _HOUR, "next_full": NOON + 9 * _HOUR, "fulls_since_change": 4}
    record = MaintenanceRecord(at=NOON - _HOUR, mode=MaintenanceMode.QUICK, fingerprint="same", **nexts)
    view = MaintenanceView(NOON, NOON, _HOUR, NOON - _HOUR, record=record, fingerprint="same")
    assert compute_next(view).due == NOON + _HOUR
