"""The pages in a real browser: they follow changes, can be read by everybody, and answer what operators ask."""

from contextlib import AsyncExitStack

import pytest

from core.models.base import JsonDict
from tests.nodeagent.support.browser import visit
from tests.nodeagent.support.busy_scene import busy_scene
from tests.nodeagent.support.site import open_site
from tests.nodeagent.support.status_scene import StatusScene, transfer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

_PATHS = (
    "/",
    "/transfers",
    "/transfers/du/moving",
    "/transfers/du/broken",
    "/nodes/a",
    "/queue",
    "/repositories",
    "/repositories/app-default-kopia",
)
_MIB = 2**20


def _moving(mib: int) -> JsonDict:
    times = {"startTimestamp": "2026-11-21T11:58:20Z", "acceptedTimestamp": "2026-11-21T11:58:00Z"}
    progress = {"totalBytes": 500 * _MIB, "bytesDone": mib * _MIB}
    return transfer("DataUpload", "moving", "InProgress", node="a", progress=progress, **times)


@pytest.fixture
def scene() -> StatusScene:
    return busy_scene()


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_every_page_is_accessible_and_without_an_error(scene: StatusScene, theme: str) -> None:
    async with open_site(scene, signed_in=False) as site, visit(site.url, theme=theme) as tab:
        for path in _PATHS:
            assert (path, len(await tab.open(path)) > 100) == (path, True)
            assert (path, await tab.violations()) == (path, [])
        assert tab.faults == []


async def test_a_narrow_window_shows_all_without_being_wider_than_itself(scene: StatusScene) -> None:
    async with open_site(scene, signed_in=False) as site, visit(site.url, width=360) as tab:
        for path in _PATHS:
            await tab.open(path)
            width = await tab.page.evaluate("document.documentElement.scrollWidth")
            assert (path, width) == (path, 360)


async def test_without_a_script_the_same_facts_are_readable(scene: StatusScene) -> None:
    texts = []
    for script in (False, True):
        async with open_site(scene, signed_in=False) as site, visit(site.url, script=script) as tab:
            texts.append([(await tab.open(path)).partition("seen at")[0] for path in _PATHS[:-1]])
    assert texts[0] == texts[1]


async def test_a_page_follows_changes_and_keeps_what_a_person_does_in_it(scene: StatusScene) -> None:
    async with open_site(scene, signed_in=False) as site, visit(site.url) as tab:
        await tab.open("/transfers?state=active")
        await tab.page.get_by_label("Text").fill("half a wo")
        link = tab.page.get_by_role("link", name="du/moving").first
        scene.kube.put(_moving(321))
        await tab.page.get_by_text("321.0 MiB of 500.0 MiB").wait_for()
        assert await tab.page.get_by_label("Text").input_value() == "half a wo"
        await link.focus()
        scene.kube.put(_moving(400))
        await tab.page.get_by_text("400.0 MiB of 500.0 MiB").wait_for()
        assert await tab.page.evaluate("document.activeElement.textContent") == "du/moving"


async def test_while_the_api_server_is_away_the_page_says_since_when_and_goes_on(scene: StatusScene) -> None:
    async with open_site(scene, signed_in=False) as site, visit(site.url) as tab:
        await tab.open("/")
        scene.kube.fail_next("GET", "/", "lost", times=10_000)
        banner = tab.page.get_by_text("This page shows what was seen at 2026-11-21 12:00:00 UTC")
        await banner.wait_for()
        assert await tab.violations() == []
        scene.kube.fulfill()
        await banner.wait_for(state="detached")


async def test_when_the_command_has_ended_the_page_says_so(scene: StatusScene) -> None:
    async with AsyncExitStack() as server:
        site = await server.enter_async_context(open_site(scene, signed_in=False))
        async with visit(site.url) as tab:
            await tab.open("/queue")
            ended = tab.page.get_by_text("nodeagent ui has ended")
            assert not await ended.is_visible()
            await server.aclose()
            await ended.wait_for()


async def test_a_missing_permission_is_named(scene: StatusScene) -> None:
    scene.kube.fail_next("GET", "/backuprepositories", 403, message="may not list backuprepositories", times=999)
    async with open_site(scene, signed_in=False) as site, visit(site.url) as tab:
        assert "may not list backuprepositories" in await tab.open("/")
        assert await tab.violations() == []
        assert "du/moving" in await tab.open("/transfers")


async def test_five_questions_are_answered_within_two_clicks(scene: StatusScene) -> None:
    async with open_site(scene, signed_in=False) as site, visit(site.url) as tab:
        overview = await tab.open("/")
        # Is anything unprotected? What failed last night, and why?
        assert "of them without a complete one" in overview
        assert "app/unlucky" in overview
        assert "no space left on the repository's disk" in overview
        assert "no space left" in await tab.follow("du/broken")
        # Why is this pending?
        await tab.open("/")
        await tab.follow("Queue")
        assert "Position in the queue" in await tab.follow("du/first")
        # What will run next on node b?
        await tab.open("/")
        node = await tab.follow("b")
        assert "pvb/ready" in node.partition("Runs next")[2]
        # When was this repository maintained?
        await tab.open("/")
        await tab.follow("Repositories")
        assert "2h ago" in await tab.follow("app-default-kopia")
        await tab.page.locator("#chart canvas").wait_for()
