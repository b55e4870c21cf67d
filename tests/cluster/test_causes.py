"""The cause of a pending or failed transfer is reported on it within seconds, with the component's own message.

All causes are produced at the same time, on the real scheduler and kubelet, once for all tests
here; then what can heal is healed.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import pytest
from _pytest.mark.structures import ParameterSet

from core.kube.resources import EVENTS, PODS
from tests.cluster.bed import Bed
from tests.cluster.breakage import break_storage, build_mover, build_waiting_pod, tainted
from tests.cluster.cause_cases import CASES, ELSEWHERE, OPEN, Case, called
from tests.cluster.listing import everything
from tests.cluster.scenes import (
    RESOURCES,
    Place,
    Volume,
    build_class,
    build_pod_transfer,
    need_two_nodes,
    wait_released,
    wait_until,
)
from tests.cluster.sharing import WITH_LOCKS, Shared, has_alone, relies_on
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE, build_snapshot
from tests.testbed.processes import BedError

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="waiting"), pytest.mark.timeout(WITH_LOCKS)]

_SAMPLE = pytest.mark.sample(
    "taint",
    "provisioning-failed",
    "image-pull",
    "secret-not-mounted",
    "start-error",
    "kubelet-rejection",
    "name-taken",
    "snapshot-error",
    "target-claim-unconsumed",
    "workload-gone",
    "workload-not-waiting",
)
"""One cause of each component: scheduler, provisioner, kubelet, container runtime, snapshotter, and each kind's own."""

_PROMISED = timedelta(seconds=10)
_PERMANENT = timedelta(seconds=30)
_ROUNDING = timedelta(seconds=2)
"""Both timestamps of a duration are in whole seconds."""

_NODE, _TAINTED = "bed-1", "bed-2"
"""Where the test bed creates volumes, and the node that is tainted while the causes last."""
_NO_MOVER = "no-mover"
"""The data mover of a transfer until its broken mover pod exists: no agent handles it."""


@dataclass
class Reports:
    """What became of all transfers, by their cases' names.

    Attributes:
        versions: Each transfer as it was when its message named its cause.
        events: Those of the agent's namespace, once all causes were reported.
        healed: Transfers as they ended, whose cause was healed.
        left: All objects that are new since before.
    """

    space: str
    cases: dict[str, Case]
    versions: dict[str, Json] = field(default_factory=dict)
    events: list[Json] = field(default_factory=list)
    healed: dict[str, Json] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)


@pytest.fixture(scope="module")
def reports(agent: Bed, module_space: str, rows: set[str]) -> Iterator[Reports]:
    """Every cause at the same time, until each was reported; then healed, or its transfer canceled."""
    need_two_nodes(agent)
    volume = Volume(agent, module_space)
    result = Reports(module_space, {name: case for name, case in CASES.items() if name in rows})
    with ExitStack() as broken:
        broken.enter_context(break_storage(agent, module_space, _faults(result)))
        _prepare(volume, result.cases)
        # Other tests would delay what is promised within seconds.
        with has_alone(agent, Shared.AGENTS), relies_on(agent, Shared.GROUND):
            before = everything(agent, module_space)
            broken.enter_context(tainted(agent, _TAINTED))
            _produce_causes(volume, result)
            broken.close()
            _end(agent, result)
            # An Event is recorded after the message that it repeats.
            result.events = agent.api.objects(EVENTS, NAMESPACE)
            result.left = everything(agent, module_space) - before
    yield result
    _remove(agent, result)


def _produce_causes(volume: Volume, result: Reports) -> None:
    """Create all transfers and what blocks them; return when each has reported its cause."""
    bed = volume.bed
    kinds = {case.kind for case in result.cases.values()}
    since = {kind: bed.api.snapshot(RESOURCES[kind])[1] for kind in kinds}
    bed.user.apply(*(_build_transfer(volume, name, case) for name, case in result.cases.items()))
    _create_movers(bed, result)
    for kind in kinds:
        result.versions |= _wait_reported(bed, kind, result, since=since[kind])


def _faults(result: Reports) -> Iterator[tuple[str, str, str]]:
    for name, case in result.cases.items():
        if case.fault:
            yield "provision", f"{NAMESPACE}/{called(result.space, name)}", case.fault
        if case.snapshot:
            yield "snapshot", f"{result.space}/{called(result.space, name)}", case.snapshot


