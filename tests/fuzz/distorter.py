"""An API server whose answers are distorted: chosen objects in them, or whole answers."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from core.kube.transport import Request, Response, Transport
from core.models.base import JsonDict
from tests.fuzz.values import encode
from tests.support.fakekube import FakeKube

ObjectKey = tuple[str, str, str]
"""Kind, namespace and name of a stored object."""

Path_ = tuple[str | int, ...]
"""Keys and indexes from the top of a JSON value."""

Distortion = Callable[[JsonDict], Any]


def paths_in(value: object) -> Iterator[Path_]:
    """Yield every path in a JSON value."""
    items: Iterator[tuple[str | int, object]] = iter(())
    if isinstance(value, dict):
        items = iter(value.items())
    elif isinstance(value, list):
        items = iter(enumerate(value))
    for key, inner in items:
        yield (key,)
        for path in paths_in(inner):
            yield (key, *path)


def replace_at(obj: Any, path: Path_, value: Any) -> Any:
    """Return a copy of `obj` with `value` at `path`; what is missing on the way is created."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(key, int):
        items = list(obj) if isinstance(obj, list) else []
        items += [{}] * (key + 1 - len(items))
        items[key] = replace_at(items[key], rest, value)
        return items
    fields = dict(obj) if isinstance(obj, dict) else {}
    return fields | {key: replace_at(fields.get(key), rest, value)}


def key_of(obj: JsonDict) -> ObjectKey:
    """Return the key of an object, as far as it has one."""
    meta = obj.get("metadata", {})
    return (obj.get("kind", ""), meta.get("namespace", ""), meta.get("name", ""))


@dataclass
class Distorter(Transport):
    """Distorts the answers of `inner`.

    Attributes:
        objects: what becomes of an object, by kind, namespace and name.
        plural: the collection whose next `answers_left` reads and lines of watches are `answer`; empty: none.
    """

    inner: FakeKube
    objects: dict[ObjectKey, Distortion] = field(default_factory=dict)
    answer: bytes = b""
    answers_left: int = 0
    plural: str = ""

    async def request(self, request: Request) -> Response:
        """Return the distorted response."""
        response = await self.inner.request(request)
        if request.method == "GET" and self._take(request):
            return Response(200, self.answer)
        if response.status >= 400 or not self.objects or request.path.endswith("/log"):
            return response
        body = json.loads(response.body)
        if "items" in body:
            return Response(response.status, encode(body | {"items": [self._distort(item) for item in body["items"]]}))
        return Response(response.status, encode(self._distort(body)))

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a watch with distorted lines."""
        async with self.inner.stream(request) as lines:
            yield self._lines(request, lines)

    async def close(self) -> None:
        """Nothing is held."""

    async def _lines(self, request: Request, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for line in lines:
            if self._take(request):
                for wrong in self.answer.split(b"\n"):
                    yield wrong
                continue
            event = json.loads(line)
            yield encode(event | {"object": self._distort(event["object"])}) if self.objects else line

    def _take(self, request: Request) -> bool:
        if not self.plural or not self.answers_left or f"/{self.plural}" not in request.path:
            return False
        self.answers_left -= 1
        return True

    def _distort(self, obj: JsonDict) -> Any:
        change = self.objects.get(key_of(obj))
        return obj if change is None else change(obj)
