"""Backup repositories as users see them: documents, Events, the next maintenance, the lines to connect to one.

Pure: what a user sees of a decision that `nodeagent.maintenance.rules` makes.

Their fields are stable: they are the JSON that these commands print, in camelCase; times are RFC 3339.

Password and keys are in none of the lines: kubectl reads them from their Secrets when the lines are run, into variables
of that shell. kopia gets them from there, so they are in no argument and not in its configuration, which is a file of
its own: a connection that the person has stays as it is.
Source: kopia 0.23.1, cli/command_repository_connect.go, cli/storage_s3.go, cli/storage_filesystem.go; Velero v1.18,
pkg/repository/config/config.go (the folder of a repository).
"""

import dataclasses
import posixpath
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Self
from urllib.parse import urlsplit

from msgspec import field
from msgspec.structs import replace

from client.leader_page import LeaderDecision
from client.text import EventLine
from core.contract import MaintenanceMode, MaintenanceResult
from core.errors import ConfigError, ContractError
from core.models import names as wire
from core.models.base import Time, WireModel, parse_time
from core.models.storage import BackupRepository, BackupStorageLocation, MaintenanceEntry, SecretKey
from core.snapshot_contract import SnapshotTotal
from nodeagent.maintenance.record import MaintenanceRecord
from nodeagent.maintenance.rules import Decision, Hold, MaintenanceView, decide_maintenance
from nodeagent.maintenance.verification import RepositoryVerification

_REASONS: Final = {
    Hold.OFF: "maintenance is switched off (serve --repo-maintenance=off)",
    Hold.SERVER: "the Velero server in the namespace maintains it",
    Hold.SERVER_SEEN: "a Velero server was there less than an hour ago, or the leader has not looked for as long",
    Hold.JOB_UNFINISHED: "a Job runs",
    Hold.NEVER_READY: "the repository was never Ready: its message says why",
    Hold.LOCATION_MISSING: "its backup storage location does not exist",
    Hold.LOCATION_READ_ONLY: "its backup storage location is ReadOnly, so nothing may be written",
    Hold.LOCATION_UNAVAILABLE: "its backup storage location is Unavailable: its status.message says why",
    Hold.FOREIGN: "another cluster, or a user, maintains the repository; serve --repo-maintenance=on ignores that",
    Hold.BLOCKED: "the last run failed, and the next one would too until location, credentials or password change",
    Hold.BACK_OFF: "the last run failed",
    Hold.IDLE: "nothing has changed since the last run",
    Hold.NOT_OBSERVED: "the leader waits for the answers of its watches",
    Hold.NOT_DUE: "it is maintained",
    Hold.WINDOW: "no window is open",
    Hold.CONCURRENCY: "as many Jobs run as maxConcurrentJobs allows",
    Hold.REJECTED: "the API server rejects the pod of the Job: see the Event MaintenanceRejected",
}


class NextMaintenance(WireModel):
    """The next maintenance of one repository.

    `hold` says why nothing runs now, as on the leader's status page; empty: a run is due. `due` is when it is or was
    due; None: not known, since it would not run then either. `until` is when time alone may end the hold. `mode` is
    what kopia's schedule asks for then, as recorded by the last run: quick or full; empty: not known. `from_leader`:
    the leader said so; otherwise it follows from what this command could read, and `due` is the earliest time.
    """

    hold: str = ""
    reason: str = ""
    mode: str = ""
    due: Time | None = None
    until: Time | None = None
    overdue: bool = False
    from_leader: bool = False

    @classmethod
    def of_leader(cls, said: LeaderDecision, record: MaintenanceRecord, now: datetime) -> Self:
        """Return what the leader said; a later version may know holds that have no explanation here."""
        try:
            due = parse_time(said.due) if said.due else None
        except ContractError:
            due = None
        decided = cls(hold=said.hold, due=due, overdue=said.overdue, from_leader=True)
        return decided._explained(record, now)

    @classmethod
    def of_decision(cls, decision: Decision, record: MaintenanceRecord, now: datetime) -> Self:
        """Return what was decided here."""
        decided = cls(
            hold=str(decision.hold or ""), due=decision.due_at, until=decision.wait_until, overdue=decision.overdue
        )
        return decided._explained(record, now)

    def _explained(self, record: MaintenanceRecord, now: datetime) -> Self:
        reason = _REASONS[Hold(self.hold)] if self.hold in set(Hold) else self.hold
        if record.at is None:
            return replace(self, reason=reason)
        full = record.next_full is not None and record.next_full <= max(self.due or now, now)
        return replace(self, reason=reason, mode=str(MaintenanceMode.FULL if full else MaintenanceMode.QUICK))


def compute_next(view: MaintenanceView) -> NextMaintenance:
    """Return the next maintenance without the leader.

    Two facts of `view` are unknown outside of the leader, and assumed: that something has been backed up since the last
    run, so that no time is too late; and that what a failure depends on has not changed.
    """
    record = view.record
    assumed = dataclasses.replace(view, fingerprint=f"since {record.fingerprint}", inputs=record.blocked_inputs)
    try:
        decision = decide_maintenance(assumed)
    except OverflowError:
        return NextMaintenance(hold="invalid", reason="a time or duration of its maintenance is out of range")
    return NextMaintenance.of_decision(decision, record, view.now)


