"""A checkpoint that a backup by block has left."""

import json
import os
from pathlib import Path

from core.models.names import CHECKPOINT_DEVICE_TAG, TRANSFER_UID_TAG
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.trees import make_large_file


def leave_device_checkpoint(kopia: PlainKopia, folder: Path, transfer_uid: str) -> None:
    """Back a device up by block that takes a minute to read; kill kopia once it has saved a checkpoint."""
    device = make_large_file(folder / f"device of {transfer_uid}", 10)
    os.truncate(device, 64 << 30)
    fd = os.open(device, os.O_RDONLY)
    flags = ("--source=default@default:device", f"--device-fd={fd}", f"--device-size={64 << 30}")
    names = {TRANSFER_UID_TAG: transfer_uid, CHECKPOINT_DEVICE_TAG: "device"}
    tags = {f"tag:{name}": value for name, value in names.items()}
    decision = {"parallel": 1, "checkpoint": {"path": transfer_uid, "tags": tags, "seconds": 0.1}}
    with kopia.start("block-write", *flags, fd=fd) as running:
        assert running.stdin
        running.stdin.write(json.dumps(decision).encode())
        running.stdin.close()
        while not any(one["source"]["path"] == transfer_uid for one in kopia.snapshots()):
            assert running.poll() is None
        running.kill()
    os.close(fd)
