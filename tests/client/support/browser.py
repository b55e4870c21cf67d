"""A real browser: Debian's Chromium without a window, driven by Playwright."""

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, async_playwright


@dataclass
class Visit:
    """A tab that has the cookie of the site; `faults` are what its console and its scripts complained about."""

    page: Page
    base: str
    faults: list[str] = field(default_factory=list)

    async def open(self, path: str) -> str:
        """Open a page, and return its text."""
        await self.page.goto(f"{self.base}{path}")
        return await self.text()

    async def text(self) -> str:
        """Return what the page shows."""
        return await self.page.locator("main").inner_text()

    async def follow(self, name: str) -> str:
        """Click on the link of that name, and return the text of the page that it leads to."""
        async with self.page.expect_navigation():
            await self.page.get_by_role("link", name=name, exact=True).first.click()
        return await self.text()

    async def violations(self) -> list[str]:
        """Return the rules of accessibility that the page breaks, as axe-core finds them."""
        found = (await Axe().run(self.page)).response["violations"]
        return [f"{one['id']}: {one['nodes'][0]['html']}" for one in found]


@asynccontextmanager
async def visit(
    url: str, *, script: bool = True, theme: str = "light", width: int = 1280, arguments: Sequence[str] = ()
) -> AsyncIterator[Visit]:
    """Open the address that the server printed in a new browser, which gets more `arguments`."""
    chromium = shutil.which("chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=list(arguments))
        context = await browser.new_context(java_script_enabled=script, viewport={"width": width, "height": 900})
        page = await context.new_page()
        await page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
        # A loaded machine is slow, and no fault of a page.
        page.set_default_timeout(60_000)
        opened = Visit(page, url.partition("/?")[0])
        page.on("console", lambda message: opened.faults.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: opened.faults.append(str(error)))
        await page.goto(url)
        yield opened
        await browser.close()
