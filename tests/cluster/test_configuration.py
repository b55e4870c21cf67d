"""An edited configuration is in force for loads that start later, and what runs stays as it began."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.cluster.configuration import ONE_SLOT, build_concurrency, configured
from tests.cluster.gate import HELD_BYTES
from tests.cluster.scenes import open_gated_place, wait_released
from tests.cluster.workloads import BACKUPS, Workload, find_mover, wait_held, wait_until
from tests.testbed.api import Resource
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.demonstration.user import PODS
from tests.testbed.install import AGENT_LABEL
from tests.testbed.processes import BedError
from tests.testbed.storage.objects import CONFIG_MAPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.conftest import Bed
    from tests.testbed.api import Json

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="changing"), pytest.mark.timeout(400)]

_EVENTS = Resource("/api/v1", "events")
_NAME, _KEY = "node-agent-config", "node-agent-config.json"
_SECONDS = 60


@dataclass
class Seen:
    """What became of two backups, one that ran while the configuration was edited and one that came after.

    Attributes:
        priority_class: What the edited configuration names.
        pods: Their movers; of the first as it was before the edit and after it.
        ended: The two, as they ended.
        told: Reasons of the Events on the agents' pods.
    """

    priority_class: str
    pods: dict[str, Json]
    ended: list[Json]
    told: set[str]


@pytest.fixture(scope="module")
def seen(agent: Bed, module_space: str) -> Iterator[Seen]:
    """Edit the configuration twice while a backup is held in mid-transfer: well, then badly; then back up again."""
    priority_class = f"{module_space}-mover"
    metadata = {"name": priority_class}
    body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": metadata}
    agent.user.apply(body | {"value": 7, "preemptionPolicy": "Never"})
    with open_gated_place(agent, module_space) as (gate, place):
        filled = {"data": 2 * HELD_BYTES, "scratch": 100_000}
        app = Workload(agent, module_space, "app", filled, on=ONE_SLOT, location=place.name)
        app.start()
        app.wait_ready()
        gate.shut()
        first, second = app.backup("data"), app.backup("scratch")
        agent.user.apply(first)
        wait_held(agent, gate, first)
        pods = {"before": find_mover(agent, first)}
        changes = {"priorityClassName": priority_class, "podLabels": {"example.com/edited": "yes"}}
        # With one slot, which the first has, the second stays Prepared.
        with configured(agent, loadConcurrency=build_concurrency(one_slot=ONE_SLOT), **changes):
            _edit_badly(agent)
            agent.user.apply(second)
            wait_until(agent, BACKUPS, second, "Prepared")
            pods |= {"after": find_mover(agent, first), "second": find_mover(agent, second)}
            gate.open()
            ended = [wait_until(agent, BACKUPS, item, "Completed") for item in (first, second)]
            told = {event["reason"] for event in _events_of_agents(agent)}
        yield Seen(priority_class, pods, ended, told)
        wait_released(agent, BACKUPS, [item["metadata"]["name"] for item in (first, second)])
    app.delete(wait=False)
    agent.user.kubectl("delete", "priorityclass", priority_class)


def _edit_badly(bed: Bed) -> None:
    """Write a document with a mistake; returns once both agents have said that they refuse it."""
    bad = {_KEY: '{"podLabels": ["edited"], "priorityClassName": "system-node-critical"}'}
    metadata = {"namespace": NAMESPACE, "name": _NAME}
    bed.user.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": bad})
    agents = len(bed.api.objects(PODS, NAMESPACE, selector=AGENT_LABEL))
    deadline = time.monotonic() + _SECONDS
    while len([event for event in _events_of_agents(bed) if event["reason"] == "ConfigRejected"]) < agents:
        if time.monotonic() > deadline:
            raise BedError("not every agent has refused the bad configuration")
        time.sleep(0.1)


def _events_of_agents(bed: Bed) -> list[Json]:
    names = {pod["metadata"]["name"] for pod in bed.api.objects(PODS, NAMESPACE, selector=AGENT_LABEL)}
    return [e for e in bed.api.objects(_EVENTS, NAMESPACE) if e["involvedObject"]["name"] in names]


def test_a_running_load_is_left_alone(seen: Seen) -> None:
    before, after = seen.pods["before"], seen.pods["after"]
    assert before["metadata"]["uid"] == after["metadata"]["uid"]
    assert after["spec"] == before["spec"]
    assert "priorityClassName" not in after["spec"]
    assert seen.ended[0]["status"]["phase"] == "Completed"


def test_a_later_load_has_the_last_good_configuration(seen: Seen) -> None:
    mover = seen.pods["second"]
    assert mover["metadata"]["labels"]["example.com/edited"] == "yes"
    spec = mover["spec"]
    assert (spec["priorityClassName"], spec["priority"]) == (seen.priority_class, 7)
    assert spec["preemptionPolicy"] == "Never"
    assert seen.ended[1]["status"]["phase"] == "Completed"


def test_each_edit_is_told_on_the_agents_pods(seen: Seen) -> None:
    assert seen.told >= {"ConfigActivated", "ConfigRejected"}


def test_the_document_is_as_it_was_before(agent: Bed, seen: Seen) -> None:
    document = (agent.api.get(CONFIG_MAPS, NAMESPACE, _NAME) or {})["data"][_KEY]
    assert "priorityClassName" not in document
