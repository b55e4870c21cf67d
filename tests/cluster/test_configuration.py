"""An edited configuration applies to transfers that start later; a running one keeps its own."""

import json

import pytest

from core.kube.resources import CONFIG_MAPS, EVENTS, PODS, PRIORITY_CLASSES
from tests.cluster.bed import Bed
from tests.cluster.configuration import ONE_SLOT, build_concurrency, configured
from tests.cluster.gate import HELD_BYTES
from tests.cluster.scenes import Place, open_gated_place, wait_released, wait_until
from tests.cluster.workloads import Workload, back_up, find_mover, wait_held
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.install import AGENT_LABEL
from tests.testbed.processes import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="changing"), pytest.mark.timeout(1800)]

_NAME, _KEY = "node-agent-config", "node-agent-config.json"


def _edit_invalidly(bed: Bed) -> None:
    """Write an invalid document; return once all agents have reported that they reject it."""
    invalid = {_KEY: '{"podLabels": ["edited"], "priorityClassName": "system-node-critical"}'}
    bed.user.apply(build_object(CONFIG_MAPS, _NAME, NAMESPACE, data=invalid))
    agents = len(bed.api.objects(PODS, NAMESPACE, selector=AGENT_LABEL))

    def count() -> int:
        return sum(event["reason"] == "ConfigRejected" for event in _events_of_agents(bed))

    wait_for("every agent to reject the invalid configuration", lambda: count() >= agents)


def _events_of_agents(bed: Bed) -> list[Json]:
    names = {pod["metadata"]["name"] for pod in bed.api.objects(PODS, NAMESPACE, selector=AGENT_LABEL)}
    return [e for e in bed.api.objects(EVENTS, NAMESPACE) if e["involvedObject"]["name"] in names]


def test_a_running_transfer_keeps_its_configuration_and_a_later_one_has_the_last_valid_one(
    agent: Bed, space: str
) -> None:
    """The configuration is edited twice while a backup is held: validly, then invalidly; then another one begins."""
    priority_class = f"{space}-mover"
    agent.user.apply(build_object(PRIORITY_CLASSES, priority_class, value=7, preemptionPolicy="Never"))
    with open_gated_place(agent, space) as (gate, place):
        filled = {"data": 2 * HELD_BYTES, "scratch": 100_000}
        app = Workload(agent, space, "app", filled, on=ONE_SLOT, location=place.name)
        app.start()
        app.wait_ready()
        gate.shut()
        first, second = app.backup("data"), app.backup("scratch")
        agent.user.apply(first)
        wait_held(agent, gate, first)
        before = find_mover(agent, first)
        changes = {"priorityClassName": priority_class, "podLabels": {"example.com/edited": "yes"}}
        # With one slot, which the first has, the second stays Prepared.
        with configured(agent, loadConcurrency=build_concurrency(one_slot=ONE_SLOT), **changes):
            _edit_invalidly(agent)
            agent.user.apply(second)
            wait_until(agent, second, "Prepared")
            after, mover = find_mover(agent, first), find_mover(agent, second)
            gate.open()
            for item in (first, second):
                wait_until(agent, item, "Completed")
            reasons = {event["reason"] for event in _events_of_agents(agent)}
        for item in (first, second):
            wait_released(agent, item)
    assert before["metadata"]["uid"] == after["metadata"]["uid"]
    assert after["spec"] == before["spec"]
    assert "priorityClassName" not in after["spec"]
    assert mover["metadata"]["labels"]["example.com/edited"] == "yes"
    assert (mover["spec"]["priorityClassName"], mover["spec"]["priority"]) == (priority_class, 7)
    assert mover["spec"]["preemptionPolicy"] == "Never"
    assert reasons >= {"ConfigActivated", "ConfigRejected"}
    document = (agent.api.get(CONFIG_MAPS, NAMESPACE, _NAME) or {})["data"][_KEY]
    assert "priorityClassName" not in document
    app.delete(wait=False)
    agent.user.kubectl("delete", "priorityclass", priority_class)


def test_a_limit_is_on_the_transfer_and_its_end_reaches_the_running_mover(agent: Bed, space: str) -> None:
    name, rate = f"{space}-limited", 100_000
    app = Workload(agent, space, "limited", {"data": 80 * rate}, location=name)
    agent.user.apply(*Place(agent, name).build())
    app.start()
    app.wait_ready()
    limit = {"perLocation": {name: {"uploadBytesPerSecond": rate}}}
    with configured(agent, **{"nodeagent.io": {"bandwidth": limit}}):
        item = back_up(app, "data")
        wait_until(agent, item, "InProgress", when=lambda each: _limits(each) == {"uploadBytesPerSecond": rate})
        with configured(agent, **{"nodeagent.io": {"bandwidth": {}}}):
            wait_until(agent, item, "InProgress", when=lambda each: _limits(each) == {})
            wait_released(agent, item, "Completed")
    app.delete(wait=False)


def _limits(transfer: Json) -> object:
    return json.loads(transfer["metadata"].get("annotations", {}).get("nodeagent.io/bandwidth", "null"))
