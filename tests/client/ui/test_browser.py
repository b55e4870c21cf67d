"""The pages in a real browser: they follow changes, can be read by everybody, and answer what operators ask."""

import re
from contextlib import AsyncExitStack

import pytest
from playwright.async_api import Request

from tests.client.support.browser import visit
from tests.client.support.busy_scene import busy_scene
from tests.client.support.crowded_scene import CROWDED_PATHS, crowded_scene
from tests.client.support.hostile_scene import HOSTILE, HOSTILE_PATHS, hostile_scene
from tests.client.support.site import open_site, running_site
from tests.client.support.status_scene import DIGEST, StatusScene, transfer
from tests.support.objects import JsonDict

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

_FACTS = {
    "/": ("app/unlucky", "33h ago", "no space left", "node-agent-config", "ready, leader", "New data: last 640.0 MiB"),
    "/?days=1": ("2026-11-20", "44.0 GiB"),
    "/volumes/app/data": ("protected", "New data: last", "nightly-20261120", "2026-09-08"),
    "/volumes/app/logs": ("Its PVC is gone", "Backup size: last", "None is listed"),
    "/transfers": ("27 transfers", "100.0 MiB of 500.0 MiB", "position 1 in the queue", "WaitingForSlot", "Slot 2"),
    "/transfers/du/moving": (
        "wait: it is under way",
        "the leader accepted it.",
        "moving 100s",
        "1.0 MiB/s, 6m left",
        "app/data",
        "b1",
    ),
    "/transfers/du/broken": ("fix the cause", "no space left", "nodeagent describe du/broken -n velero"),
    "/transfers/du/first": ("Position in the queue", "Queued"),
    "/nodes/a": ("1 of 2 slots are used", "du/moving", "du/first"),
    "/queue": ("3 transfers wait for the quota", "1 of 5", "du/third", "pvb/ready", "Positions are the leader"),
    "/repositories": ("app-default-kopia", "2h ago", "Available"),
    "/repositories/app-default-kopia": ("47.2 GiB of new data", "17.5 times", "2026-11-20", "Next maintenance"),
}
"""Each page, and what it says."""

_MIB = 2**20
_OVERLAPS = """() => [...document.querySelectorAll("td, tbody th")]
  .filter((cell) => cell.scrollWidth > cell.clientWidth + 1).map((cell) => cell.textContent.slice(0, 40))"""
"""What is wider than its cell, and would cover the next one."""

_WITHOUT_CHART = """() => {
  document.getElementById("growth-chart")?.remove();
  return document.querySelector("main").innerText;
}"""
"""What a script adds is a picture of the table above it. In one step, since the page's stream brings it back."""


def _moving(mib: int) -> JsonDict:
    times = {"startTimestamp": "2026-11-21T11:58:20Z", "acceptedTimestamp": "2026-11-21T11:58:00Z"}
    progress = {"totalBytes": 500 * _MIB, "bytesDone": mib * _MIB}
    return transfer("DataUpload", "moving", "InProgress", node="a", progress=progress, **times)


@pytest.fixture
def scene() -> StatusScene:
    return busy_scene()


def _missing(path: str, text: str) -> list[str]:
    """Return the facts of the page that the text lacks."""
    return [f"{path}: {fact}" for fact in _FACTS[path] if fact not in text]


@pytest.mark.sample("light")
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_every_page_is_accessible_and_without_an_error(scene: StatusScene, theme: str) -> None:
    async with open_site(scene, signed_in=False) as site, visit(site.url, theme=theme) as tab:
        for path in _FACTS:
            assert _missing(path, await tab.open(path)) == []
            assert (path, await tab.violations()) == (path, [])
        assert tab.faults == []
        assert "does not exist" in await tab.open("/transfers/du/unknown")
        assert await tab.violations() == []


@pytest.mark.sample("dark")
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_the_page_before_the_cluster_was_read_is_accessible_and_goes_on(scene: StatusScene, theme: str) -> None:
    scene.go_away()
    async with running_site(scene) as site, visit(site.url, theme=theme) as tab:
        assert "The cluster was not read yet" in await tab.text()
        assert await tab.violations() == []
        scene.kube.fulfill()
        await tab.page.get_by_text("The cluster is").wait_for()


