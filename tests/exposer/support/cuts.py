"""Crashes of the agent: steps whose requests are cut short, at each of them in turn."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

import pytest

from core.kube.errors import UnreachableError
from core.kube.transport import Request, Response, Transport
from tests.exposer.support.world import World
from tests.support.transports import Around


async def cut_short(work: Awaitable[Any]) -> bool:
    """Run `work` and return whether a `Cut` interrupted it."""
    try:
        await work
    except UnreachableError:
        return True
    return False


CUTS: Final = pytest.mark.parametrize(
    "applied", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["before", "after"]
)
"""Whether a request that is cut short has had its effect."""


class Cut(Around):
    """A transport whose `at`-th request fails, before or after it was applied."""

    def __init__(self, inner: Transport, at: int = 0, *, applied: bool = False) -> None:
        super().__init__(inner)
        self._at = at
        self._applied = applied
        self.calls: list[str] = []

    async def request(self, request: Request) -> Response:
        self.calls.append(f"{request.method} {request.path}")
        if len(self.calls) != self._at:
            return await self.inner.request(request)
        if self._applied:
            await self.inner.request(request)
        raise UnreachableError("cut")


class Scene(Protocol):
    """What has a world."""

    world: World


S = TypeVar("S", bound=Scene)


async def interruptions(
    build: Callable[[], S],
    step: Callable[[S, Cut], Awaitable[Any]],
    *,
    applied: bool,
    least: int,
    prepare: Callable[[S], Awaitable[Any]] | None = None,
    over: Callable[..., Cut] | None = None,
    settle: bool = True,
) -> AsyncIterator[S]:
    """Yield scenes in which `step` was cut short at each request in turn, as if the agent had crashed.

    In the last one it was not. It sends at least so many requests, through the transport that `over` builds, if any.
    Unless they `settle`, controllers have not run since the cut.
    """
    at, cut = 0, True
    while cut:
        at, scene = at + 1, build()
        if prepare is not None:
            await prepare(scene)
        transport = over(scene, at, applied=applied) if over else Cut(scene.world.kube, at, applied=applied)
        cut = await cut_short(step(scene, transport))
        if settle:
            await scene.world.settle()
        yield scene
    assert at > least
