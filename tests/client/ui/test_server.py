"""The pages over HTTP: what they show, to whom, and what they say when the cluster does not answer."""

import asyncio
import re

import aiohttp
import pytest

from core.clock import SystemClock
from core.kube.resources import DATA_UPLOADS
from core.models.names import BANDWIDTH_ANNOTATION
from tests.client.support.busy_scene import busy_scene
from tests.client.support.site import open_site, running_site
from tests.client.support.status_scene import StatusScene, transfer
from tests.client.support.volumes_scene import put_volumes
from tests.nodeagent.support.maintenance_scene import repository_object

_PATHS = [
    "/",
    "/transfers",
    "/transfers/du/moving",
    "/nodes/a",
    "/queue",
    "/repositories",
    "/repositories/app-default-kopia",
]


async def test_the_page_of_a_transfer_says_to_what_its_bandwidth_is_limited(scene: StatusScene) -> None:
    for name, limits in (("limited", '{"downloadBytesPerSecond": 10485760}'), ("free", "{}")):
        raw = transfer("DataDownload", name, "InProgress")
        raw["metadata"]["annotations"][BANDWIDTH_ANNOTATION] = limits
        scene.kube.put(raw)
    async with open_site(scene) as site:
        assert "<dt>Limited to</dt><dd>10.0 MiB/s received</dd>" in (await site.get("/transfers/dd/limited"))[1]
        assert "Limited to" not in (await site.get("/transfers/dd/free"))[1]


async def test_the_page_of_a_repository_lists_its_maintenance(scene: StatusScene) -> None:
    """A run that succeeded has no message."""
    times = {"startTimestamp": "2026-11-21T10:00:00Z", "completeTimestamp": "2026-11-21T10:01:00Z"}
    runs = [{"result": "Failed", "message": "no space", **times}, {"result": "Succeeded", **times}]
    scene.kube.put(repository_object("other-default-kopia", recentMaintenance=runs))
    async with open_site(scene) as site:
        status, text = await site.get("/repositories/other-default-kopia")
    found = re.findall(r">(\w+)</span></td><td>([^<]*)<", text)
    assert (status, found) == (200, [("Succeeded", "-"), ("Failed", "no space")])


async def test_a_list_costs_no_request_and_one_object_those_for_itself() -> None:
    scene = busy_scene()
    kinds = re.compile("datauploads|datadownloads|podvolumebackups|podvolumerestores|repositories|locations|pods")
    async with open_site(scene, clock=SystemClock()) as site:

        async def count(path: str) -> int:
            before = len(scene.kube.requests)
            assert (await site.get(path))[0] == 200
            return sum(bool(kinds.search(one.path)) for one in scene.kube.requests[before:])

        wide = ("/?volumes=1", "/transfers?state=active&sort=node")
        lists = ("/", *wide, "/transfers", "/queue", "/nodes/a", "/repositories")
        assert [(path, await count(path)) for path in lists] == [(path, 0) for path in lists]
        assert 0 < await count("/transfers/du/moving") <= 3
        assert await count("/transfers/du/moving") == 0


async def test_the_history_is_read_once_and_where_it_may_not_be_the_page_says_why() -> None:
    async with open_site(busy_scene(), clock=SystemClock()) as site:
        sent = len(site.scene.kube.requests)
        pages = [(await site.get(path))[1] for path in ("/", "/volumes/app/data", "/volumes/app/logs")]
        assert sum("node-agent-history" in one.path for one in site.scene.kube.requests[sent:]) == 4
        assert [page.count('<svg viewBox="-10') for page in pages] == [3, 3, 3]
        assert (await site.get("/volumes/app/unknown"))[0] == 404
    scene = busy_scene()
    scene.kube.fail_next("GET", "/configmaps/node-agent-history", 403, message="you may not read it", times=99)
    async with open_site(scene) as site:
        status, text = await site.get("/volumes/app/data")
        assert (status, "The history of backups cannot be read: " in text, "not known" in text) == (200, True, True)
        assert "nightly-20261120" in text
        sent = len(scene.kube.requests)
        await site.get("/volumes/app/logs")
        assert not any("node-agent-history" in one.path for one in scene.kube.requests[sent:])


