"""A cluster whose Jobs have a pod at once, which lists files or sends them."""

import io
import json
import tarfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from core.clock import Clock
from core.kube.errors import ForbiddenError
from core.kube.transport import Request, Response
from core.snapshot_contract import ENTRY_LINE, FileEntry, FileType, SentFiles
from tests.client.support.job_pods import ended
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

SUCCESS = b'\x03{"metadata":{},"status":"Success"}'
FAILURE = b'\x03{"status":"Failure","reason":"NonZeroExitCode","message":"exit code 1"}'


class FilesKube(FakeKube):
    """`pod` is the status of the pod of each Job, `log` its log; `played` are the messages of a process in it."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.allowed = True
        self.forbids_exec = False
        self.pod: JsonDict = {"phase": "Running"}
        self.log = ""
        self.played: Sequence[bytes] = ()
        self.opened: list[tuple[str, Sequence[tuple[str, str]]]] = []

    async def request(self, request: Request) -> Response:
        if "/selfsubject" in request.path:
            review = json.loads(request.body or b"{}") | {"status": {"allowed": self.allowed}}
            return Response(201, json.dumps(review).encode())
        response = await super().request(request)
        if request.method == "POST" and request.path.endswith("/jobs") and response.status == 201:
            self._start(json.loads(response.body)["metadata"])
        return response

    def _start(self, job: JsonDict) -> None:
        name, namespace = f"{job['name']}-x", job["namespace"]
        meta = {"name": name, "namespace": namespace, "labels": {"job-name": job["name"]}}
        self.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {}, "status": self.pod})
        self.logs[namespace, name] = self.log

    def end(self, exit_code: int, message: str, *lines: str) -> None:
        """Let the pods of the next Jobs have ended."""
        self.pod = ended(exit_code, message)
        self.log = "".join(f"{line}\n" for line in lines)

    def send(self, entry: FileEntry, tar: bytes, *, error: str = "", cut: int = 0) -> None:
        """Let the process in the pod send this, in small pieces, without the last `cut` bytes."""
        whole = f"{ENTRY_LINE.format(entry)}\n".encode() + tar
        sent = whole[: len(whole) - cut]
        result = SentFiles(bytes=len(whole), error=error).to_json().encode()
        pieces = [b"\x01" + sent[at : at + 700] for at in range(0, len(sent), 700)]
        self.played = [*pieces, b"\x02" + result[:5], b"\x02" + result[5:] + b"\n", FAILURE if error else SUCCESS]

    @asynccontextmanager
    async def messages(
        self, path: str, query: Sequence[tuple[str, str]], _: Sequence[str]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        self.opened.append((path, query))
        if self.forbids_exec:
            raise ForbiddenError(f"GET {path}: 403", status=403, reason="Forbidden")
        yield self._play()

    async def _play(self) -> AsyncIterator[bytes]:
        for message in self.played:
            yield message


def pack(**files: bytes) -> bytes:
    """Return a tar of these files; `_` in a name is a slash, and one without bytes is a directory."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for key, data in files.items():
            info = tarfile.TarInfo(key.replace("_", "/"))
            info.size = len(data)
            if not data:
                info.type = tarfile.DIRTYPE
            tar.addfile(info, io.BytesIO(data))
    return content.getvalue()


DIRECTORY = FileEntry(name="etc", type=FileType.DIRECTORY, size_bytes=100)
