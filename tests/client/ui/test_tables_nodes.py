"""The slots of nodes, and what comes next on one."""

from collections.abc import Sequence

import pytest

from client.status.records import ClusterSnapshot
from client.status.view import StatusView, build_view
from client.ui.tables import build_grid, describe_configuration, find_node
from tests.client.support.status_scene import CONFIG, DIGEST, StatusScene, transfer


async def _read(scene: StatusScene) -> tuple[StatusView, ClusterSnapshot]:
    scene.put_transfers()
    snapshot = await scene.reader.read()
    return build_view(snapshot), snapshot


async def _view(scene: StatusScene) -> StatusView:
    return (await _read(scene))[0]


async def test_the_grid_has_what_runs_and_how_many_slots_are_free() -> None:
    grid = build_grid(await _view(StatusScene()))
    assert [one.row.node for one in grid.nodes] == ["a", "b"]
    assert (grid.columns, grid.others) == (2, 0)
    first, second = grid.nodes
    assert [one.name for one in first.running] == ["moving"]
    assert (first.free, second.free) == (1, 2)
    assert [one.name for one in second.preparing] == ["ready"]


async def test_only_some_of_many_nodes_are_in_the_grid_the_busy_ones_first() -> None:
    scene = StatusScene()
    for number in range(60):
        scene.put_agent(f"n{number:02}")
    grid = build_grid(await _view(scene))
    assert (len(grid.nodes), grid.others) == (50, 12)
    assert [one.row.node for one in grid.nodes[:2]] == ["a", "b"]


async def test_a_node_has_what_can_run_on_it_alone() -> None:
    scene = StatusScene()
    bound = transfer("PodVolumeBackup", "bound")
    bound["spec"]["node"] = "b"
    scene.kube.put(bound)
    view, snapshot = await _read(scene)
    node = find_node(view, snapshot.transfers, "b")
    assert node is not None
    assert [one.name for one in node.waiting] == ["bound"]
    assert [one.name for one in node.preparing] == ["ready"]
    assert find_node(view, snapshot.transfers, "unknown") is None


async def test_what_is_prepared_comes_in_the_order_in_which_it_gets_a_slot() -> None:
    scene = StatusScene()
    for name, phase, second in (("a-last", "Prepared", 9), ("b-accepted", "Accepted", 1), ("c-first", "Prepared", 2)):
        scene.kube.put(transfer("DataUpload", name, phase, node="b", acceptedTimestamp=f"2026-11-21T11:50:0{second}Z"))
    view, snapshot = await _read(scene)
    node = find_node(view, snapshot.transfers, "b")
    assert node is not None
    assert [one.name for one in node.preparing] == ["c-first", "a-last", "ready", "b-accepted"]


async def test_a_node_without_an_agent_is_shown_while_a_transfer_is_on_it() -> None:
    scene = StatusScene()
    scene.kube.put(transfer("DataUpload", "stranded", "InProgress", node="gone"))
    view, snapshot = await _read(scene)
    node = find_node(view, snapshot.transfers, "gone")
    assert node is not None
    assert [one.name for one in node.running] == ["stranded"]
    assert (node.row.pod, node.free) == ("", None)


async def test_without_permission_to_list_agents_any_node_may_exist() -> None:
    scene = StatusScene()
    scene.kube.fail_next("GET", "/pods", 403, message="forbidden", times=99)
    view, snapshot = await _read(scene)
    node = find_node(view, snapshot.transfers, "b")
    assert node is not None
    assert [one.name for one in node.preparing] == ["ready"]


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
async def test_each_agent_has_its_configuration(
    document: str, configs: Sequence[str], expected: list[tuple[str, bool]]
) -> None:
    scene = StatusScene()
    scene.put_config(document)
    for node, config in zip("abc", configs, strict=False):
        scene.put_agent(node, config=config)
    view = await _view(scene)
    rows = sorted(view.nodes, key=lambda row: row.node)
    assert [describe_configuration(row, view) for row in rows[: len(expected)]] == expected


async def test_whether_a_configuration_is_current_may_not_be_known() -> None:
    scene = StatusScene()
    scene.kube.fail_next("GET", "/configmaps/", 403, message="forbidden", times=99)
    view = await _view(scene)
    assert describe_configuration(view.nodes[0], view) == (f"{DIGEST}; whether it is current is not known", False)


async def test_free_slots_are_not_known_without_the_configuration() -> None:
    scene = StatusScene()
    scene.kube.fail_next("GET", "/configmaps/", 403, message="forbidden", times=99)
    grid = build_grid(await _view(scene))
    assert {one.free for one in grid.nodes} == {None}
    assert grid.columns == 1
