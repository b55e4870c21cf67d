"""A server of the pages that runs over a scene, and a session that has its cookie."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from client.ui.live import Details, Live
from client.ui.server import Pages, serve
from core.clock import Clock, SystemClock
from tests.client.support.status_scene import StatusScene
from tests.nodeagent.support.hand_clock import NOON


class _QuickClock(SystemClock):
    """Time flies, and pauses are short."""

    def monotonic(self) -> float:
        return super().monotonic() * 100

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.1))


@dataclass
class Site:
    """A server that runs, and a browser that has its cookie."""

    scene: StatusScene
    live: Live
    url: str
    base: str
    browser: aiohttp.ClientSession

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        async with self.browser.get(f"{self.base}{path}", headers=headers, allow_redirects=False) as answer:
            return answer.status, await answer.text()

    async def until(self, path: str, pattern: str) -> str:
        """Return the page once it has the pattern."""
        async with asyncio.timeout(20):
            while True:
                number = self.live.number
                _, text = await self.get(path)
                if re.search(pattern, text):
                    return text
                await self.live.wait(number, 1.0)


@asynccontextmanager
async def running_site(scene: StatusScene, clock: Clock | None = None) -> AsyncIterator[Site]:
    """Serve the pages, whose address was not used yet; without a clock time flies."""
    clock = clock or _QuickClock()
    live = Live(scene.client, "velero", scene.reader, clock)
    details = Details(scene.client, "velero", now=lambda: NOON, clock=clock)
    jar = aiohttp.CookieJar(unsafe=True)
    async with (
        serve(Pages(live, details), 0) as url,
        aiohttp.ClientSession(cookie_jar=jar, timeout=aiohttp.ClientTimeout(20)) as browser,
    ):
        task = asyncio.get_running_loop().create_task(live.run())
        try:
            yield Site(scene, live, url, url.partition("/?")[0], browser)
        finally:
            task.cancel()
            await asyncio.wait({task})


@asynccontextmanager
async def open_site(scene: StatusScene, *, signed_in: bool = True, clock: Clock | None = None) -> AsyncIterator[Site]:
    """Serve the pages of a cluster that was read; `signed_in`: `browser` has the cookie, and the address is used."""
    async with running_site(scene, clock) as site:
        if signed_in:
            async with site.browser.get(site.url, allow_redirects=False) as answer:
                assert (answer.status, answer.headers["Location"]) == (303, "/")
        async with asyncio.timeout(20):
            while site.live.state is None:
                await site.live.wait(site.live.number, 1.0)
        yield site
