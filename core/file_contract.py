"""The contract between a command and the data movers that read files of a snapshot: what they say about them.

A mover that lists files writes one line for each. One that sends them writes a line about what it sends, and then a tar
of it, to the first process of its own pod that connects to its socket; `SEND_COMMAND` is that process.
"""

import re
from enum import StrEnum
from typing import Final

from msgspec.structs import force_setattr

from core.models.base import Int64, WireModel
from core.models.job_output import OutputLine

__all__ = [
    "ENTRY_LINE",
    "SEND_COMMAND",
    "FileEntry",
    "FileListing",
    "FileType",
    "SentFiles",
    "check_mode",
]

SEND_COMMAND: Final = ("python", "-m", "datamover.pod.file_relay")
"""What is executed in the pod to read what it sends: the stream on standard output, SentFiles on standard error."""


_MODE: Final = re.compile(r"[0-7]{0,7}")


class FileType(StrEnum):
    """What an entry of a directory is."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"
    OTHER = "other"


class FileEntry(WireModel, omit_defaults=True):
    """An entry of a directory in a snapshot; all of it was chosen by those who wrote to the volume.

    `mode` are its permissions, such as `0644`. Of a directory, `size_bytes` and `files` are of all below it.
    """

    name: str
    type: FileType
    mode: str = ""
    user_id: Int64 = 0
    group_id: Int64 = 0
    size_bytes: Int64 = 0
    files: Int64 = 0
    modified: str = ""

    def __post_init__(self) -> None:
        """Read a mode that is none as empty."""
        force_setattr(self, "mode", check_mode(self.mode))


ENTRY_LINE: Final = OutputLine("nodeagent.io/file-entry", FileEntry)


class FileListing(WireModel, omit_defaults=True):
    """The termination message of `list-files` that succeeded.

    `type` is the type of what was listed: of a directory, `entries` is how many it has after the name where the list
    begins, and `listed` how many of them were listed; the others exceed the limit. Of anything else, both are 1.
    """

    type: FileType
    entries: Int64 = 0
    listed: Int64 = 0


class SentFiles(WireModel, omit_defaults=True):
    """How `send-files` ended: how many bytes it sent, the first line included, and why not all; empty: all."""

    bytes: Int64 = 0
    error: str = ""


def check_mode(mode: str) -> str:
    """Return the permissions of an entry if they are an octal number of at most seven digits, else nothing."""
    return mode if _MODE.fullmatch(mode) else ""
