"""Each mode of the command line is a type of its own."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from core.contract import MoverArgs, MoverVerb, VolumeMode
from core.errors import ConfigError
from core.models.compression import Compression
from core.snapshot_contract import CopyToCheck, TransferToDelete
from datamover.arguments import (
    DeletionOptions,
    FileOptions,
    FileSource,
    InitOptions,
    ListOptions,
    LocalBackup,
    LocalList,
    LocalOptions,
    LocalRestore,
    LogOptions,
    MaintenanceOptions,
    PodOptions,
    ReportOptions,
    RepositoryOptions,
    SendOptions,
    VerifyOptions,
    parse_arguments,
)
from datamover.kinds import TRANSFER_KINDS
from exposer.maintenance_job import FileRequest
from tests.support.golden import recorded

_TERMINATION_FILE = Path("/dev/termination-log")
_PASSWORD = {"KOPIA_PASSWORD": " a secret password\n"}
_LOCAL = ["--repository", "/repository"]


@pytest.mark.parametrize("flag", TRANSFER_KINDS)
def test_a_transfers_command_line_is_pod_mode(flag: str) -> None:
    argv = MoverArgs(
        verb=TRANSFER_KINDS[flag].verb,
        kind_flag=flag,
        resource_name="transfer-1",
        volume_path="/volume",
        volume_mode=VolumeMode.BLOCK,
        cache_volume_path="/cache",
        cache_limit_mib=100,
        attempt=2,
        resource_timeout=timedelta(minutes=3),
        log_level="debug",
        log_format="json",
    ).argv
    assert parse_arguments(argv, {}) == PodOptions(
        kind_flag=flag,
        name="transfer-1",
        volume=Path("/volume"),
        mode=VolumeMode.BLOCK,
        resource_timeout=timedelta(minutes=3),
        cache_volume="/cache",
        cache_limit_mib=100,
        attempt=2,
        termination_file=_TERMINATION_FILE,
        log=LogOptions("debug", "json"),
    )


@pytest.mark.parametrize("flag", TRANSFER_KINDS)
@pytest.mark.parametrize("log", [[], ["--log-level", "trace", "--log-format=json"]], ids=["", "of its DaemonSet"])
def test_the_command_line_of_a_mover_of_velero_is_pod_mode(flag: str, log: list[str]) -> None:
    """With this image, `/velero data-mover` and `/velero pod-volume` are this program."""
    kind = TRANSFER_KINDS[flag]
    pod = recorded(f"pod-of-{kind.resource.kind.lower()}")
    (container,) = pod["spec"]["containers"]
    group, verb = container["command"][1:]
    found = parse_arguments([verb, *container["args"], *log], {})
    assert (group, verb) == ("data-mover" if flag.startswith("data") else "pod-volume", kind.verb)
    assert found == PodOptions(
        kind_flag=flag,
        name=pod["metadata"]["name"],
        volume=Path("/", container["name"]),
        mode=VolumeMode.FILESYSTEM,
        resource_timeout=timedelta(minutes=10),
        termination_file=_TERMINATION_FILE,
        log=LogOptions("trace", "json") if log else LogOptions("info"),
    )


def test_a_mover_of_velero_without_a_timeout_waits_for_the_default() -> None:
    found = parse_arguments(["backup", "--volume-path=/v", "--data-upload=b1", "--resource-timeout=0s"], {})
    assert isinstance(found, PodOptions)
    assert found.resource_timeout == timedelta(minutes=10)


def test_a_backups_command_line_has_its_algorithm() -> None:
    argv = MoverArgs(MoverVerb.BACKUP, "data-upload", "b1", volume_path="/volume", compression="zstd").argv
    options = parse_arguments(argv, {})
    assert isinstance(options, PodOptions)
    assert options.compression is Compression.ZSTD


def test_an_unknown_algorithm_is_rejected_with_the_one_that_may_be_meant() -> None:
    argv = ["backup", "--data-upload=b1", "--volume-path=/volume", "--compression=zst"]
    with pytest.raises(ConfigError, match=r'"zst" \(did you mean zstd'):
        parse_arguments(argv, {})


@pytest.mark.parametrize(
    "account",
    [[], ["--cbt-sa-name=cbt"], ["--csi-snapshot-metadata-service-sa=cbt"]],
    ids=["none", "command", "exposer"],
)
@pytest.mark.parametrize("ids", [("", "", ""), ("change", "volume", "snapshot")], ids=["empty", "set"])
def test_what_velero_adds_for_its_block_data_mover_is_ignored(account: list[str], ids: tuple[str, str, str]) -> None:
    (args,) = [
        container["args"]
        for container in recorded("pod-of-dataupload")["spec"]["containers"]
        if container["command"] == ["/velero", "data-mover", "backup"]
    ]
    added = [f"--{name}-id={text}" for name, text in zip(("change", "volume", "snapshot"), ids, strict=True)]
    found = parse_arguments(["backup", *args, *added, *account], {})
    assert found == parse_arguments(["backup", *args], {})


def test_an_init_pods_command_line_names_its_backup_repository() -> None:
    argv = MoverArgs(verb=MoverVerb.INIT_REPOSITORY, kind_flag="backup-repository", resource_name="app-kopia").argv
    options = parse_arguments([*argv, "--termination-message-path=/tmp/message"], {})
    assert options == InitOptions(name="app-kopia", termination_file=Path("/tmp/message"), log=LogOptions("info"))


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ((), {}),
        (
            ("--ignore-foreign", "--verify-blobs=7", "--full-interval=21600", "--report-snapshots"),
            {
                "ignore_foreign": True,
                "verify_blobs": 7,
                "full_interval": timedelta(hours=6),
                "report_snapshots": True,
            },
        ),
    ],
    ids=["defaults", "all"],
)
def test_a_maintenance_pods_command_line_names_its_job(flags: tuple[str, ...], options: dict[str, Any]) -> None:
    argv = MoverArgs(
        verb=MoverVerb.MAINTAIN_REPOSITORY,
        kind_flag="backup-repository",
        resource_name="app-kopia",
        options=("--job=job-1", *flags),
    ).argv
    assert parse_arguments(argv, {}) == MaintenanceOptions(
        name="app-kopia", job="job-1", termination_file=_TERMINATION_FILE, log=LogOptions("info"), **options
    )


def test_a_reports_command_line_names_the_repository() -> None:
    argv = MoverArgs(MoverVerb.REPORT_SNAPSHOTS, "backup-repository", "app-kopia").argv
    assert parse_arguments(argv, {}) == ReportOptions(
        name="app-kopia", termination_file=_TERMINATION_FILE, log=LogOptions("info")
    )


def test_a_verifications_command_line_names_repository_and_snapshots() -> None:
    options = ("--snapshot=s1", "--snapshot=s2", "--percent=12.5")
    argv = MoverArgs(MoverVerb.VERIFY_SNAPSHOTS, "backup-repository", "app-kopia", options=options).argv
    common: dict[str, Any] = {"name": "app-kopia", "termination_file": _TERMINATION_FILE, "log": LogOptions("info")}
    assert parse_arguments(argv, {}) == VerifyOptions(snapshots=("s1", "s2"), percent=12.5, **common)
    mounted = ["verify-snapshots", "--backup-repository=app-kopia", "--volume-path=/v", "--volume-mode=Block"]
    assert parse_arguments([*mounted, "--snapshot=s1"], {}) == VerifyOptions(
        snapshots=("s1",), volume=Path("/v"), mode=VolumeMode.BLOCK, **common
    )
    with pytest.raises(ConfigError, match="--volume-path is for one --snapshot"):
        parse_arguments([*mounted, "--snapshot=s1", "--snapshot=s2"], {})


@pytest.mark.parametrize("percent", ["0", "101", "-1", "nan", "x"])
def test_a_share_that_is_none_is_rejected(percent: str) -> None:
    argv = ["verify-snapshots", "--backup-repository=r", "--snapshot=s1", f"--percent={percent}"]
    with pytest.raises(ConfigError, match=f'must be more than 0, and at most 100: "{percent}"'):
        parse_arguments(argv, {})


@pytest.mark.parametrize("namespaces", [(), ("app", "db")], ids=["all", "some"])
def test_a_lists_command_line_names_the_location(namespaces: tuple[str, ...]) -> None:
    options = tuple(f"--volume-namespace={name}" for name in namespaces)
    argv = MoverArgs(MoverVerb.LIST_SNAPSHOTS, "backup-storage-location", "default", options=options).argv
    assert parse_arguments(argv, {}) == ListOptions(
        name="default", volume_namespaces=namespaces, termination_file=_TERMINATION_FILE, log=LogOptions("info")
    )


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_deletions_command_line_names_the_transfers(dry_run: bool) -> None:
    transfers = (TransferToDelete("app", "night", "u1"), TransferToDelete("db", "day.1", "u2"))
    checks = (CopyToCheck("app", "s1"), CopyToCheck("db", "s2")) if dry_run else ()
    flags = ["--cluster=uid-1", *(f"--transfer={one}" for one in transfers), *(f"--check={one}" for one in checks)]
    flags += ["--dry-run"] if dry_run else []
    argv = MoverArgs(MoverVerb.DELETE_SNAPSHOTS, "backup-storage-location", "default", options=tuple(flags)).argv
    assert parse_arguments(argv, {}) == DeletionOptions(
        name="default",
        cluster="uid-1",
        transfers=transfers,
        dry_run=dry_run,
        checks=checks,
        termination_file=_TERMINATION_FILE,
        log=LogOptions("info"),
    )


@pytest.mark.parametrize(
    ("flag", "error"),
    [
        *(
            (f"--transfer={text}", "--transfer: not NAMESPACE/BACKUP/UID")
            for text in ("app/night", "app/night/u/1", "app//u1", "")
        ),
        ("--check=app", "--check: not NAMESPACE/SNAPSHOT"),
        ("--check=app/s1", "--check is for --dry-run"),
    ],
)
def test_a_deletions_flag_that_is_none_is_invalid(flag: str, error: str) -> None:
    argv = ["delete-snapshots", "--backup-storage-location=default", "--cluster=c", "--transfer=app/night/u1", flag]
    with pytest.raises(ConfigError, match=error):
        parse_arguments(argv, {})


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["backup", "--source=/data"], LocalBackup(Path("/data"))),
        (["backup", "--source=/data", "--name=mine"], LocalBackup(Path("/data"), "mine")),
        (["backup", "--source=/data", "--compression=zstd"], LocalBackup(Path("/data"), "", Compression.ZSTD)),
        (["backup", "--source=/data", "--read-all-files"], LocalBackup(Path("/data"), read_all_files=True)),
        (["restore", "--snapshot=abc", "--target=/out"], LocalRestore("abc", Path("/out"))),
        (["restore", "--snapshot=abc", "--target=/out", "--overwrite"], LocalRestore("abc", Path("/out"), True)),
        (["list"], LocalList()),
    ],
    ids=["backup", "with a name", "compressed", "of all files", "restore", "restore over files", "list"],
)
def test_a_repository_on_the_command_line_is_local_mode(
    argv: list[str], command: LocalBackup | LocalRestore | LocalList
) -> None:
    assert parse_arguments([*argv, *_LOCAL], _PASSWORD) == LocalOptions(
        command=command,
        repository=RepositoryOptions("/repository", "a secret password"),
        json=False,
        log=LogOptions("warning"),
    )


def test_a_password_file_takes_precedence_over_the_environment(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("from the file\n")
    options = parse_arguments(["list", *_LOCAL, f"--password-file={tmp_path}/password"], _PASSWORD)
    assert isinstance(options, LocalOptions)
    assert options.repository.password == "from the file"


@pytest.mark.parametrize(
    ("argv", "missing"),
    [(["backup"], "--source"), (["restore", "--target=/out"], "--snapshot"), (["restore", "--snapshot=a"], "--target")],
    ids=["source", "snapshot", "target"],
)
def test_a_command_of_local_mode_without_its_flags_is_rejected(argv: list[str], missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        parse_arguments([*argv, *_LOCAL], _PASSWORD)


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["backup", "--source=/\udcff"], "--source"),
        (["backup", "--source=/a", "--name=\udcff"], "--name"),
        (["restore", "--snapshot=a", "--target=/\udcff"], "--target"),
    ],
    ids=["source", "name", "target"],
)
def test_a_path_that_kopia_cannot_keep_is_rejected(argv: list[str], flag: str) -> None:
    with pytest.raises(ConfigError, match=rf'{flag}: not UTF-8, so that kopia cannot keep it: "/?\\xff"'):
        parse_arguments([*argv, *_LOCAL], _PASSWORD)


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "two", ""])
def test_an_attempt_has_a_positive_number(number: str) -> None:
    argv = ["backup", "--data-upload=name", "--volume-path=/volume", f"--attempt={number}"]
    with pytest.raises(ConfigError, match=f'^argument --attempt: must be a positive integer: "{number}" '):
        parse_arguments(argv, {})


def test_no_repr_of_the_options_holds_the_password() -> None:
    assert "a secret password" not in repr(parse_arguments(["list", *_LOCAL], _PASSWORD))


def test_the_command_lines_of_files_have_paths_of_any_characters() -> None:
    path = "a/$(HOME) \u00fc%41\n/-x"
    request = FileRequest("app", "k1", path, limit=7, after="b c")
    argv = MoverArgs(MoverVerb.LIST_FILES, "backup-storage-location", "default", options=request.options).argv
    assert not any(character in "".join(argv) for character in "$\n ")
    source = FileSource(location="default", volume_namespace="app", snapshot_id="k1", path=path)
    common: dict[str, Any] = {"termination_file": _TERMINATION_FILE, "log": LogOptions("info")}
    assert parse_arguments(argv, {}) == FileOptions(source=source, limit=7, after="b c", **common)
    device = FileRequest("app", "k1", device=True)
    argv = MoverArgs(MoverVerb.SEND_FILES, "backup-storage-location", "default", options=device.options).argv
    assert parse_arguments(argv, {}) == SendOptions(source=replace(source, path="", device=True), **common)
