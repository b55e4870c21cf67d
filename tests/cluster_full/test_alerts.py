"""Each alert fires, by a real Prometheus, for what it is about: durations are divided by FACTOR."""

import json
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import pytest

from core.kube.resources import BACKUP_REPOSITORIES, CONFIG_MAPS, CRON_JOBS, PERSISTENT_VOLUME_CLAIMS
from core.models.backups import REPORT_KEY, HeldBackup, RetentionReport
from core.models.names import ALERT_NOT_PROTECTED_LABEL, DELETIONS_CONFIGMAP, SCHEDULE_COMMAND, SCHEDULE_LABEL
from nodeagent.metrics import MAX_VOLUMES
from tests.cluster.apart import ApartAgent, installed_apart
from tests.cluster.bed import Bed
from tests.cluster.gate import open_gate
from tests.cluster.handkopia import open_kopia
from tests.cluster.monitored import Monitored
from tests.cluster.scenes import wait_released
from tests.cluster.upkeep import Upkeep
from tests.cluster_full.prometheus import Prometheus, run_prometheus
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import build_namespace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

_CONFIG = "own-config"
_BROKEN = "broken"
"""A BackupRepository whose location does not exist."""

_OF_VOLUMES = (
    "NodeAgentBackupShrunk",
    "NodeAgentVerificationFailed",
    "NodeAgentVerificationOverdue",
    "NodeAgentVolumeBackupOverdue",
)
_OF_COVERAGE = "VolumeNotProtected"
_OF_WAITING = ("NodeAgentTransferStalled", "NodeAgentQueueStuck")
_OF_FAILURES = "NodeAgentTransfersFailing"
_OF_REPOSITORIES = ("NodeAgentRepositoryNotReady", "NodeAgentMaintenanceFailing", "NodeAgentIndexBlobsGrowing")
_OF_MANY = "NodeAgentVolumesOmitted"
_OF_RETENTION = ("NodeAgentRetentionHeld", "NodeAgentRetentionBacklog", "NodeAgentRetentionOldRules")
_OF_AGENTS = ("NodeAgentConfigurationRejected", "NodeAgentDown", "NodeAgentDispatcherMissing")
_ELSEWHERE = "NodeAgentAPIThrottled"
"""`tests/deploy/test_throttled_alert.py` fires it, by what an agent serves: no busy API server is needed for that."""

FIRED = (
    *(_OF_COVERAGE, _OF_MANY, _OF_FAILURES, _ELSEWHERE),
    *chain(_OF_VOLUMES, _OF_WAITING, _OF_REPOSITORIES, _OF_AGENTS, _OF_RETENTION),
)
"""All alerts that a test fires."""

_STEP_SECONDS = 60
_DAY_SECONDS = 480
"""A day divided by 240, and more."""


@pytest.fixture
def monitored(agent: Bed) -> Iterator[Monitored]:
    space = f"test-{secrets.token_hex(4)}"
    namespace = build_namespace(space)
    namespace["metadata"]["labels"] = {ALERT_NOT_PROTECTED_LABEL: "true"}
    agent.user.apply(namespace)
    with open_gate() as gate, installed_apart(agent, space, url=gate.url) as own:
        yield Monitored(Upkeep(own), gate)
        gate.open()
    agent.user.kubectl("delete", "namespace", space, "--wait=false")


def _configure(own: ApartAgent, document: str) -> None:
    own.bed.user.apply(build_object(CONFIG_MAPS, _CONFIG, own.space, data={"config.json": document}))


def _break_repository(own: ApartAgent, *, index_blobs: int) -> None:
    """Apply a BackupRepository that cannot be opened, with so many index blobs after its last maintenance."""
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    record = {"at": at, "mode": "full", "lastFull": at, "indexBlobs": index_blobs, "contents": 1}
    spec = {
        "backupStorageLocation": "absent",
        "maintenanceFrequency": "24h",
        "repositoryType": "kopia",
        "volumeNamespace": _BROKEN,
    }
    meta = {"annotations": {"nodeagent.io/maintenance": json.dumps(record)}}
    own.bed.user.apply(build_object(BACKUP_REPOSITORIES, _BROKEN, own.space, metadata=meta, spec=spec))


@pytest.fixture
def prometheus(monitored: Monitored, tmp_path: Path) -> Iterator[Prometheus]:
    """Prometheus beside an agent whose repository was maintained."""
    own = monitored.upkeep.own
    _configure(own, "{}")
    monitored.start(backup_interval="10s", verification_interval="10s", arguments=[f"--node-agent-configmap={_CONFIG}"])
    _break_repository(own, index_blobs=1100)
    monitored.upkeep.wait_for_entry("Succeeded")
    with run_prometheus(tmp_path, own) as prometheus:
        yield prometheus


