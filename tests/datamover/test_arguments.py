"""Each mode of the command line is a type of its own."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from core.contract import MoverArgs, TrackedSnapshot, VolumeMode
from core.errors import ConfigError
from core.models.transfer_settings import Compression
from core.mover_specs import ListSnapshots
from datamover.arguments import (
    LocalBackup,
    LocalList,
    LocalOptions,
    LocalRestore,
    LogOptions,
    PodOptions,
    RepositoryOptions,
    StorageCommand,
    parse_arguments,
)
from datamover.kinds import TRANSFER_KINDS
from tests.support.golden import recorded

_TERMINATION_FILE = Path("/dev/termination-log")
_PASSWORD = {"KOPIA_PASSWORD": " a secret password\n"}
_LOCAL = ["--repository", "/repository"]


def _pod(argv: Sequence[str]) -> PodOptions:
    options = parse_arguments(argv, {})
    assert isinstance(options, PodOptions)
    return options


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
    found = _pod([verb, *container["args"], *log])
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
    assert _pod([verb, *container["args"], "--resource-timeout=0s"]).resource_timeout == timedelta(minutes=10)


@pytest.mark.parametrize("account", [[], ["--cbt-sa-name=cbt"], ["--csi-snapshot-metadata-service-sa=cbt"]])
@pytest.mark.parametrize("ids", [("", "", ""), ("change", "volume", "snapshot")], ids=["empty", "set"])
def test_what_velero_adds_for_its_block_data_mover_is_known(account: list[str], ids: tuple[str, str, str]) -> None:
    (container,) = recorded("pod-of-dataupload")["spec"]["containers"]
    added = [f"--{name}-id={text}" for name, text in zip(("change", "volume", "snapshot"), ids, strict=True)]
    without = _pod(["backup", *container["args"]])
    found = _pod(["backup", *container["args"], *added, *account])
    assert found == replace(without, tracked=TrackedSnapshot(*ids) if all(ids) else None)
    usual = ["restore", "--data-download=r1", "--volume-path=/v"]
    assert _pod([*usual, "--vs-namespace=", *account]) == _pod(usual)


def test_a_command_about_a_location_has_its_own_log_and_termination_message() -> None:
    spec = ListSnapshots(
        backup_storage_location="default", log_level="debug", log_format="json", termination_message_path="/tmp/m"
    )
    command = parse_arguments(spec.argv, {})
    assert command == StorageCommand(spec=spec, termination_file=Path("/tmp/m"), log=LogOptions("debug", "json"))
    command = parse_arguments(["report-snapshots", "--backup-repository=r"], {})
    assert isinstance(command, StorageCommand)
    assert (command.termination_file, command.log) == (_TERMINATION_FILE, LogOptions("info"))


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
)
def test_a_repository_is_local_mode(
    tmp_path: Path, argv: list[str], command: LocalBackup | LocalRestore | LocalList
) -> None:
    options = parse_arguments([*argv, *_LOCAL], _PASSWORD)
    repository = RepositoryOptions("/repository", "a secret password")
    assert options == LocalOptions(command=command, repository=repository, json=False, log=LogOptions("warning"))
    assert "a secret password" not in repr(options)
    # A file takes precedence over the environment.
    (tmp_path / "password").write_text("from the file\n")
    options = parse_arguments([*argv, *_LOCAL, f"--password-file={tmp_path}/password"], _PASSWORD)
    assert isinstance(options, LocalOptions)
    assert options.repository.password == "from the file"


_BACKUP = ["backup", "--data-upload=name", "--volume-path=/volume"]
_NOT_UTF8 = r': not UTF-8, so that kopia cannot keep it: "/?\\xff"'


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["backup", *_LOCAL], "--source"),
        (["restore", "--target=/out", *_LOCAL], "--snapshot"),
        (["restore", "--snapshot=a", *_LOCAL], "--target"),
        (["backup", "--source=/\udcff", *_LOCAL], f"--source{_NOT_UTF8}"),
        (["backup", "--source=/a", "--name=\udcff", *_LOCAL], f"--name{_NOT_UTF8}"),
        (["restore", "--snapshot=a", "--target=/\udcff", *_LOCAL], f"--target{_NOT_UTF8}"),
        ([*_BACKUP, "--compression=zst"], r'"zst" \(did you mean zstd'),
        *(
            ([*_BACKUP, f"--attempt={number}"], f'^argument --attempt: must be a positive integer: "{number}" ')
            for number in ("0", "-1", "1.5", "two", "")
        ),
    ],
)
def test_what_is_missing_or_invalid_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arguments(argv, _PASSWORD)
