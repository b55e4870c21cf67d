"""The restore helper: the program of the init container `restore-wait`, which ends once the pod's volumes are restored.

Every restored pod has it, so it takes as little memory as Python allows: a script that imports nothing of the project,
and of the standard library only what an interpreter loads quickly. The image has it as `/velero-restore-helper`.
Source: Velero v1.18.2, cmd/velero-restore-helper/velero-restore-helper.go; the messages are as in Velero 1.19.
"""

import os
import sys
import time
from signal import SIGTERM, signal
from types import FrameType

_VOLUMES = "/restores"
"""Has a directory for each volume that is restored; Velero mounts them there, under their names."""

_DONE_DIRECTORY = ".velero"
"""The directory of a volume with its done file, which `datamover.data_path.finished` writes."""

_INTERVAL_SECONDS = 1


def main(arguments: list[str], volumes: str = _VOLUMES) -> int:
    """Wait for the done file of the Restore with the given UID in each volume; then remove the done directories.

    Returns the exit code.
    """
    if len(arguments) != 1:
        print("ERROR: exactly one argument must be provided, the restore's UID", file=sys.stderr)
        return 1
    # The first process of a container ignores a signal that it does not handle.
    signal(SIGTERM, _exit)
    time.sleep(_INTERVAL_SECONDS)
    while not _is_done(volumes, arguments[0]):
        time.sleep(_INTERVAL_SECONDS)
    print("All PodVolumeRestores are done")
    try:
        _remove_done_directories(volumes, arguments[0])
    except OSError as error:
        # The data is there, so the pod may start. What stays is an empty file, or what the pod's user may not remove.
        print(_describe(error))
    else:
        print("Done cleanup .velero folder")
    return 0


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _is_done(volumes: str, restore_uid: str) -> bool:
    try:
        directories = _list_directories(volumes)
    except OSError as error:
        print(f"ERROR reading {volumes} directory: {_describe(error)}", file=sys.stderr)
        return False
    for directory in directories:
        file = f"{directory}/{_DONE_DIRECTORY}/{restore_uid}"
        try:
            os.stat(file)  # noqa: PTH116 - pathlib would take a MiB
        except FileNotFoundError:
            print(f"The filesystem restore done file {file} is not found yet. Retry later.")
            return False
        except OSError as error:
            print(f"ERROR looking filesystem restore done file {file}: {_describe(error)}", file=sys.stderr)
            return False
        print(f"Found the done file {file}")
    return True


def _list_directories(volumes: str) -> list[str]:
    directories = []
    with os.scandir(volumes) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.path)
            else:
                print(f"{entry.name} is not a directory, skipping.")
    return directories


def _remove_done_directories(volumes: str, restore_uid: str) -> None:
    for directory in _list_directories(volumes):
        path = f"{directory}/{_DONE_DIRECTORY}"
        parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if os.path.islink(path):  # noqa: PTH114
                # The volume had no room for a directory, so the file is beside the link.
                _remove(restore_uid, parent)
            _remove(_DONE_DIRECTORY, parent)
        finally:
            os.close(parent)
        print(f"Deleted {path}")


def _remove(name: str, parent: int) -> None:
    """Remove a file, link, or directory with all in it from the open directory `parent`; `shutil` takes memory."""
    try:
        directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except NotADirectoryError:
        os.unlink(name, dir_fd=parent)
        return
    except FileNotFoundError:
        return
    try:
        for each in os.listdir(directory):  # noqa: PTH208 - of a descriptor
            _remove(each, directory)
    finally:
        os.close(directory)
    os.rmdir(name, dir_fd=parent)


def _describe(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
