"""The rows of the pages: which transfers, in which order, on which page; the copies of volumes, the slots of nodes."""

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from client.status.records import ClusterSnapshot, TransferRecord
from client.status.view import StatusView, build_view
from client.ui import tables
from client.ui.tables import PAGE_ROWS, TransferFilter, cut, find_node, list_volumes, parse_page
from core.models.names import ATTEMPTS_ANNOTATION
from core.models.phases import Phase
from core.models.verification import Verification, VerificationOutcome
from nodeagent.coverage.states import CoverageState, VolumeCoverage
from tests.client.support.status_scene import CONFIG, DIGEST, StatusScene, transfer

_NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def _record(name: str, phase: Phase = Phase.NEW, hour: int = 1, **more: object) -> TransferRecord:
    values: dict[str, object] = {"kind": "DataUpload", "namespace": "velero", "name": name, "phase": phase}
    values |= {"queue": "app", "volume": "data", "created": f"2026-11-21T{hour:02}:00:00Z"}
    if phase is Phase.COMPLETED:
        values["completed"] = _NOON.replace(hour=hour)
    return TransferRecord(**values | more)  # type: ignore[arg-type]


def _names(chosen: TransferFilter, *records: TransferRecord) -> list[str]:
    snapshot = ClusterSnapshot("velero", _NOON, transfers=records)
    return [one.name for one in tables.choose_transfers(snapshot, build_view(snapshot), chosen).cut.rows]


def _verified(hour: int, outcome: VerificationOutcome = VerificationOutcome.PASSED) -> Verification:
    return Verification(at=_NOON.replace(hour=hour), outcome=outcome)


_DAMAGED = _verified(11, VerificationOutcome.FAILED)
_RECORDS = (
    _record("new", hour=4),
    _record("moving", Phase.IN_PROGRESS, 3, node="b"),
    _record("failed", Phase.FAILED, 2, node="a"),
    _record("done", Phase.COMPLETED, 1, kind="DataDownload", volume="x"),
)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({}, ["new", "moving", "failed", "done"]),
        ({"state": "active"}, ["new", "moving"]),
        ({"state": "pending"}, ["new"]),
        ({"state": "running"}, ["moving"]),
        ({"state": "failed"}, ["failed"]),
        ({"state": "ended"}, ["failed", "done"]),
        ({"kind": "DataDownload"}, ["done"]),
        ({"q": "APP/x"}, ["done"]),
        ({"q": "nothing"}, []),
        ({"sort": "name"}, ["done", "failed", "moving", "new"]),
        ({"sort": "node"}, ["done", "new", "failed", "moving"]),
        ({"sort": "odd", "state": "odd", "kind": "odd", "page": "-1"}, ["new", "moving", "failed", "done"]),
    ],
)
def test_a_query_chooses_and_sorts(query: dict[str, str], names: list[str]) -> None:
    assert _names(TransferFilter.of(query), *_RECORDS) == names


def test_a_page_has_a_hundred_rows_and_the_last_one_the_rest() -> None:
    records = [_record(f"t-{number:03}") for number in range(PAGE_ROWS + 5)]
    chosen = TransferFilter.of({"sort": "name"})
    assert len(_names(chosen, *records)) == PAGE_ROWS
    for page in ("2", "9", "1000000"):
        names = _names(TransferFilter.of({"sort": "name", "page": page}), *records)
        assert names[0] == ("t-000" if page == "1000000" else "t-100")
    assert (cut(records, 9).page, cut(records, 9).pages, cut(records, 9).total) == (2, 2, PAGE_ROWS + 5)
    assert (cut([], 1).rows, cut([], 1).pages) == ([], 1)


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "²", "1000000", "9" * 5000])
def test_an_invalid_number_of_a_page_counts_as_the_first(text: str) -> None:
    assert (parse_page(text), parse_page("999999")) == (1, 999_999)


def test_a_link_has_what_is_not_the_default() -> None:
    chosen = TransferFilter(state="failed", text="a b", page=3)
    assert chosen.link(page=4) == "?state=failed&q=a+b&page=4"
    assert TransferFilter().link() == ""