async def test_the_first_line_of_the_overview_says_whether_all_is_protected(scene: StatusScene) -> None:
    put_volumes(scene.kube)
    async with open_site(scene) as site:
        text = await site.until("/", "volumes protected")
        whole = (await site.get("/?volumes=1"))[1]
    first = re.search(r'<p class="summary">(.*?)</p>', text)
    assert first is not None
    sentence = "35 of 38 volumes protected; 1 never backed up, 1 failing, 1 stale; 2 left out on purpose"
    assert sentence in first[1]
    rows = re.findall(r'scope="row"><a href="/volumes/[^>]*>([^<]*)</a>', whole)
    assert rows[:3] == ["shop/data-07", "db/data-05", "app/data-03"]
    assert "fs-backup needs pod report-x to run and to mount it" in text
    assert "the last backup is 3d old: expected every 24h by schedule app-night" in text


@pytest.mark.parametrize("transfers", [True, False])
async def test_without_the_permission_to_list_pvcs_the_overview_is_not_green(transfers: bool) -> None:
    scene = StatusScene()
    if transfers:
        scene.put_transfers()
    scene.kube.fail_next("GET", "/persistentvolumeclaims", 403, message="forbidden", times=99)
    some = "PVCs cannot be read, so volumes that were never backed up are not known"
    async with open_site(scene) as site:
        await site.until("/", some if transfers else '<strong class="health unknown">no volumes are known</strong>')


async def test_events_that_carry_progress_are_not_shown_as_they_are(scene: StatusScene) -> None:
    (raw,) = [one for one in scene.kube.objects(DATA_UPLOADS) if one["metadata"]["name"] == "moving"]
    uid = raw["metadata"]["uid"]
    for reason, message in (("Data-Path-Progress", '{"doneBytes":1}'), ("Data-Path-Warning", "no progress for 15s")):
        about = {"kind": "DataUpload", "uid": uid, "namespace": "velero", "name": "moving"}
        times = {"lastTimestamp": "2026-11-21T11:59:00Z"}
        scene.put(
            "Event", reason.lower(), "v1", involvedObject=about, type="Normal", reason=reason, message=message, **times
        )
    async with open_site(scene) as site:
        text = (await site.get("/transfers/du/moving"))[1]
    assert "doneBytes" not in text
    assert text.count("no progress for 15s") == 2


async def test_without_a_quota_nothing_is_said_to_wait_for_it(scene: StatusScene) -> None:
    scene.put_config('{"loadConcurrency": {"globalConfig": 2}}')
    async with open_site(scene) as site:
        text = (await site.get("/queue"))[1]
    assert "There is no quota" in text
    assert "Who holds the quota" not in text


async def test_sizes_that_nothing_can_be_computed_with_break_no_page(scene: StatusScene) -> None:
    for name, total, done in (("huge", 2**63 - 1, 1), ("below", -5, -3)):
        progress = {"totalBytes": total, "bytesDone": done}
        times = {"startTimestamp": "2026-11-20T11:58:20Z", "acceptedTimestamp": "0001-01-01T00:00:00Z"}
        scene.kube.put(transfer("DataUpload", name, "InProgress", node="a", progress=progress, **times))
    async with open_site(scene) as site:
        for path in (*_PATHS, "/transfers/du/huge", "/transfers/du/below"):
            assert (path, (await site.get(path))[0]) == (path, 200)


async def test_only_the_browser_with_the_cookie_sees_anything(scene: StatusScene) -> None:
    """Another user of the machine reaches the port, but has neither token nor cookie."""
    async with open_site(scene) as site, aiohttp.ClientSession() as other:
        for path in (*_PATHS, "/static/style.css"):
            async with other.get(f"{site.base}{path}") as answer:
                assert answer.status == 403
                assert await answer.text() == "open the address that nodeagent ui printed; it works once"
        async with other.get(site.url) as answer:
            assert answer.status == 403
            assert "used before" in await answer.text()
        async with other.get(f"{site.base}/?token=guess") as answer:
            assert answer.status == 403
        async with site.browser.post(f"{site.base}/") as answer:
            assert answer.status == 405
    async with running_site(scene) as site, site.browser.get(site.url, allow_redirects=False) as answer:
        cookie = answer.headers["Set-Cookie"]
        assert re.match(r"nodeagent-ui-\d+=", cookie)
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert site.url.rpartition("=")[2] not in cookie


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("Host", "evil.example.com", 421),
        ("Host", "127.0.0.1", 421),
        ("Sec-Fetch-Site", "cross-site", 403),
        ("Sec-Fetch-Site", "same-site", 403),
        ("Sec-Fetch-Site", "same-origin", 200),
        ("Sec-Fetch-Site", "none", 200),
    ],
)
async def test_other_sites_and_names_are_refused(scene: StatusScene, header: str, value: str, status: int) -> None:
    async with open_site(scene) as site:
        assert (await site.get("/", **{header: value}))[0] == status