def _prepare(volume: Volume, cases: dict[str, Case]) -> None:
    """Create what the transfers need, except what their cases lack."""
    bed, space = volume.bed, volume.namespace
    volume.fill("open('/data/file', 'wb').write(bytes(range(256)) * 256)")
    uploads = {called(space, name): case for name, case in cases.items() if case.kind == "DataUpload"}
    faulty = [name for name, case in uploads.items() if case.snapshot]
    bed.user.apply(*(build_snapshot(space, name, claim=volume.claim) for name in faulty))
    place = Place(bed, called(space, OPEN))
    repository = place.repository(space)
    bed.user.apply(*place.build(), repository)
    volume.take_snapshots(uploads.keys() - set(faulty))
    name = f"backuprepository/{repository['metadata']['name']}"
    bed.user.wait(name, "jsonpath={.status.phase}=Ready", namespace=NAMESPACE)
    targets = {n: case for n, case in cases.items() if case.kind == "DataDownload" and not case.source}
    bed.user.apply(
        build_class(called(space, ELSEWHERE), waits=False, node=_TAINTED),
        *(volume.target(called(space, name), storage_class=case.storage_class) for name, case in targets.items()),
        build_waiting_pod(space, "pending"),
    )


def _build_transfer(volume: Volume, name: str, case: Case) -> Json:
    space = volume.namespace
    transfer_name, location = called(space, name), called(space, OPEN)
    if case.kind == "DataUpload":
        transfer = volume.upload(transfer_name, snapshot=transfer_name, location=location)
        transfer["spec"]["sourcePVC"] = case.source or volume.claim
        storage_class = called(space, ELSEWHERE) if case.storage_class == ELSEWHERE else case.storage_class or "bed"
        transfer["spec"]["csiSnapshot"]["storageClass"] = storage_class
        if case.pod is not None:
            transfer["spec"]["datamover"] = _NO_MOVER
        return transfer
    if case.kind == "DataDownload":
        transfer = volume.download(transfer_name, snapshot_id="0", location=location)
        transfer["spec"]["targetVolume"]["pvc"] = case.source or transfer_name
        return transfer
    name = case.source or "pending"
    absent: Json = {"metadata": {"namespace": space, "name": name, "uid": "0"}}
    pod = (volume.bed.api.get(PODS, space, name) or absent) | {"spec": {"nodeName": "nowhere"}}
    more = {"snapshotID": "0"} if case.kind == "PodVolumeRestore" else {}
    return build_pod_transfer(case.kind, transfer_name, pod, volume="scratch", location=location, **more)


def _create_movers(bed: Bed, result: Reports) -> None:
    """Create the broken mover pods of transfers that no agent handles yet; then the agents do."""
    space, pods, held = result.space, [], []
    for name, case in result.cases.items():
        if case.pod is None:
            continue
        transfer = bed.api.get(RESOURCES[case.kind], NAMESPACE, called(space, name))
        assert transfer is not None
        assert transfer.get("status", {}).get("phase", "") in {"", "New"}
        bound = {"nodeName": _NODE} if case.bound else {}
        pod = build_mover(transfer, spec={**case.pod, **bound}, container=case.container)
        if case.foreign:
            del pod["metadata"]["ownerReferences"], pod["metadata"]["labels"]
        pods.append(pod)
        held.append((RESOURCES[case.kind], called(space, name)))
    bed.user.apply(*pods)
    for resource, name in held:
        bed.api.patch(resource, {"spec": {"datamover": "velero"}}, name=name, namespace=NAMESPACE)


def _wait_reported(bed: Bed, kind: str, result: Reports, *, since: str) -> dict[str, Json]:
    """Wait until the message of each transfer of a kind names its cause; returns the transfers as they were then."""
    names = _names_of(kind, result)
    wanted = {transfer_name: _pattern(name, result.space) for transfer_name, name in names.items()}
    found: dict[str, Json] = {}
    last: dict[str, str] = {}
    for event in bed.api.watch(RESOURCES[kind], since):
        transfer = event["object"]
        name, message = transfer["metadata"]["name"], transfer.get("status", {}).get("message", "")
        if name not in wanted or names[name] in found:
            continue
        last[name] = message
        if wanted[name].search(message):
            found[names[name]] = transfer
        if len(found) == len(wanted):
            return found
    raise BedError(f"never reported: { {each: last.get(each) for each, name in names.items() if name not in found} }")


def _names_of(kind: str, result: Reports) -> dict[str, str]:
    """The cases of a kind, by what their transfers are called."""
    return {called(result.space, name): name for name, case in result.cases.items() if case.kind == kind}


def _pattern(name: str, space: str) -> re.Pattern[str]:
    return re.compile(CASES[name].message.format(name=called(space, name), space=space))


def _end(bed: Bed, result: Reports) -> None:
    """Wait for the transfers that heal, and cancel those that do not."""
    for name, case in result.cases.items():
        if not case.heals and not case.permanent:
            cancel = {"spec": {"cancel": True}}
            bed.api.patch(RESOURCES[case.kind], cancel, name=called(result.space, name), namespace=NAMESPACE)
    result.healed = {name: wait_released(bed, transfer) for name, transfer in result.versions.items()}