def test_volumes_that_need_attention_come_first() -> None:
    records = [
        _record("old", Phase.COMPLETED, 2, volume="old"),
        _record("older-failed", Phase.FAILED, 1, volume="fresh"),
        _record("fresh", Phase.COMPLETED, 9, volume="fresh"),
        _record("good", Phase.COMPLETED, 3, volume="broken"),
        _record("bad", Phase.FAILED, 5, volume="broken"),
        _record("never", Phase.FAILED, 5, volume="never"),
        _record("restored", Phase.COMPLETED, 6, kind="DataDownload", volume="never"),
        _record("damaged", Phase.COMPLETED, 9, volume="damaged", verification=_DAMAGED),
        _record("before", Phase.COMPLETED, 2, volume="before", verification=_DAMAGED),
        _record("after", Phase.COMPLETED, 8, volume="before"),
    ]
    rows = list_volumes(records)
    found = [(row.volume, row.last and row.last.name, row.failed and row.failed.name) for row in rows]
    assert found == [
        ("never", None, "never"),
        ("before", "after", None),
        ("damaged", "damaged", None),
        ("old", "old", None),
        ("broken", "good", "bad"),
        ("fresh", "fresh", None),
    ]
    assert [row.urgent for row in rows] == [True] * 3 + [False] * 3


def test_rows_follow_the_states_of_volumes_and_those_without_a_pvc_are_last() -> None:
    states = [
        VolumeCoverage(namespace="app", volume=name, state=CoverageState(state), reason="why", overdue=True)
        for name, state in (("new", "never-backed-up"), ("old", "stale"), ("fine", "protected"), ("skip", "left-out"))
    ]
    records = [
        _record("gone", Phase.COMPLETED, 2, volume="gone"),
        _record("pvb", Phase.COMPLETED, 3, kind="PodVolumeBackup", volume="web-0:v", claim="fine"),
        _record("du", Phase.COMPLETED, 1, volume="old"),
    ]
    rows = list_volumes(records, states)
    found = [(row.volume, row.last and row.last.name, row.state and str(row.state.state), row.urgent) for row in rows]
    assert found == [
        ("new", None, "never-backed-up", True),
        ("old", "du", "stale", True),
        ("fine", "pvb", "protected", False),
        ("skip", None, "left-out", False),
        ("gone", "gone", None, False),
    ]


def test_the_verification_of_an_older_copy_is_not_that_of_the_last_one() -> None:
    old = _record("old", Phase.COMPLETED, 2, verification=_verified(5))
    (row,) = list_volumes([old, _record("last", Phase.COMPLETED, 4)])
    assert (row.last and row.last.name, row.verified, row.earlier) == ("last", None, _verified(5))
    (row,) = list_volumes([old, _record("last", Phase.COMPLETED, 4, verification=_verified(6))])
    assert (row.verified, row.earlier) == (_verified(6), None)
    (row,) = list_volumes([old, _record("last", Phase.COMPLETED, 4, verification=_verified(5))])
    assert (row.verified, row.earlier) == (_verified(5), None)
    bad = _record("bad", Phase.COMPLETED, 3, verification=_verified(5, VerificationOutcome.FAILED))
    (row,) = list_volumes([bad, old, _record("last", Phase.COMPLETED, 4, verification=_verified(5))])
    assert (row.earlier, row.urgent) == (bad.verification, True)


async def _read(scene: StatusScene) -> tuple[StatusView, ClusterSnapshot]:
    scene.put_transfers()
    snapshot = await scene.reader.read()
    return build_view(snapshot), snapshot


async def _grid(scene: StatusScene) -> tables.SlotGrid:
    view, snapshot = await _read(scene)
    return tables.build_grid(view, {(one.kind, one.name) for one in snapshot.transfers if one.moving})


async def _node(scene: StatusScene, name: str) -> tables.GridRow:
    view, snapshot = await _read(scene)
    node = find_node(view, snapshot.transfers, name)
    assert node is not None
    return node


async def test_the_grid_has_what_runs_and_how_many_slots_there_are() -> None:
    grid = await _grid(StatusScene())
    assert [one.row.node for one in grid.nodes] == ["a", "b"]
    assert (grid.columns, grid.others) == (2, 0)
    first, second = grid.nodes
    assert [one.name for one in first.running] == ["moving"]
    assert (first.row.slots, second.row.slots) == (2, 2)
    assert [one.name for one in second.preparing] == ["ready"]