def test_alerts_about_transfers_fire_and_end(monitored: Monitored, prometheus: Prometheus) -> None:
    monitored.back_up("data")
    monitored.verify("failed")
    monitored.shrink()
    prometheus.wait_fired(*_OF_VOLUMES, seconds=_STEP_SECONDS)
    monitored.verify("passed")
    prometheus.wait_quiet("NodeAgentVerificationFailed", seconds=_STEP_SECONDS)
    monitored.hold()
    monitored.leave_pending()
    prometheus.wait_fired(*_OF_WAITING, seconds=_STEP_SECONDS)
    monitored.gate.open()
    prometheus.wait_quiet(*_OF_WAITING, seconds=_STEP_SECONDS)
    failing = monitored.leave_pending("failing", snapshotType="unknown")
    prometheus.wait_fired(_OF_FAILURES, _OF_COVERAGE, seconds=_STEP_SECONDS)
    # The agent is removed next, and tests that follow look for what was not cleaned up.
    bed = monitored.upkeep.own.bed
    wait_released(bed, failing, "Failed")


def test_alerts_about_repositories_fire(monitored: Monitored, prometheus: Prometheus) -> None:
    upkeep = monitored.upkeep
    with open_kopia(upkeep.own.bed, upkeep.own.space) as kopia:
        kopia.run("maintenance", "set", "--owner=another@host")
    upkeep.own.kubectl("annotate", "backuprepository", upkeep.name, "nodeagent.io/maintenance-")
    upkeep.wait_for_entry("Failed")
    # There is a value of a day before then.
    prometheus.wait_fired(*_OF_REPOSITORIES[:2], seconds=4 * _STEP_SECONDS)
    _break_repository(upkeep.own, index_blobs=1200)
    prometheus.wait_fired(*_OF_REPOSITORIES, seconds=_DAY_SECONDS)


def test_alerts_about_agents_fire(monitored: Monitored, prometheus: Prometheus) -> None:
    own = monitored.upkeep.own
    configured, *gone = _OF_AGENTS
    _configure(own, '{"loadConcurrency": "many"}')
    prometheus.wait_fired(configured, seconds=_STEP_SECONDS)
    _configure(own, "{}")
    prometheus.wait_quiet(configured, seconds=_STEP_SECONDS)
    own.kubectl("delete", "daemonset", "node-agent")
    prometheus.wait_fired(*gone, seconds=_STEP_SECONDS)


@pytest.fixture
def many_claims(monitored: Monitored) -> None:
    """As many PVCs that are to be backed up as have metrics; that of the workload is one more."""
    own = monitored.upkeep.own
    for number in range(MAX_VOLUMES):
        annotations = {"nodeagent.io/backup-interval": "24h"}
        # The controller looks for that volume, and says nothing: 2,000 Events would delay others.
        spec: Json = {"volumeName": "absent", "storageClassName": "", "accessModes": ["ReadWriteOnce"]}
        spec["resources"] = {"requests": {"storage": "1Mi"}}
        meta = {"annotations": annotations}
        body = build_object(PERSISTENT_VOLUME_CLAIMS, f"idle-{number}", own.space, metadata=meta, spec=spec)
        own.bed.api.create(PERSISTENT_VOLUME_CLAIMS, body)


@pytest.mark.usefixtures("many_claims")
def test_the_alert_about_volumes_without_metrics_fires(prometheus: Prometheus) -> None:
    prometheus.wait_fired(_OF_MANY, seconds=_STEP_SECONDS)


@pytest.fixture
def retained(monitored: Monitored) -> None:
    """What a run of retention has reported, and a schedule of an older version."""
    own = monitored.upkeep.own
    held = HeldBackup(
        backup="old", rule="failing-volume", reason="kept", namespace=own.space, claim="data", location="default"
    )
    report = RetentionReport(at=datetime.now(UTC), held=[held], held_count=1, waiting=10)
    own.bed.user.apply(build_object(CONFIG_MAPS, DELETIONS_CONFIGMAP, own.space, data={REPORT_KEY: report.to_json()}))
    container = {"name": "schedule", "image": "agent:0", "args": [SCHEDULE_COMMAND, "--ttl=720h"]}
    pod = {"restartPolicy": "Never", "containers": [container]}
    spec = {"schedule": "@daily", "suspend": True, "jobTemplate": {"spec": {"template": {"spec": pod}}}}
    meta = {"labels": {SCHEDULE_LABEL: "nightly"}}
    own.bed.user.apply(build_object(CRON_JOBS, "nightly", own.space, metadata=meta, spec=spec))


@pytest.mark.usefixtures("retained")
def test_alerts_about_retention_fire(prometheus: Prometheus) -> None:
    prometheus.wait_fired(*_OF_RETENTION, seconds=_STEP_SECONDS)