async def test_a_narrow_window_shows_all_without_being_wider_than_itself(scene: StatusScene) -> None:
    long = "long-" * 50
    scene.kube.put(transfer("DataUpload", f"{long}name", "InProgress", node=f"{long}node", message="m" * 500))
    scene.kube.put(transfer("DataUpload", "wide", "Failed", message="no/blanks" * 60))
    async with open_site(scene, signed_in=False) as site, visit(site.url, width=360) as tab:
        for path in (*_FACTS, f"/transfers/du/{long}name", f"/nodes/{long}node"):
            await tab.open(path)
            width = await tab.page.evaluate("document.documentElement.scrollWidth")
            assert (path, width) == (path, 360)
            assert (path, await tab.page.evaluate(_OVERLAPS)) == (path, [])


async def test_without_a_script_the_same_facts_are_readable(scene: StatusScene) -> None:
    texts = []
    for script in (False, True):
        async with open_site(scene, signed_in=False) as site, visit(site.url, script=script) as tab:
            for path in _FACTS:
                text = await tab.open(path)
                if script:
                    text = await tab.page.evaluate(_WITHOUT_CHART)
                texts.append((path, text.partition("seen at")[0]))
            assert script or await tab.page.locator("#growth-chart").is_hidden()
    assert texts[: len(_FACTS)] == texts[len(_FACTS) :]


async def test_all_is_reached_by_the_keyboard(scene: StatusScene) -> None:
    async with open_site(scene, signed_in=False) as site, visit(site.url, width=700) as tab:
        await tab.open("/transfers")
        await tab.page.keyboard.press("Tab")
        skip = tab.page.get_by_role("link", name="Skip to the content")
        assert await skip.evaluate("e => e === document.activeElement && e.getBoundingClientRect().left >= 0")
        await tab.page.keyboard.press("Enter")
        await tab.page.keyboard.press("Tab")
        assert await tab.page.get_by_label("Text").evaluate("e => e === document.activeElement")
        # A table that is wider than the window is scrolled without a mouse.
        table = tab.page.get_by_role("region", name="Transfers, table")
        while not await table.evaluate("e => e === document.activeElement"):
            await tab.page.keyboard.press("Tab")
        await tab.page.keyboard.press("ArrowRight")
        await table.evaluate("e => new Promise((done) => e.scrollLeft ? done() : e.addEventListener('scroll', done))")
        await tab.page.keyboard.press("Tab")
        await tab.page.keyboard.press("Enter")
        await tab.page.wait_for_url("**sort=name")


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


async def test_while_the_api_server_is_away_each_page_says_since_when_and_goes_on(scene: StatusScene) -> None:
    async with open_site(scene, signed_in=False) as site, visit(site.url) as tab:
        for path in _FACTS:
            await tab.open(path)
        banner = tab.page.get_by_text(re.compile(r"does not answer: .* what was seen at 2026-11-21 \d\d:\d\d:\d\d UTC"))
        scene.go_away()
        await banner.wait_for()
        for path in _FACTS:
            text = await tab.open(path)
            assert (path, await banner.count()) == (path, 1)
            assert _missing(path, text) == []
            assert (path, await tab.violations()) == (path, [])
        assert "The cluster is healthy" not in await tab.open("/")
        await tab.open("/transfers/dd/done")
        assert "Completed" in await tab.text()
        assert "could not be read: " in await tab.text()
        scene.kube.fulfill()
        await banner.wait_for(state="detached")
        await tab.page.get_by_text("History").wait_for()
        assert "could not be read" not in await tab.text()


async def test_when_the_command_has_ended_the_page_says_so(scene: StatusScene) -> None:
    async with AsyncExitStack() as server:
        site = await server.enter_async_context(open_site(scene, signed_in=False))
        async with visit(site.url) as tab:
            await tab.open("/queue")
            ended = tab.page.get_by_text("nodeagent ui has ended")
            assert not await ended.is_visible()
            await server.aclose()
            await ended.wait_for()


@pytest.mark.sample("all but the list of transfers")
@pytest.mark.parametrize(
    "denied",
    [
        "/pods /leases /daemonsets /backuprepositories /backupstoragelocations /datauploads/ /events",
        "/datauploads /datadownloads /podvolumebackups /podvolumerestores",
    ],
    ids=["all but the list of transfers", "transfers"],
)
async def test_each_page_names_missing_permissions_and_shows_the_rest(scene: StatusScene, denied: str) -> None:
    parts = denied.split()
    for part in parts:
        for method in ("GET", "WATCH"):
            scene.kube.fail_next(method, part, 403, message=f"you may not read {part}", times=99_999)
    async with open_site(scene, signed_in=False) as site, visit(site.url) as tab:
        overview = await tab.open("/")
        assert "The cluster is healthy" not in overview
        assert {part for part in parts if f"you may not read {part}" not in overview} <= {"/datauploads/", "/events"}
        for path in _FACTS:
            text = await tab.open(path)
            assert (path, "you may not read" in text) == (path, True)
            assert (path, await tab.violations()) == (path, [])


