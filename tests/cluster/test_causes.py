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

from tests.cluster.breakage import (
    break_storage,
    build_mover,
    build_pod_volume_load,
    build_target,
    build_waiting_pod,
    tainted,
)
from tests.cluster.cause_cases import AWAY, CASES, ELSEWHERE, HELD, OPEN, Case, called
from tests.cluster.listing import everything
from tests.cluster.scenes import DOWNLOADS, UPLOADS, Place, Volume, build_class, follow, wait_released
from tests.cluster.sharing import Shared, has_alone, relies_on
from tests.cluster.workloads import BACKUPS, RESTORES
from tests.testbed.demonstration.manifests import NAMESPACE, build_snapshot
from tests.testbed.demonstration.user import PODS
from tests.testbed.processes import BedError
from tests.testbed.storage.objects import EVENTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.mark.structures import ParameterSet

    from tests.cluster.conftest import Bed
    from tests.testbed.api import Json

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="waiting"), pytest.mark.timeout(400)]

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
_NODE, _TAINTED = "bed-1", "bed-2"
"""Where the bed makes volumes, and the node that takes no new pods while causes are brought about."""
_UNAVAILABLE = {"phase": "Unavailable", "message": "the bucket was taken away"}
_TELL_SECONDS = 120
_HEAL_SECONDS = 150


