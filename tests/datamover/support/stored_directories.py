"""Directories of a snapshot, shown as kopia does."""

import json
import os

from datamover.kopia.process import KopiaAnswer
from datamover.kopia.repository import Repository
from datamover.runtime.work_dir import WorkDir
from tests.support.objects import JsonDict


class StoredDirectories(Repository):
    """A kopia with the directories of one snapshot, whose object `Ik1` is too large for one content."""

    def __init__(self, objects: dict[str, list[JsonDict]], work_dir: WorkDir) -> None:
        self.work_dir = work_dir
        self.objects = objects
        self.received: list[tuple[str, ...]] = []

    @property
    def description(self) -> str:
        return "repository"

    async def call(self, attempted: str, *arguments: str, output_fd: int | None = None) -> KopiaAnswer:
        assert output_fd is not None
        self.received.append(arguments)
        ids = arguments[2:] if arguments[0] == "content" else arguments[1:]
        lines = [json.dumps({"stream": "kopia:directory", "entries": self.objects[one]}) + "\n" for one in ids]
        os.ftruncate(output_fd, 0)
        os.pwrite(output_fd, "".join(lines).encode(), 0)
        return KopiaAnswer(attempted, 0, b"")
