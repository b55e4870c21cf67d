"""Events as files in a directory, one for each reason: what a data mover records for the agent of its node.

A watch of Events is expensive: the API server does not cache them, so each one that is written goes from etcd to every
watch. An agent that sees the volumes of its node's pods needs none. A tenant may have written the files.
"""

import errno
import json
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, cast

from core.kube.types import Event, Manifest


def read_start(file: Path | str, most_bytes: int) -> bytes:
    """Return the start of a regular file, else raise OSError; a link is not followed, and a pipe does not block."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(file))
        return os.read(descriptor, most_bytes)
    finally:
        os.close(descriptor)


_LIMIT_BYTES: Final = 16_384
"""Many times what an Event takes."""

MESSAGE_LIMIT_BYTES: Final = 1024
"""What the message of an Event may have. Source: Kubernetes, validation of an Event's note."""


def write_event(directory: Path, event: Manifest) -> None:
    """Write a core/v1 Event in place of the one with the same reason; a reader, of any user, sees either as a whole.

    Raises:
        OSError: it cannot be written.
    """
    reason = str(event["reason"])
    new = directory / f".{reason}"
    try:
        new.write_text(json.dumps(event))
        new.chmod(0o644)
        new.replace(directory / reason)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise


class EventFiles:
    """The Events that another process writes into a directory.

    It is looked at again and again, so paths are strings: pathlib interns the parts of each, which grows the memory
    of the process, and takes longer than the look.
    """

    def __init__(self, directory: Path) -> None:
        self.directory: Final = directory
        self._read: dict[str, tuple[int, int]] = {}

    def has_any(self, reasons: Iterable[str]) -> bool:
        """Return whether an Event with one of these reasons was written. A tenant may have filled the directory."""
        return bool(self._read) or any(os.path.lexists(f"{self.directory}/{reason}") for reason in reasons)

    def read_new(self, reasons: Iterable[str]) -> list[Event]:
        """Return the Events of these reasons that were written since the last call, the oldest first; nothing else."""
        found: list[tuple[int, Event]] = []
        for reason in reasons:
            file = f"{self.directory}/{reason}"
            try:
                now = os.lstat(file)
                version = (now.st_mtime_ns, now.st_ino)
                if self._read.get(reason) == version or not stat.S_ISREG(now.st_mode):
                    continue
                event = _parse(read_start(file, _LIMIT_BYTES))
            except OSError:
                continue
            self._read[reason] = version
            if event is not None and event["reason"] == reason:
                found.append((now.st_mtime_ns, event))
        return [event for _, event in sorted(found, key=lambda each: each[0])]


def _parse(content: bytes) -> Event | None:
    try:
        event = json.loads(content)
    except (ValueError, RecursionError):
        return None
    texts = ("reason", "message", "lastTimestamp")
    if not isinstance(event, dict) or not all(isinstance(event.get(key), str) for key in texts):
        return None
    fits = len(event["message"].encode(errors="replace")) <= MESSAGE_LIMIT_BYTES
    return cast("Event", event) if fits else None
