"""`python -m tests.docs.draw_pages`: the pictures of `nodeagent ui` in docs/commands.md; `make screenshots` runs it."""

import asyncio
from pathlib import Path

from tests.client.support.browser import visit
from tests.client.support.busy_scene import busy_scene
from tests.client.support.site import open_site

_IMAGES = Path(__file__).parents[2] / "docs" / "images"
_PICTURES = {
    "ui-overview": ("/", "light"),
    "ui-transfers": ("/transfers?state=active", "dark"),
    "ui-repository": ("/repositories/app-default-kopia", "light"),
}


async def _draw() -> None:
    for name, (path, theme) in _PICTURES.items():
        async with open_site(busy_scene(), signed_in=False) as site, visit(site.url, theme=theme, width=1100) as tab:
            await tab.open(path)
            if name == "ui-repository":
                await tab.page.locator("#chart canvas").wait_for()
            await tab.page.screenshot(path=_IMAGES / f"{name}.png", full_page=True)


if __name__ == "__main__":
    asyncio.run(_draw())