async def test_what_tenants_write_is_text_in_a_browser() -> None:
    scene = hostile_scene()
    async with open_site(scene, signed_in=False) as site, visit(site.url) as tab:
        for path in HOSTILE_PATHS:
            text = await tab.open(path)
            assert (path, HOSTILE in text) == (path, True)
            assert (path, await tab.page.locator("#live :is(script, img, style, iframe)").count()) == (path, 0)
        # The same text arrives again on a stream.
        scene.kube.put(transfer("DataUpload", "later", "Failed", message=HOSTILE))
        await tab.open("/transfers")
        scene.kube.put(transfer("DataUpload", "last", "Failed", message=HOSTILE))
        await tab.page.get_by_text("du/last").wait_for()
        assert await tab.page.evaluate("window.hacked") is None
        assert await tab.page.title() == "Transfers - node-agent"
        assert tab.faults == []


async def test_a_page_in_the_background_keeps_no_connection_until_it_is_seen(scene: StatusScene) -> None:
    """A browser opens six connections to a server at most."""
    async with open_site(scene, signed_in=False) as site, visit(site.url) as tab:
        streams: list[str] = []

        def note(request: Request) -> None:
            if request.url.endswith("/queue") and "event-stream" in request.headers.get("accept", ""):
                streams.append(request.url)

        tab.page.on("request", note)
        await tab.page.add_init_script("Object.defineProperty(document, 'hidden', { get: () => !window.seen });")
        await tab.open("/queue")
        # What the script of the page has put off comes before this.
        await tab.page.evaluate("new Promise((resume) => setTimeout(resume))")
        assert streams == []
        await tab.page.evaluate("window.seen = true; document.dispatchEvent(new Event('visibilitychange'))")
        scene.kube.put(transfer("DataUpload", "new"))
        await tab.page.get_by_text("du/new").wait_for()
        assert len(streams) == 1


async def test_rejected_edits_and_agents_that_differ_are_on_the_overview(scene: StatusScene) -> None:
    async with open_site(scene, signed_in=False) as site, visit(site.url) as tab:
        await tab.open("/")
        scene.put_agent("b", config="0123456789ab")
        row = tab.page.get_by_role("row").filter(has=tab.page.get_by_role("link", name="b", exact=True))
        await row.get_by_text(f"0123456789ab, not yet {DIGEST}").wait_for()
        scene.put_config('{"loadConcurrency": {"globalConfig": "many"}}')
        await tab.page.get_by_text("rejected: loadConcurrency.globalConfig").wait_for()
        await row.get_by_text("0123456789ab, since the ConfigMap cannot be used").wait_for()
        assert await tab.violations() == []


@pytest.mark.thorough
async def test_ten_thousand_transfers_on_five_hundred_nodes_are_shown_by_pages() -> None:
    async with open_site(crowded_scene(), signed_in=False) as site, visit(site.url) as tab:
        for path in CROWDED_PATHS:
            await tab.open(path)
            rows = await tab.page.locator("tr").count()
            assert (path, 1 < rows <= 400) == (path, True)
        assert "Page 1 of 100" in await tab.open("/transfers")
        assert "Page 2 of 100" in await tab.follow("Next page")
        await tab.open("/transfers?page=100")
        assert await tab.page.get_by_role("link", name="Next page").count() == 0
        await tab.open("/")
        assert "Page 1 of" in await tab.follow("Show all volumes")
        await tab.open("/")
        assert "Page 1 of 6" in await tab.follow("Show all nodes")
        assert "Page 6 of 6" in await tab.open("/?nodes=6")
        assert "Page 2 of" in await tab.open("/queue?page=2")
        assert tab.faults == []


async def test_five_questions_are_answered_within_two_clicks(scene: StatusScene) -> None:
    async with open_site(scene, signed_in=False) as site, visit(site.url) as tab:
        overview = await tab.open("/")
        # Is anything unprotected? What failed last night, and why?
        assert "1 of 3 volumes protected; 1 never backed up, 1 failing." in overview
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
