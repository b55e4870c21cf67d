"""Describes every entry below a folder. Runs inside a pod, so it needs nothing but Python.

`python3 survey.py FOLDER OUTPUT` writes a JSON object: path → what is known of it.
"""

import hashlib
import json
import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def main(folder: Path, output: Path) -> None:
    """Describe all entries, and the folder itself as `.`."""
    paths = [folder]
    for parent, folders, files in os.walk(folder, onerror=_raise):
        paths += [Path(parent) / name for name in (*folders, *files)]
    with ThreadPoolExecutor() as pool:
        described = dict(zip((str(p.relative_to(folder)) for p in paths), pool.map(describe, paths), strict=True))
    output.write_text(json.dumps(described))


def describe(path: Path) -> dict[str, object]:
    """What a restored entry must share with its original; the content as its SHA-256.

    kopia keeps the time of a file to the nanosecond, that of a link to the next microsecond,
    and gives a folder that of the newest file in it, so folders are described without.
    """
    status = path.lstat()
    known: dict[str, object] = {
        "type": stat.S_IFMT(status.st_mode),
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
        "owner": f"{status.st_uid}:{status.st_gid}",
    }
    if stat.S_ISREG(status.st_mode):
        known["mtime_ns"] = status.st_mtime_ns
        known["size"] = status.st_size
        with path.open("rb") as file:
            known["content"] = hashlib.file_digest(file, "sha256").hexdigest()
    elif stat.S_ISLNK(status.st_mode):
        known["mtime_us"] = -(-status.st_mtime_ns // 1000)
        known["target"] = str(path.readlink())
    return known


def _raise(error: OSError) -> None:
    raise error


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