class RepositorySummary(WireModel):
    """One BackupRepository; `contents` and `index_blobs` are from the last maintenance, None until then."""

    name: str
    namespace: str
    volume_namespace: str
    location: str
    phase: str
    message: str = ""
    created: Time | None = None
    last_maintenance: Time | None = None
    maintenance_frequency: str = ""
    repository_id: str = field(name="repositoryID", default="")
    next: NextMaintenance
    contents: int | None = None
    index_blobs: int | None = None

    @classmethod
    def of(cls, repository: BackupRepository, record: MaintenanceRecord, following: NextMaintenance) -> Self:
        """Return what the repository, its record and the decision about it say."""
        meta, spec, status = repository.metadata, repository.spec, repository.status
        return cls.like(
            record,
            name=meta.name,
            namespace=meta.namespace,
            volume_namespace=spec.volume_namespace,
            location=spec.backup_storage_location,
            phase=str(repository.phase),
            message=status.message or "",
            created=meta.creation_timestamp,
            last_maintenance=status.last_maintenance_time,
            maintenance_frequency=spec.maintenance_frequency,
            repository_id=meta.annotations.get(wire.REPOSITORY_ID_ANNOTATION, ""),
            next=following,
        )


class RepositoryList(WireModel):
    """Some BackupRepositories, and what could not be found out about them."""

    repositories: list[RepositorySummary]
    notes: list[str]


class RunningJobState(WireModel):
    """A Job that has not ended, and its pod, if there is one; `pending` is why that has not started."""

    job: str
    created: Time
    pod: str = ""
    phase: str = ""
    node: str = ""
    pending: str = ""


class RepositoryProof(WireModel):
    """What the leader has verified of a repository.

    `outcome` is what it found; empty: nothing yet. So many of the 16 `shares` were read; `proven` is since when all of
    them were, None: not all. `damaged` names volumes, files and the copies that are still right. `message` is why the
    last Job found nothing out. `restored` is the PVC of the last restore test that found something out, `restored_at`
    when its Job was created, and `restore_outcome` what it found; `restore_message` is why a later one did not.
    """

    at: Time | None = None
    outcome: str = ""
    shares: int = 0
    proven: Time | None = None
    damaged: list[str] = field(default_factory=list)
    message: str = ""
    restored: str = ""
    restored_at: Time | None = None
    restore_outcome: str = ""
    restore_message: str = ""

    @classmethod
    def of(cls, record: RepositoryVerification) -> Self | None:
        """Return what the record says; None: no Job has ended."""
        tests = record.tests
        if record.job is None and tests.job is None:
            return None
        return cls.like(
            record,
            outcome=str(record.outcome or ""),
            shares=len(record.shares),
            proven=record.proven_at,
            restored=tests.claim,
            restored_at=tests.at,
            restore_outcome=str(tests.outcome or ""),
            restore_message=f"PVC {tests.tried}: {tests.message}" if tests.message else "",
        )