def _remove(bed: Bed, result: Reports) -> None:
    space = result.space
    names = [f"{case.kind}/{called(space, name)}" for name, case in result.cases.items()]
    names += [f"pod/{called(space, name)}" for name, case in result.cases.items() if case.foreign]
    Place(bed, called(space, OPEN)).remove(space, f"storageclass/{called(space, ELSEWHERE)}", *names)


def _params(*, permanent: bool | None = None, heals: bool | None = None) -> list[ParameterSet]:
    """The cases that are permanent or not, and heal or not."""
    return [
        pytest.param(name, marks=pytest.mark.cause(name))
        for name, case in CASES.items()
        if permanent in {None, case.permanent} and heals in {None, case.heals}
    ]


def _time(event: Json) -> datetime:
    """When an Event occurred first, in whole seconds."""
    text = event.get("firstTimestamp") or event["eventTime"]
    return datetime.fromisoformat(text).replace(microsecond=0)


def _first(reports: Reports, name: str, reason: str, *, about_transfer: bool) -> Json:
    """The first Event with a reason about a transfer, or about its pod or claim."""
    kind = CASES[name].kind
    about = [event for event in reports.events if event["involvedObject"]["name"] == called(reports.space, name)]
    events = [e for e in about if e["reason"] == reason and (e["involvedObject"]["kind"] == kind) is about_transfer]
    assert events, [(e["involvedObject"]["kind"], e["reason"]) for e in about]
    return min(events, key=_time)


@_SAMPLE
@pytest.mark.parametrize("name", _params())
def test_message_and_event_report_the_cause_soon_after_the_cluster_shows_it(reports: Reports, name: str) -> None:
    case, transfer = CASES[name], reports.versions[name]
    event = _first(reports, name, case.reason, about_transfer=True)
    began = transfer["status"].get("acceptedTimestamp") or transfer["metadata"]["creationTimestamp"]
    since = datetime.fromisoformat(began)
    if case.visible:
        since = max(since, _time(_first(reports, name, case.visible, about_transfer=False)))
    assert _pattern(name, reports.space).search(event["message"])
    assert event["type"] == ("Normal" if case.expected else "Warning")
    assert _time(event) - since <= _PROMISED + _ROUNDING


@_SAMPLE
@pytest.mark.parametrize("name", _params(permanent=True))
def test_a_permanent_cause_fails_the_transfer_soon(reports: Reports, name: str) -> None:
    transfer = reports.healed[name]
    status = transfer["status"]
    assert status["phase"] == "Failed"
    began = status.get("acceptedTimestamp") or transfer["metadata"]["creationTimestamp"]
    assert datetime.fromisoformat(status["completionTimestamp"]) - datetime.fromisoformat(began) <= _PERMANENT


@_SAMPLE
@pytest.mark.parametrize("name", _params(heals=True))
def test_the_message_goes_with_its_cause(reports: Reports, name: str) -> None:
    status = reports.healed[name]["status"]
    assert status["phase"] == "Completed"
    assert "message" not in status


def test_what_never_healed_was_canceled(reports: Reports) -> None:
    phases = {name: transfer["status"]["phase"] for name, transfer in reports.healed.items()}
    blocked = {name for name, case in reports.cases.items() if not case.heals and not case.permanent}
    assert {name for name, phase in phases.items() if phase == "Canceled"} == blocked


def test_nothing_is_left_but_the_transfers_themselves(reports: Reports) -> None:
    names = {called(reports.space, name): case for name, case in reports.cases.items()}
    kinds = {f"{NAMESPACE} {case.kind.lower()}.velero.io/{name}" for name, case in names.items()}
    foreign = {f"{NAMESPACE} pod/{name}" for name, case in names.items() if case.foreign}
    assert reports.left - kinds == foreign


@pytest.mark.thorough
def test_a_location_that_is_unavailable_delays_nothing(agent: Bed, space: str) -> None:
    """Its bucket is good, and the phase outdated; Event and log say so once."""
    volume, place, name = Volume(agent, space), Place(agent, space), f"{space}-du"
    volume.fill("open('/data/file', 'wb').write(b'x')")
    volume.take_snapshots([name])
    secret, location = place.build()
    validated = {"lastValidationTime": "2026-01-01T00:00:00Z"}
    location["status"] = {"phase": "Unavailable", "message": "the bucket was deleted"} | validated
    agent.user.apply(secret, location)
    with relies_on(agent, Shared.AGENTS):
        agent.user.apply(upload := volume.upload(name, snapshot=name, location=place.name))
        wait_until(agent, upload, "Completed")
    events = [event for event in agent.api.objects(EVENTS, NAMESPACE) if event["involvedObject"]["name"] == name]
    (event,) = [event for event in events if event["reason"] == "LocationUnavailable"]
    assert event["type"] == "Warning"
    assert event["message"] == f"BackupStorageLocation velero/{space} is Unavailable: the bucket was deleted"
    place.remove(space, f"dataupload/{name}")
