"""Reads that many checks have in common: how often the server is asked, and what is never held."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import pytest

from core.kube.errors import UnreachableError
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, PODS, SECRETS
from core.kube.transport import Request, Response
from nodeagent.leader.admission.examiner import SharedReads
from tests.support.clock import LoopClock

pytestmark = pytest.mark.looptime

_LOCATION = BACKUP_STORAGE_LOCATIONS.path("velero", "default")
_ANSWER_SECONDS = 0.1


class _Server:
    """Answers after a moment with how often it was asked; `refusals` come first."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.refusals: list[int | Exception] = []

    async def request(self, request: Request) -> Response:
        self.asked.append(request.path)
        await asyncio.sleep(_ANSWER_SECONDS)
        refusal = self.refusals.pop(0) if self.refusals else 200
        if isinstance(refusal, Exception):
            raise refusal
        return Response(refusal, str(len(self.asked)).encode())

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        raise NotImplementedError

    async def close(self) -> None:
        pass


@pytest.fixture
def server() -> _Server:
    return _Server()


@pytest.fixture
def reads(server: _Server) -> SharedReads:
    return SharedReads(server, LoopClock())


async def test_one_answer_is_enough_for_all_who_ask_at_a_time(server: _Server, reads: SharedReads) -> None:
    answers = await asyncio.gather(*(reads.request(Request("GET", _LOCATION)) for _ in range(20)))
    assert {answer.body for answer in answers} == {b"1"}
    assert server.asked == [_LOCATION]


async def test_an_answer_is_not_used_for_longer_than_a_second(server: _Server, reads: SharedReads) -> None:
    bodies = []
    for pause_seconds in (0.0, 0.5, 0.6):
        await asyncio.sleep(pause_seconds)
        bodies.append((await reads.request(Request("GET", _LOCATION))).body)
    assert bodies == [b"1", b"1", b"2"]
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(Request("GET", PODS.path("apps", "web")), id="a pod"),
        pytest.param(Request("GET", SECRETS.path("velero"), {"limit": "500"}), id="a list"),
        pytest.param(Request("GET", SECRETS.path("velero")), id="a whole collection"),
        pytest.param(Request("PATCH", _LOCATION, body=b"{}"), id="a write"),
    ],
)
async def test_nothing_else_is_shared(server: _Server, reads: SharedReads, request_: Request) -> None:
    bodies = [(await reads.request(request_)).body for _ in range(2)]
    assert bodies == [b"1", b"2"]
    assert len(server.asked) == 2


async def test_what_was_not_found_is_asked_for_again(server: _Server, reads: SharedReads) -> None:
    server.refusals = [404]
    assert (await reads.request(Request("GET", _LOCATION))).status == 404
    assert (await reads.request(Request("GET", _LOCATION))).status == 200


async def test_somebody_else_asks_when_the_first_one_gets_no_answer(server: _Server, reads: SharedReads) -> None:
    server.refusals = [UnreachableError("gone")]
    both = [reads.request(Request("GET", _LOCATION)) for _ in range(2)]
    first, second = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(first, UnreachableError)
    assert isinstance(second, Response)
    assert second.body == b"2"


async def test_somebody_else_asks_when_the_first_one_is_given_up(server: _Server, reads: SharedReads) -> None:
    async with asyncio.TaskGroup() as group:
        first = group.create_task(reads.request(Request("GET", _LOCATION)), name="first")
        second = group.create_task(reads.request(Request("GET", _LOCATION)), name="second")
        await asyncio.sleep(_ANSWER_SECONDS / 2)
        first.cancel()
    assert second.result().body == b"2"
