"""The pictures of `nodeagent ui` in docs/commands.md show each view as it is now: `make screenshots` draws them."""

import os
import struct
from pathlib import Path

import pytest

from tests.client.support.browser import visit
from tests.client.support.busy_scene import busy_scene
from tests.client.support.site import open_site

pytestmark = [pytest.mark.processes, pytest.mark.thorough, pytest.mark.timeout(300)]

_IMAGES = Path(__file__).parents[2] / "docs" / "images"
_VIEWS = {
    "ui-overview": ("/", "light"),
    "ui-volume": ("/volumes/app/data", "dark"),
    "ui-transfers": ("/transfers?state=active", "dark"),
    "ui-transfer": ("/transfers/du/moving", "light"),
    "ui-node": ("/nodes/a", "light"),
    "ui-queue": ("/queue", "dark"),
    "ui-repositories": ("/repositories", "light"),
    "ui-repository": ("/repositories/app-default-kopia", "light"),
}


def _size(picture: bytes) -> tuple[int, int]:
    """Return width and height. Source: PNG, the chunk IHDR."""
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


@pytest.mark.parametrize("name", list(_VIEWS))
async def test_the_picture_of_each_view_is_current(name: str) -> None:
    path, theme = _VIEWS[name]
    stored = _IMAGES / f"{name}.png"
    async with open_site(busy_scene(), signed_in=False) as site, visit(site.url, theme=theme, width=1100) as tab:
        await tab.open(path)
        if name == "ui-repository":
            await tab.page.locator("#chart canvas").wait_for()
        drawn = await tab.page.screenshot(full_page=name != "ui-volume")
    if os.environ.get("UPDATE_GOLDEN"):
        stored.write_bytes(drawn)
    width, height = _size(stored.read_bytes())
    now_width, now_height = _size(drawn)
    # Fonts differ between machines; what is added to a view or goes makes it higher or lower.
    assert width == now_width
    assert height == pytest.approx(now_height, rel=0.05)
    assert f"images/{stored.name}" in (_IMAGES.parent / "commands.md").read_text(encoding="utf-8")
