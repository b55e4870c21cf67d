"""Whatever keeps a load from going on is told on it within seconds, in the words of whoever knows.

All causes are brought about at the same time, on the real scheduler and kubelet, once for all
tests here; then what can heal is healed.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from tests.bed.demonstration.manifests import NAMESPACE, build_snapshot
from tests.bed.demonstration.user import PODS
from tests.bed.processes import BedError
from tests.bed.storage.objects import EVENTS
from tests.cluster.breakage import (
    break_storage,
    build_mover,
    build_pod_volume_load,
    build_target,
    build_waiting_pod,
    tainted,
)
from tests.cluster.cause_cases import AWAY, CASES, HELD, OPEN, Case
from tests.cluster.listing import everything
from tests.cluster.scenes import DOWNLOADS, UPLOADS, Place, Volume, follow, wait_released
from tests.cluster.workloads import BACKUPS, RESTORES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.mark.structures import ParameterSet

    from tests.bed.api import Json
    from tests.cluster.conftest import Bed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

_PROMISED = timedelta(seconds=10)
_PERMANENT = timedelta(seconds=30)
_ROUNDING = timedelta(seconds=2)
"""Both ends of a span are told in whole seconds."""

_RESOURCES = {
    "DataUpload": UPLOADS,
    "DataDownload": DOWNLOADS,
    "PodVolumeBackup": BACKUPS,
    "PodVolumeRestore": RESTORES,
}
_PLACES = (OPEN, HELD, AWAY)
_UNAVAILABLE = {"phase": "Unavailable", "message": "the bucket was taken away"}
_TELL_SECONDS = 120
_HEAL_SECONDS = 150


@dataclass
class Told:
    """What became of all loads.

    Attributes:
        space: The namespace of their volume.
        versions: Each load as it was when its message named its cause.
        events: Those of the agent's namespace, once all causes were told.
        healed: Loads as they ended, whose cause was healed.
        left: All objects that are new since before.
    """

    space: str
    versions: dict[str, Json] = field(default_factory=dict)
    events: list[Json] = field(default_factory=list)
    healed: dict[str, Json] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)


@pytest.fixture(scope="module")
def told(agent: Bed, module_space: str) -> Iterator[Told]:
    """Every cause at the same time, until each was told; then healed, or its load canceled."""
    volume = Volume(agent, module_space)
    result = Told(module_space)
    with ExitStack() as broken:
        broken.enter_context(break_storage(agent, _faults(module_space)))
        before = _prepare(volume)
        broken.enter_context(tainted(agent))
        since = {kind: agent.api.snapshot(resource)[1] for kind, resource in _RESOURCES.items()}
        agent.user.apply(*(_build_load(volume, name, case) for name, case in CASES.items()))
        _place_movers(agent)
        agent.user.apply(*_locations(agent, OPEN, HELD))
        for kind in _RESOURCES:
            result.versions |= _wait_told(agent, kind, module_space, since=since[kind])
        result.events = agent.api.objects(EVENTS, NAMESPACE)
    _end(agent, result)
    result.left = everything(agent, NAMESPACE, module_space) - before
    yield result
    _remove(agent, module_space)


def _faults(space: str) -> Iterator[tuple[str, str, str]]:
    """What goes wrong with the storage."""
    for name, case in CASES.items():
        if case.fault:
            yield "provision", f"{NAMESPACE}/{name}", case.fault
        if case.snapshot:
            yield "snapshot", f"{space}/{name}", case.snapshot


def _locations(bed: Bed, *available: str) -> Iterator[Json]:
    """The storage locations, of which some are available and the others not."""
    for name in _PLACES:
        secret, location = Place(bed, name).build()
        usable = name in available
        location["status"] = {"phase": "Available", "message": ""} if usable else _UNAVAILABLE
        yield from (secret, location)


def _prepare(volume: Volume) -> set[str]:
    """Make what the loads need, as far as they shall have it; returns all objects that there are then."""
    bed, space = volume.bed, volume.namespace
    volume.fill("open('/data/file', 'wb').write(bytes(range(256)) * 256)")
    uploads = {name: case for name, case in CASES.items() if case.kind == "DataUpload"}
    faulty = [name for name, case in uploads.items() if case.snapshot]
    bed.user.apply(*(build_snapshot(space, name, claim=volume.claim) for name in faulty))
    repositories = [Place(bed, name).repository(space) for name in (OPEN, HELD)]
    bed.user.apply(*_locations(bed, OPEN, HELD), *repositories)
    volume.take_snapshots(uploads.keys() - set(faulty))
    for each in repositories:
        name = f"backuprepository/{each['metadata']['name']}"
        bed.user.wait(name, "jsonpath={.status.phase}=Ready", namespace=NAMESPACE)
    targets = {name: case for name, case in CASES.items() if case.kind == "DataDownload" and not case.source}
    bed.user.apply(*(build_target(volume, name, storage_class=case.storage_class) for name, case in targets.items()))
    bed.user.apply(build_waiting_pod(space, "pending"), *_locations(bed, OPEN))
    return everything(bed, NAMESPACE, space)


def _build_load(volume: Volume, name: str, case: Case) -> Json:
    if case.kind == "DataUpload":
        load = volume.upload(name, snapshot=name, location=case.place)
        load["spec"]["sourcePVC"] = case.source or volume.claim
        load["spec"]["csiSnapshot"]["storageClass"] = case.storage_class or "bed"
        return load
    if case.kind == "DataDownload":
        load = volume.download(name, snapshot_id="0", location=case.place)
        load["spec"]["targetVolume"]["pvc"] = case.source or name
        return load
    pod = volume.bed.api.get(PODS, volume.namespace, case.source or "pending")
    uid = pod["metadata"]["uid"] if pod else "0"
    ref = {"namespace": volume.namespace, "name": case.source or "pending", "uid": uid}
    return build_pod_volume_load(case.kind, name, pod=ref, location=case.place)


def _place_movers(bed: Bed) -> None:
    """Make the broken mover pods of loads that nobody has accepted yet."""
    pods = []
    node = bed.user.names(["nodes"])[0].partition("/")[2]
    for name, case in CASES.items():
        if case.pod is None:
            continue
        load = bed.api.get(_RESOURCES[case.kind], NAMESPACE, name)
        assert load is not None
        assert load.get("status", {}).get("phase", "") in {"", "New"}
        bound = {"nodeName": node} if case.bound else {}
        pod = build_mover(load, spec={**case.pod, **bound}, container=case.container)
        if case.foreign:
            del pod["metadata"]["ownerReferences"], pod["metadata"]["labels"]
        pods.append(pod)
    bed.user.apply(*pods)


def _wait_told(bed: Bed, kind: str, space: str, *, since: str) -> dict[str, Json]:
    """Wait until the message of each load of a kind names its cause; returns the loads as they were then."""
    wanted = {
        name: re.compile(case.told.format(name=name, space=space)) for name, case in CASES.items() if case.kind == kind
    }
    found: dict[str, Json] = {}
    last: dict[str, str] = {}
    for event in bed.api.watch(_RESOURCES[kind], since, seconds=_TELL_SECONDS):
        load = event["object"]
        name, message = load["metadata"]["name"], load.get("status", {}).get("message", "")
        if name not in wanted or name in found:
            continue
        last[name] = message
        if wanted[name].search(message):
            found[name] = load
        if found.keys() == wanted.keys():
            return found
    raise BedError(f"never told: { {name: last.get(name) for name in wanted.keys() - found.keys()} }")


def _end(bed: Bed, result: Told) -> None:
    """Wait for the loads that heal, and cancel those that do not."""
    stuck = [name for name, case in CASES.items() if not case.heals and not case.permanent]
    for name in stuck:
        bed.api.patch(_RESOURCES[CASES[name].kind], {"spec": {"cancel": True}}, name=name, namespace=NAMESPACE)
    for kind, resource in _RESOURCES.items():
        names = [name for name, case in CASES.items() if case.kind == kind]
        for load in follow(bed, resource, names, seconds=_HEAL_SECONDS):
            result.healed[load["metadata"]["name"]] = load
        wait_released(bed, resource, names)


def _remove(bed: Bed, space: str) -> None:
    names = [f"{case.kind}/{name}" for name, case in CASES.items()]
    names += [f"backupstoragelocation.velero.io/{name}" for name in _PLACES]
    names += [f"secret/{name}-keys" for name in _PLACES]
    names += [f"backuprepository.velero.io/{space}-{name}-kopia" for name in (OPEN, HELD)]
    names += [f"pod/{name}" for name, case in CASES.items() if case.foreign]
    bed.user.kubectl("delete", "-n", NAMESPACE, "--ignore-not-found", "--wait=false", *names)


def _params(*, permanent: bool | None = None, heals: bool | None = None) -> list[ParameterSet]:
    """The cases of some nature."""
    return [
        pytest.param(name, marks=pytest.mark.cause(name))
        for name, case in CASES.items()
        if permanent in {None, case.permanent} and heals in {None, case.heals}
    ]


def _time(event: Json) -> datetime:
    """When an Event was seen first, in whole seconds."""
    text = event.get("firstTimestamp") or event["eventTime"]
    return datetime.fromisoformat(text).replace(microsecond=0)


def _first(told: Told, name: str, reason: str, *, about_load: bool) -> Json:
    """The first Event with a reason about a load, or about its pod or claim."""
    kind = CASES[name].kind
    events = [
        event
        for event in told.events
        if event["involvedObject"]["name"] == name
        and event["reason"] == reason
        and (event["involvedObject"]["kind"] == kind) is about_load
    ]
    assert events, [
        (e["involvedObject"]["kind"], e["reason"]) for e in told.events if e["involvedObject"]["name"] == name
    ]
    return min(events, key=_time)


@pytest.mark.parametrize("name", _params())
def test_the_message_and_an_event_tell_the_cause_soon_after_the_cluster_shows_it(told: Told, name: str) -> None:
    case, load = CASES[name], told.versions[name]
    said = _first(told, name, case.reason, about_load=True)
    began = load["status"].get("acceptedTimestamp") or load["metadata"]["creationTimestamp"]
    since = datetime.fromisoformat(began)
    if case.visible:
        since = max(since, _time(_first(told, name, case.visible, about_load=False)))

    assert re.search(case.told.format(name=name, space=told.space), said["message"])
    assert said["type"] == ("Normal" if case.expected else "Warning")
    assert _time(said) - since <= _PROMISED + _ROUNDING


@pytest.mark.parametrize("name", _params(permanent=True))
def test_a_permanent_cause_ends_the_load_soon(told: Told, name: str) -> None:
    load = told.healed[name]
    status = load["status"]
    assert status["phase"] == "Failed"
    began = status.get("acceptedTimestamp") or load["metadata"]["creationTimestamp"]
    assert datetime.fromisoformat(status["completionTimestamp"]) - datetime.fromisoformat(began) <= _PERMANENT


@pytest.mark.parametrize("name", _params(heals=True))
def test_the_message_goes_with_its_cause(told: Told, name: str) -> None:
    status = told.healed[name]["status"]
    assert status["phase"] == "Completed"
    assert "message" not in status


def test_what_never_healed_was_canceled(told: Told) -> None:
    phases = {name: load["status"]["phase"] for name, load in told.healed.items()}
    stuck = {name for name, case in CASES.items() if not case.heals and not case.permanent}
    assert {name for name, phase in phases.items() if phase == "Canceled"} == stuck


def test_nothing_is_left_of_the_loads_but_themselves(told: Told) -> None:
    kinds = {f"{NAMESPACE} {kind.lower()}.velero.io/{name}" for name, kind in ((n, c.kind) for n, c in CASES.items())}
    foreign = {f"{NAMESPACE} pod/{name}" for name, case in CASES.items() if case.foreign}
    assert told.left - kinds == foreign