class RepositoryDetails(RepositorySummary):
    """Everything that is known about one BackupRepository.

    `created_here`: an agent of this cluster created the kopia repository, instead of finding it. `next_quick` and
    `next_full` are kopia's own schedule. `last_result` is from the newest Job whose pod still exists. The peaks are
    kopia's resident memory in earlier runs; `memory_request` and `memory_limit` apply to the next attempt;
    `memory_too_small`: the last one was out of memory, and this one gets no more. `incomplete_full`: the last full
    maintenance did not finish. `unreferenced` are the kopia snapshots that nothing refers to, as of `reported_at`;
    None: not known. `verification` is None where the leader has not verified it. `history` and `events` begin with the
    newest.
    """

    created_here: bool = False
    location_phase: str = ""
    location_message: str = ""
    next_quick: Time | None = None
    next_full: Time | None = None
    full_interval_seconds: float = 0.0
    last_mode: str = ""
    last_result: MaintenanceResult | None = None
    peak_quick_bytes: int = 0
    peak_full_bytes: int = 0
    memory_request: str = ""
    memory_limit: str = ""
    memory_too_small: bool = False
    incomplete_full: bool = False
    reported_at: Time | None = None
    unreferenced: SnapshotTotal | None = None
    verification: RepositoryProof | None = None
    running: list[RunningJobState] = field(default_factory=list)
    history: list[MaintenanceEntry] = field(default_factory=list)
    events: list[EventLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


_IDENTITY: Final = ("--override-username=default", "--override-hostname=default")
"""All data movers have it, so their snapshots are listed as one's own."""

_INHERITED: Final = SecretKey(name=wire.CREDENTIALS_SECRET, key="cloud")
"""The credentials of locations that name none."""

_KEY: Final = re.compile(r"[-._a-zA-Z0-9]+")
_PROFILE: Final = re.compile(r"[-._@a-zA-Z0-9]+")
_AWS_KEYS: Final = {"AWS_ACCESS_KEY_ID": "aws_access_key_id", "AWS_SECRET_ACCESS_KEY": "aws_secret_access_key"}
_TRUE: Final = frozenset({"1", "t", "true"})


@dataclass(frozen=True)
class _Secrets:
    """The Secrets of a namespace, which kubectl reads by its own configuration or with these flags."""

    namespace: str
    flags: Sequence[str]

    def read(self, wanted: SecretKey) -> str:
        return f"{self.read_encoded(wanted)} | base64 -d"

    def read_encoded(self, wanted: SecretKey) -> str:
        """Return the command that prints it in Base64."""
        if not _KEY.fullmatch(wanted.key):
            raise ConfigError(f'Secret {self.namespace}/{wanted.name}: "{wanted.key}" is no key of a Secret')
        template = f'{{{{index .data "{wanted.key}"}}}}'
        words = ("kubectl", *self.flags, "get", "secret", wanted.name, "-n", self.namespace)
        return shlex.join([*words, "-o", f"go-template={template}"])


def build_connect_lines(
    repository: BackupRepository, location: BackupStorageLocation, kubectl_flags: Sequence[str] = ()
) -> list[str]:
    """Return the lines, for a POSIX shell with kubectl, base64, awk and kopia; kubectl gets these flags.

    Raises:
        ConfigError: the location is of another kind than S3 or a directory, or its values cannot be used.
    """
    secrets, spec = _Secrets(repository.metadata.namespace, kubectl_flags), location.spec
    inner = posixpath.join(spec.object_storage.prefix.strip("/"), "kopia", repository.spec.volume_namespace)
    password = secrets.read(SecretKey(name=wire.REPO_CREDENTIALS_SECRET, key=wire.REPO_CREDENTIALS_KEY))
    meta = repository.metadata
    file = shlex.quote(f"nodeagent-{meta.namespace}-{meta.name}.config")
    lines = [f'export KOPIA_CONFIG_PATH="$HOME"/.config/kopia/{file}', f'export KOPIA_PASSWORD="$({password})"']
    provider = spec.provider.removeprefix("velero.io/")
    if provider == "fs":
        path = posixpath.join(spec.config.get("fspath", ""), inner)
        storage = ["filesystem", f"--path={path}"]
    elif provider == "aws" or (provider not in {"azure", "gcp"} and spec.config.get("s3Url")):
        lines += _key_lines(secrets, location)
        storage = _s3(location, f"{inner}/")
    else:
        raise ConfigError(
            f"BackupStorageLocation {location.name}: no command for the provider {spec.provider}: connect kopia by hand"
        )
    flags = [*storage, *_IDENTITY, "--readonly", "--no-persist-credentials", "--no-check-for-updates"]
    words = ["kopia", "repository", "connect", *map(shlex.quote, flags), *_authority(secrets, location)]
    return [*lines, " ".join(words)]


def _key_lines(secrets: _Secrets, location: BackupStorageLocation) -> list[str]:
    """Return the lines that read the keys of the location's profile; a session's are not supported."""
    profile = location.spec.config.get("profile") or "default"
    if not _PROFILE.fullmatch(profile):
        raise ConfigError(f'BackupStorageLocation {location.name}: "{profile}" is no name of a profile')
    source = secrets.read(location.spec.credential or _INHERITED)
    lines = []
    for variable, name in _AWS_KEYS.items():
        script = f'/^\\[/ {{ on = index($0, "[{profile}]") }} on && $1 == "{name}" {{ print $2 }}'
        lines.append(f"export {variable}=\"$({source} | awk -F '[[:space:]]*=[[:space:]]*' {shlex.quote(script)})\"")
    return lines


def _s3(location: BackupStorageLocation, prefix: str) -> list[str]:
    config, storage = location.spec.config, location.spec.object_storage
    region = config.get("region", "")
    url = urlsplit(config.get("s3Url", ""))
    amazon = f"s3.{region}.amazonaws.com.cn" if region.startswith("cn-") else "s3.amazonaws.com"
    words = [
        "s3",
        f"--bucket={storage.bucket}",
        f"--prefix={prefix}",
        # Without the user and password that a URL may have.
        f"--endpoint={url.netloc.rpartition('@')[2] or amazon}",
        f"--region={region}",
        # Empty: kopia takes them from the environment each time, and writes none to its configuration.
        "--access-key=",
        "--secret-access-key=",
        "--session-token=",
    ]
    if url.scheme == "http":
        words.append("--disable-tls")
    elif config.get("insecureSkipTLSVerify", "").lower() in _TRUE:
        words.append("--disable-tls-verification")
    return words


def _authority(secrets: _Secrets, location: BackupStorageLocation) -> list[str]:
    """Return the flag with the certificate authority, which is no secret."""
    storage = location.spec.object_storage
    if storage.ca_cert_ref is not None:
        return [f'--root-ca-pem-base64="$({secrets.read_encoded(storage.ca_cert_ref)})"']
    return [shlex.quote(f"--root-ca-pem-base64={storage.ca_cert}")] if storage.ca_cert else []
