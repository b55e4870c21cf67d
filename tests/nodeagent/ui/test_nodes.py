"""The slots of nodes, and what comes next on one."""

from nodeagent.operations.status.view import StatusView, build_view
from nodeagent.ui.nodes import build_grid, find_node
from tests.nodeagent.support.status_scene import StatusScene, transfer


async def _view(scene: StatusScene) -> StatusView:
    scene.put_transfers()
    return build_view(await scene.reader.read())


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
    view = await _view(scene)
    node = find_node(view, "b", frozenset({("PodVolumeBackup", "bound")}))
    assert node is not None
    assert [one.name for one in node.waiting] == ["bound"]
    assert [one.name for one in node.preparing] == ["ready"]
    assert find_node(view, "unknown", frozenset()) is None


async def test_free_slots_are_not_known_without_the_configuration() -> None:
    scene = StatusScene()
    scene.kube.fail_next("GET", "/configmaps/", 403, message="forbidden", times=99)
    grid = build_grid(await _view(scene))
    assert {one.free for one in grid.nodes} == {None}
    assert grid.columns == 1
