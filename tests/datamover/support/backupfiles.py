"""Velero's files about backups in a bucket, as its server writes them."""

import gzip
import json
from pathlib import Path


def put_backup(
    prefix: Path, name: str, uid: str, *, moved: tuple[str, ...] = (), volumes: tuple[str, ...] = ()
) -> Path:
    """Write the files of a backup below a prefix of a bucket, and return their directory.

    Args:
        prefix: the directory of the prefix.
        name: of the Backup.
        uid: of the Backup.
        moved: IDs of the kopia snapshots of its DataUploads.
        volumes: IDs of the kopia snapshots of its PodVolumeBackups.
    """
    folder = prefix / "backups" / name
    folder.mkdir(parents=True)
    (folder / "velero-backup.json").write_text(json.dumps({"kind": "Backup", "metadata": {"name": name, "uid": uid}}))
    infos = [{"snapshotDataMovementInfo": {"snapshotHandle": one, "uploaderType": "kopia"}} for one in moved]
    infos += [{"pvbInfo": {"snapshotHandle": one, "uploaderType": "kopia"}} for one in volumes]
    _write(folder / f"{name}-volumeinfo.json.gz", infos)
    _write(folder / f"{name}-podvolumebackups.json.gz", [{"status": {"snapshotID": one}} for one in volumes])
    return folder


def _write(path: Path, document: object) -> None:
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
