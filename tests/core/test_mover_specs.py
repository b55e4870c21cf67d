"""The command lines of pods that are not of a transfer: a contract with agents and commands of other versions."""

import re
from typing import Final

import pytest

from core.contract import VolumeMode
from core.errors import ConfigError
from core.models.storage import BlockHash
from core.mover_specs import (
    DeleteSnapshots,
    InitRepository,
    ListFiles,
    ListSnapshots,
    MaintainRepository,
    MoverSpec,
    PlanRestore,
    ReportSnapshots,
    SendFiles,
    ValidateLocation,
    VerifySnapshots,
    parse_spec,
)
from core.snapshot_contract import CopyToCheck, TransferToDelete

_LOG: Final = "--log-level=info --log-format=text"
_REPOSITORY: Final = "--backup-repository=r"
_LOCATION: Final = "--backup-storage-location=d"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (InitRepository(backup_repository="r"), f"init-repository {_REPOSITORY} {_LOG}"),
        (
            InitRepository(backup_repository="r", block_hash=BlockHash.HMAC_SHA256_128),
            f"init-repository {_REPOSITORY} {_LOG} --block-hash=HMAC-SHA256-128",
        ),
        (
            ValidateLocation(backup_storage_location="d", termination_message_path="/dev/stdout", keys_only=True),
            f"validate-location {_LOCATION} {_LOG} --termination-message-path=/dev/stdout --keys-only",
        ),
        (
            MaintainRepository(
                backup_repository="r",
                job="job-1",
                ignore_foreign=True,
                verify_blobs=0,
                full_interval_seconds=21_600,
                report_snapshots=True,
            ),
            (
                f"maintain-repository {_REPOSITORY} {_LOG} --job=job-1 --ignore-foreign "
                "--verify-blobs=0 --full-interval=21600 --report-snapshots"
            ),
        ),
        (
            ReportSnapshots(backup_repository="r", resource_timeout="10m0s"),
            f"report-snapshots {_REPOSITORY} --resource-timeout=10m0s {_LOG}",
        ),
        (ListSnapshots(backup_storage_location="d"), f"list-snapshots {_LOCATION} {_LOG}"),
        (
            ListSnapshots(backup_storage_location="d", volume_namespaces=("app", "db")),
            f"list-snapshots {_LOCATION} {_LOG} --volume-namespace=app --volume-namespace=db",
        ),
        (
            PlanRestore(
                backup_storage_location="d",
                volume_path="/v",
                volume_mode=VolumeMode.FILESYSTEM,
                volume_namespace="app",
                snapshot="s1",
                incremental=True,
                delete_extra_files=True,
            ),
            (
                f"plan-restore {_LOCATION} --volume-path=/v --volume-mode=Filesystem {_LOG} "
                "--volume-namespace=app --snapshot=s1 --incremental --delete-extra-files"
            ),
        ),
        (
            VerifySnapshots(
                backup_repository="r", volume_path="/v", volume_mode=VolumeMode.BLOCK, snapshots=("s1",), percent=12.5
            ),
            f"verify-snapshots {_REPOSITORY} --volume-path=/v --volume-mode=Block {_LOG} --snapshot=s1 --percent=12.5",
        ),
        (
            DeleteSnapshots(
                backup_storage_location="d",
                transfer=("app/night/u1", "db/day.1/u2"),
                check=("app/s1",),
                cluster="c",
                dry_run=True,
            ),
            (
                f"delete-snapshots {_LOCATION} {_LOG} --transfer=app/night/u1 --transfer=db/day.1/u2 --check=app/s1 "
                "--cluster=c --dry-run"
            ),
        ),
        (
            ListFiles(volume_namespace="app", snapshot="k1", path="a/$(HOME) \u00fc%41\n/-x", limit=7, after="b c"),
            (
                f"list-files {_LOG} --volume-namespace=app --snapshot=k1 "
                "--path=a/%24%28HOME%29%20%C3%BC%2541%0A/-x --limit=7 --after=b%20c"
            ),
        ),
        (
            SendFiles(volume_namespace="app", snapshot="k1", device=True),
            f"send-files {_LOG} --volume-namespace=app --snapshot=k1 --device",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value.verb),
)
def test_a_specification_is_read_as_it_was_written(spec: MoverSpec, words: str) -> None:
    assert spec.argv == words.split()
    assert parse_spec(words.split()) == spec


def test_other_command_lines_have_no_specification() -> None:
    assert [parse_spec(argv) for argv in ([], ["backup", "--job=x"], ["--help"])] == [None] * 3


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("report-snapshots --unknown=1", "report-snapshots: Object contains unknown field `unknown`"),
        ("report-snapshots r", "unknown field `r`"),
        ("delete-snapshots --cluster=c", "missing required field `transfer`"),
        ("list-files --volume-namespace=app --snapshot=k --limit=0", "limit: Expected `int` >= 1"),
        ("maintain-repository --job=j --verify-blobs=x", "verify-blobs: Expected `int`"),
        ("delete-snapshots --cluster=c --transfer=a/b/c --check=app/s1", "--check is for --dry-run"),
        *(
            (f"delete-snapshots --cluster=c --transfer={text}", f'not NAMESPACE/BACKUP/UID: "{text}"')
            for text in ("a/b", "app/night/u/1", "app//u1", "")
        ),
        *(
            (f"delete-snapshots --cluster=c --transfer=a/b/c --check={text} --dry-run", f'/SNAPSHOT: "{text}"')
            for text in ("app", "app/", "/s1", "app/s1/x")
        ),
        ("verify-snapshots --volume-path=/v --snapshot=s1 --snapshot=s2", "--volume-path is for one --snapshot"),
        *(
            (f"verify-snapshots --snapshot=s1 --percent={percent}", "percent: Expected `float`")
            for percent in ("0", "101", "-1", "nan", "x")
        ),
    ],
)
def test_an_invalid_command_line_is_an_error(words: str, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        parse_spec(words.split())


def test_a_deletion_names_transfers_copies_and_their_namespaces() -> None:
    spec = DeleteSnapshots(transfer=("app/night/u1",), check=("db/s2",), cluster="c", dry_run=True)
    assert spec.transfers == [TransferToDelete("app", "night", "u1")]
    assert spec.checks == [CopyToCheck("db", "s2")]
    assert [*map(str, spec.transfers), *map(str, spec.checks)] == ["app/night/u1", "db/s2"]
    assert spec.volume_namespaces == ["app", "db"]