@pytest.mark.parametrize(
    "path", [*_PATHS, "/static/page.js", "/static/vendor/htmx.min.js", "/unknown", "/transfers/du/unknown"]
)
async def test_every_answer_has_the_headers_that_protect_it(scene: StatusScene, path: str) -> None:
    async with open_site(scene) as site, site.browser.get(f"{site.base}{path}") as answer:
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'; img-src 'self' data:;")
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in answer.headers
        text = await answer.text()
        assert not re.search(r"<[^>]+ (style|on\w+)=|<script>", text)
        assert answer.status == (404 if "unknown" in path else 200)


async def test_what_a_query_has_is_escaped(scene: StatusScene) -> None:
    async with open_site(scene) as site:
        text = (await site.get("/transfers?q=<script>&state=<script>"))[1]
    assert "&lt;script&gt;" in text
    assert "<script>" not in text


async def test_a_missing_permission_is_named_and_the_rest_is_shown(scene: StatusScene) -> None:
    scene.kube.fail_next("GET", "/backuprepositories", 403, message="may not list backuprepositories", times=999)
    async with open_site(scene) as site:
        text = (await site.get("/repositories"))[1]
        assert "Not known" in text
        assert "repositories" in text
        assert "None." not in text.partition("Storage locations")[0]
        assert "may not list backuprepositories" in (await site.get("/"))[1]
        assert "du/moving" in (await site.get("/transfers"))[1]


async def _next_event(stream: aiohttp.ClientResponse) -> str:
    async with asyncio.timeout(20):
        lines = []
        while (line := (await stream.content.readline()).decode()) != "\n":
            lines.append(line.removeprefix("data: "))
    return "".join(lines)


async def test_a_stream_has_what_changes_of_the_page_also_when_its_object_is_deleted(scene: StatusScene) -> None:
    async with open_site(scene) as site:
        headers = {"Accept": "text/html, text/event-stream"}
        async with site.browser.get(f"{site.base}/transfers", headers=headers) as stream:
            assert stream.content_type == "text/event-stream"
            first = await _next_event(stream)
            assert "du/moving" in first
            assert "<html" not in first
            assert "<form" not in first
            scene.kube.put(transfer("DataUpload", "another"))
            while "du/another" not in await _next_event(stream):
                pass
        async with site.browser.get(f"{site.base}/transfers/du/moving", headers=headers) as stream:
            assert "InProgress" in await _next_event(stream)
            await scene.client.delete(DATA_UPLOADS, "velero", "moving")
            while "DataUpload velero/moving does not exist" not in await _next_event(stream):
                pass


async def test_what_was_never_seen_cannot_be_read_while_the_cluster_does_not_answer(scene: StatusScene) -> None:
    async with open_site(scene) as site:
        scene.kube.fail_next("GET", "/", "lost", times=10_000)
        await site.until("/", "does not answer")
        status, text = await site.get("/transfers/du/unknown")
    assert (status, "This cannot be read: " in text) == (503, True)


async def test_before_the_cluster_was_read_a_page_says_so(scene: StatusScene) -> None:
    scene.kube.fail_next("GET", "/", "lost", times=10_000)
    async with running_site(scene) as site:
        async with site.browser.get(site.url, allow_redirects=False) as answer:
            assert answer.status == 303
        status, text = await site.get("/queue")
        assert status == 503
        assert "The cluster was not read yet" in text
        async with site.browser.get(f"{site.base}/queue", headers={"Accept": "text/event-stream"}) as stream:
            scene.kube.fulfill()
            assert "Who holds the quota" in await _next_event(stream)


async def test_while_the_cluster_was_not_read_a_stream_says_why(scene: StatusScene) -> None:
    scene.kube.fail_next("GET", "/leases/", 401, message="the token has expired", times=10_000)
    async with running_site(scene) as site:
        async with site.browser.get(site.url, allow_redirects=False) as answer:
            assert answer.status == 303
        async with site.browser.get(f"{site.base}/queue", headers={"Accept": "text/event-stream"}) as stream:
            text = await _next_event(stream)
            assert text.startswith("event: why\n")
            assert "the token has expired" in text