@dataclass
class Told:
    """What became of all loads, by their cases' names.

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
    if _TAINTED not in agent.env["BED_NODES"].split():
        pytest.fail("this needs two nodes: python -m tests.testbed --nodes 2 run -- …", pytrace=False)
    volume = Volume(agent, module_space)
    result = Told(module_space)
    with ExitStack() as broken:
        broken.enter_context(break_storage(agent, module_space, _faults(module_space)))
        before = _prepare(volume)
        # Others would be in the way of seconds that are promised.
        with has_alone(agent, Shared.AGENTS), relies_on(agent, Shared.GROUND):
            broken.enter_context(tainted(agent, _TAINTED))
            _bring_about(volume, result)
            broken.close()
            _end(agent, result)
            result.left = everything(agent, module_space) - before
    yield result
    _remove(agent, module_space)


def _bring_about(volume: Volume, result: Told) -> None:
    """Make all loads and what stands in their way; returns when each has told its cause."""
    bed = volume.bed
    since = {kind: bed.api.snapshot(resource)[1] for kind, resource in _RESOURCES.items()}
    bed.user.apply(*(_build_load(volume, name, case) for name, case in CASES.items()))
    _place_movers(bed, volume.namespace)
    bed.user.apply(*_locations(bed, volume.namespace, OPEN, HELD))
    for kind in _RESOURCES:
        result.versions |= _wait_told(bed, kind, volume.namespace, since=since[kind])
    result.events = bed.api.objects(EVENTS, NAMESPACE)


def _faults(space: str) -> Iterator[tuple[str, str, str]]:
    """What goes wrong with the storage."""
    for name, case in CASES.items():
        if case.fault:
            yield "provision", f"{NAMESPACE}/{called(space, name)}", case.fault
        if case.snapshot:
            yield "snapshot", f"{space}/{called(space, name)}", case.snapshot


def _locations(bed: Bed, space: str, *available: str) -> Iterator[Json]:
    """The storage locations, of which some are available and the others not."""
    for word in _PLACES:
        secret, location = Place(bed, called(space, word)).build()
        usable = word in available
        location["status"] = {"phase": "Available", "message": ""} if usable else _UNAVAILABLE
        yield from (secret, location)


def _prepare(volume: Volume) -> set[str]:
    """Make what the loads need, as far as they shall have it; returns all objects that there are then."""
    bed, space = volume.bed, volume.namespace
    volume.fill("open('/data/file', 'wb').write(bytes(range(256)) * 256)")
    uploads = {called(space, name): case for name, case in CASES.items() if case.kind == "DataUpload"}
    faulty = [name for name, case in uploads.items() if case.snapshot]
    bed.user.apply(*(build_snapshot(space, name, claim=volume.claim) for name in faulty))
    repositories = [Place(bed, called(space, word)).repository(space) for word in (OPEN, HELD)]
    bed.user.apply(*_locations(bed, space, OPEN, HELD), *repositories)
    volume.take_snapshots(uploads.keys() - set(faulty))
    for each in repositories:
        name = f"backuprepository/{each['metadata']['name']}"
        bed.user.wait(name, "jsonpath={.status.phase}=Ready", namespace=NAMESPACE)
    targets = {n: case for n, case in CASES.items() if case.kind == "DataDownload" and not case.source}
    bed.user.apply(
        build_class(called(space, ELSEWHERE), waits=False, node=_TAINTED),
        *(
            build_target(volume, called(space, name), storage_class=case.storage_class)
            for name, case in targets.items()
        ),
        build_waiting_pod(space, "pending"),
        *_locations(bed, space, OPEN),
    )
    return everything(bed, space)


def _build_load(volume: Volume, name: str, case: Case) -> Json:
    space = volume.namespace
    load_name, location = called(space, name), called(space, case.place)
    if case.kind == "DataUpload":
        load = volume.upload(load_name, snapshot=load_name, location=location)
        load["spec"]["sourcePVC"] = case.source or volume.claim
        storage_class = called(space, ELSEWHERE) if case.storage_class == ELSEWHERE else case.storage_class or "bed"
        load["spec"]["csiSnapshot"]["storageClass"] = storage_class
        return load
    if case.kind == "DataDownload":
        load = volume.download(load_name, snapshot_id="0", location=location)
        load["spec"]["targetVolume"]["pvc"] = case.source or load_name
        return load
    pod = volume.bed.api.get(PODS, space, case.source or "pending")
    uid = pod["metadata"]["uid"] if pod else "0"
    ref = {"namespace": space, "name": case.source or "pending", "uid": uid}
    return build_pod_volume_load(case.kind, load_name, pod=ref, location=location)


def _place_movers(bed: Bed, space: str) -> None:
    """Make the broken mover pods of loads that nobody has accepted yet."""
    pods = []
    for name, case in CASES.items():
        if case.pod is None:
            continue
        load = bed.api.get(_RESOURCES[case.kind], NAMESPACE, called(space, name))
        assert load is not None
        assert load.get("status", {}).get("phase", "") in {"", "New"}
        bound = {"nodeName": _NODE} if case.bound else {}
        pod = build_mover(load, spec={**case.pod, **bound}, container=case.container)
        if case.foreign:
            del pod["metadata"]["ownerReferences"], pod["metadata"]["labels"]
        pods.append(pod)
    bed.user.apply(*pods)


def _wait_told(bed: Bed, kind: str, space: str, *, since: str) -> dict[str, Json]:
    """Wait until the message of each load of a kind names its cause; returns the loads as they were then."""
    names = _names_of(kind, space)
    wanted = {load_name: _pattern(name, space) for load_name, name in names.items()}
    found: dict[str, Json] = {}
    last: dict[str, str] = {}
    for event in bed.api.watch(_RESOURCES[kind], since, seconds=_TELL_SECONDS):
        load = event["object"]
        name, message = load["metadata"]["name"], load.get("status", {}).get("message", "")
        if name not in wanted or names[name] in found:
            continue
        last[name] = message
        if wanted[name].search(message):
            found[names[name]] = load
        if len(found) == len(wanted):
            return found
    raise BedError(f"never told: { {each: last.get(each) for each, name in names.items() if name not in found} }")


def _names_of(kind: str, space: str) -> dict[str, str]:
    """The cases of a kind, by what their loads are called."""
    return {called(space, name): name for name, case in CASES.items() if case.kind == kind}


def _pattern(name: str, space: str) -> re.Pattern[str]:
    """What has to be told of a case."""
    return re.compile(CASES[name].told.format(name=called(space, name), space=space))


def _end(bed: Bed, result: Told) -> None:
    """Wait for the loads that heal, and cancel those that do not."""
    for name, case in CASES.items():
        if not case.heals and not case.permanent:
            cancel = {"spec": {"cancel": True}}
            bed.api.patch(_RESOURCES[case.kind], cancel, name=called(result.space, name), namespace=NAMESPACE)
    for kind, resource in _RESOURCES.items():
        names = _names_of(kind, result.space)
        for load in follow(bed, resource, names, seconds=_HEAL_SECONDS):
            result.healed[names[load["metadata"]["name"]]] = load
        wait_released(bed, resource, names)


def _remove(bed: Bed, space: str) -> None:
    names = [f"{case.kind}/{called(space, name)}" for name, case in CASES.items()]
    names += [f"backupstoragelocation.velero.io/{called(space, word)}" for word in _PLACES]
    names += [f"secret/{called(space, word)}-keys" for word in _PLACES]
    names += [f"backuprepository.velero.io/{space}-{called(space, word)}-kopia" for word in (OPEN, HELD)]
    names += [f"pod/{called(space, name)}" for name, case in CASES.items() if case.foreign]
    names += [f"storageclass/{called(space, ELSEWHERE)}"]
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
    about = [event for event in told.events if event["involvedObject"]["name"] == called(told.space, name)]
    events = [e for e in about if e["reason"] == reason and (e["involvedObject"]["kind"] == kind) is about_load]
    assert events, [(e["involvedObject"]["kind"], e["reason"]) for e in about]
    return min(events, key=_time)


@pytest.mark.parametrize("name", _params())
def test_the_message_and_an_event_tell_the_cause_soon_after_the_cluster_shows_it(told: Told, name: str) -> None:
    case, load = CASES[name], told.versions[name]
    said = _first(told, name, case.reason, about_load=True)
    began = load["status"].get("acceptedTimestamp") or load["metadata"]["creationTimestamp"]
    since = datetime.fromisoformat(began)
    if case.visible:
        since = max(since, _time(_first(told, name, case.visible, about_load=False)))

    assert _pattern(name, told.space).search(said["message"])
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
    names = {called(told.space, name): case for name, case in CASES.items()}
    kinds = {f"{NAMESPACE} {case.kind.lower()}.velero.io/{name}" for name, case in names.items()}
    foreign = {f"{NAMESPACE} pod/{name}" for name, case in names.items() if case.foreign}
    assert told.left - kinds == foreign