async def test_only_some_of_many_nodes_are_in_the_grid_the_busy_ones_first() -> None:
    scene = StatusScene()
    for number in range(60):
        scene.put_agent(f"n{number:02}")
    grid = await _grid(scene)
    assert (len(grid.nodes), grid.others) == (50, 12)
    assert [one.row.node for one in grid.nodes[:2]] == ["a", "b"]


async def test_a_node_has_what_can_run_on_it_alone() -> None:
    scene = StatusScene()
    bound = transfer("PodVolumeBackup", "bound")
    bound["spec"]["node"] = "b"
    scene.kube.put(bound)
    node = await _node(scene, "b")
    assert [one.name for one in node.waiting] == ["bound"]
    assert [one.name for one in node.preparing] == ["ready"]
    view, snapshot = await _read(scene)
    assert find_node(view, snapshot.transfers, "unknown") is None


async def test_what_is_prepared_comes_in_the_order_in_which_it_gets_a_slot() -> None:
    scene = StatusScene()
    for name, phase, second in (("a-last", "Prepared", 9), ("b-accepted", "Accepted", 1), ("c-first", "Prepared", 2)):
        scene.kube.put(transfer("DataUpload", name, phase, node="b", acceptedTimestamp=f"2026-11-21T11:50:0{second}Z"))
    node = await _node(scene, "b")
    assert [one.name for one in node.preparing] == ["c-first", "a-last", "ready", "b-accepted"]


async def test_an_attempt_whose_data_mover_is_prepared_has_no_slot() -> None:
    scene = StatusScene()
    again = transfer("DataUpload", "again", "InProgress", node="b", acceptedTimestamp="2026-11-21T11:50:00Z")
    again["metadata"]["annotations"][ATTEMPTS_ANNOTATION] = '{"number": 2, "stage": "Exposing"}'
    scene.kube.put(again)
    (second,) = (one for one in (await _grid(scene)).nodes if one.row.node == "b")
    assert (second.row.running, second.row.preparing, second.running) == (0, 2, [])
    assert {one.name for one in second.preparing} == {"again", "ready"}
    assert [one.name for one in (await _node(scene, "b")).preparing] == ["again", "ready"]


_KEPT = (f"{DIGEST}, since the ConfigMap cannot be used", False)
_OLD = "0123456789ab"


@pytest.mark.parametrize(
    ("document", "configs", "expected"),
    [
        (CONFIG, (DIGEST, _OLD, ""), [(DIGEST, True), (f"{_OLD}, not yet {DIGEST}", False), ("not known", False)]),
        ("{", (DIGEST,), [_KEPT]),
        ('{"loadConcurrency": {"globalConfig": "many"}}', (DIGEST,), [_KEPT]),
    ],
    ids=["differs", "no JSON", "rejected"],
)
async def test_each_has_its_configuration(
    document: str, configs: Sequence[str], expected: list[tuple[str, bool]]
) -> None:
    scene = StatusScene()
    scene.put_config(document)
    for node, config in zip("abc", configs, strict=False):
        scene.put_agent(node, config=config)
    view, _ = await _read(scene)
    rows = sorted(view.nodes, key=lambda row: row.node)
    assert [tables.describe_configuration(row, view) for row in rows[: len(expected)]] == expected


async def test_slots_and_configurations_are_not_known_without_permission() -> None:
    scene = StatusScene()
    scene.kube.fail_next("GET", "/configmaps/", 403, message="forbidden", times=99)
    view, _ = await _read(scene)
    current = (f"{DIGEST}; whether it is current is not known", False)
    assert tables.describe_configuration(view.nodes[0], view) == current
    grid = await _grid(scene)
    assert ({one.row.slots for one in grid.nodes}, grid.columns) == ({None}, 1)


async def test_a_node_without_an_agent_is_shown_while_a_transfer_is_on_it() -> None:
    scene = StatusScene()
    scene.kube.put(transfer("DataUpload", "stranded", "InProgress", node="gone"))
    node = await _node(scene, "gone")
    assert ([one.name for one in node.running], node.row.pod, node.row.slots) == (["stranded"], "", None)
    # Without the permission to list agents, any node may exist.
    scene.kube.fail_next("GET", "/pods", 403, message="forbidden", times=99)
    assert [one.name for one in (await _node(scene, "b")).preparing] == ["ready"]
