"""Block devices: a snapshot holds one as a folder with a single file, the device's bytes.

Knows how kopia reads a device from its standard input, so that no byte passes through this
process, and writes one to its standard output, from where a thread takes it: kopia would fill
every hole with zeros. Does not know custom resources.
Source: recordings of the peer, tests/recordings/velero-1.18.2/block-kopia-snapshots.json.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from core.errors import DataPathError, KopiaError
from datamover.background import run_in_background
from datamover.holes import copy_stream
from datamover.kopia import Kopia, KopiaFiles
from datamover.snapshot import Snapshot
from datamover.sync import WRITING, sync_device
from datamover.transfer import Transfer

__all__ = ["device_size", "open_device", "restore_device"]


@contextmanager
def open_device(path: Path, flags: int) -> Iterator[int]:
    """Open a device, or a file that stands for one, and close it at the end.

    Raises:
        DataPathError: it cannot be opened.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except OSError as e:
        raise DataPathError(f"device {path} cannot be opened: {e.strerror}") from e
    try:
        yield fd
    finally:
        os.close(fd)


def device_size(fd: int) -> int:
    """Return the device's size in bytes; reading and writing begin at its start."""
    size = os.lseek(fd, 0, os.SEEK_END)
    os.lseek(fd, 0, os.SEEK_SET)
    return size


async def restore_device(kopia: Kopia, snapshot: Snapshot, target: Path, *, transfer: Transfer) -> None:
    """Write the snapshot's device back to `target`, in order, and onto the disk.

    Raises:
        DataPathError: the target is smaller than the data: nothing was written.
        KopiaError: the snapshot is not one of a device, or the transfer broke.
    """
    name, data = await _streamed_file(kopia, snapshot)
    with open_device(target, os.O_WRONLY) as fd:
        size = device_size(fd)
        if size < snapshot.size_bytes:
            raise DataPathError(
                f"device {target} has {size} bytes, the data of snapshot {snapshot.snapshot_id} "
                f"{snapshot.size_bytes}: nothing was written"
            )
        ours, kopias = os.pipe()
        copy = partial(copy_stream, ours, os.dup(fd))
        async with run_in_background(copy, name="device-writer") as copying:
            try:
                answer = await transfer.run(
                    kopia,
                    f"restore {name} of snapshot {snapshot.snapshot_id} to device {target}",
                    *("show", data),
                    files=KopiaFiles(stdout_fd=kopias),
                )
            finally:
                # The writer's end of the stream: it has all of it.
                os.close(kopias)
            try:
                written = await copying
            except OSError as e:
                # kopia failed too then, because nobody took what it had.
                raise answer.error(f"the device did not take the data: {e.strerror}") from e
        answer.check()
    if written != snapshot.size_bytes:
        raise answer.error(f"{written} bytes of {snapshot.size_bytes} were written")
    await transfer.wait_for(sync_device(target), WRITING)


async def _streamed_file(kopia: Kopia, snapshot: Snapshot) -> tuple[str, str]:
    """Return name and object of the only file of a device's snapshot."""
    answer = await kopia.call(f"snapshot {snapshot.snapshot_id}", "show", snapshot.root_object)
    entries = answer.check().document().get("entries") or []
    if len(entries) != 1 or entries[0].get("type") != "f":
        raise KopiaError(f"snapshot {snapshot.snapshot_id} is not one of a block device: it holds no single file")
    return entries[0]["name"], entries[0]["obj"]
