"""Transfers that cannot succeed fail soon, name object and cause, and leave nothing behind.

All of them run at the same time, once for all tests here.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import pytest

from core.kube.resources import VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS
from tests.cluster.bed import Bed
from tests.cluster.handkopia import open_kopia
from tests.cluster.listing import everything
from tests.cluster.scenes import Place, Volume, wait_released
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.machine import run

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="failing"), pytest.mark.timeout(WITH_LOCKS)]

_SAMPLE = pytest.mark.sample(
    "silent",
    "no-snapshot",
    "no-snapshot-to-restore",
    "wrong-keys",
    "wrong-password-later",
    "no-bucket",
    "refusing-later",
)
"""Each cause but a missing location, which takes two minutes; a wrong location before and after it was used."""

_LIMIT_SECONDS = 150
"""The longest is a missing location, which is given two minutes to come back."""
_PERMANENT_SECONDS = 30
_PERMANENT = {"credentials-wrong", "password-wrong", "snapshot-missing"}
"""Causes that fail a transfer immediately: all others are retried for a while, as they may pass."""

_BLACK_HOLE = "10.97.66.0/24"
_SILENT = "http://10.97.66.6:7070"
"""Where packets are dropped: the connection is neither established nor refused."""
_REFUSING = "http://10.97.0.1:1"
_WRONG_KEY = "notthesecret"
_NO_SNAPSHOT = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class Case:
    """Something wrong with a transfer.

    Attributes:
        cause: Its name in `docs/troubleshooting.md`.
        message: Pattern of its message; `{location}` is its location, `{space}` the volume's namespace.
        location: What is wrong with its location; None: there is none.
        spoil: Goes wrong once its repository is Ready.
        ready: Whether its repository is Ready before the transfer is created.
        prepare: Goes wrong before anything else.
        download: Whether it is a DataDownload.
        snapshot: The VolumeSnapshot that an upload names, if not its own.
    """

    cause: str
    message: str
    location: Mapping[str, str] | None = field(default_factory=dict)
    spoil: Callable[[Place, str], None] | None = None
    ready: bool = False
    prepare: Callable[[Place, str], None] | None = None
    download: bool = False
    snapshot: str = ""


def _replace_keys(place: Place, _space: str) -> None:
    place.bed.user.apply(*place.build(secret_key=_WRONG_KEY))


def _change_url(place: Place, _space: str) -> None:
    place.bed.user.apply(*place.build(url=_REFUSING))


def _create_with_password(place: Place, space: str) -> None:
    with open_kopia(place.bed, space, prefix=place.name, password="another-password", connect=False) as kopia:
        kopia.create()


def _change_password(place: Place, space: str) -> None:
    with open_kopia(place.bed, space, prefix=place.name) as kopia:
        kopia.run("repository", "change-password", "--new-password=changed-password")


_NAME = r"backup repository {space}-{location}-kopia \(s3://[a-z-]+/{location}/kopia/{space}/ at http://[\d.:]+\)"
_AT = _NAME + ": "
_REFUSED = _NAME + " did not answer for [0-9ms]+: the endpoint cannot be reached: "
_PENDING = r"BackupRepository velero/{space}-{location}-kopia is not ready: "
_NOT_READY = _PENDING + _AT
_CHECKED_AGAIN = f"({_PENDING})?"
"""What has changed since the repository was Ready is found by the data mover, or before by the leader."""

_NO_LOCATION = "could not start within 2m0s: BackupStorageLocation velero/{location} does not exist"

_CASES = {
    "silent": Case(
        "storage-silent", _PENDING + "open " + _NAME + ": no progress for [0-9ms]+: " + _NAME, {"url": _SILENT}
    ),
    "no-location": Case("location-missing", _NO_LOCATION, None),
    "no-location-to-restore-from": Case("location-missing", _NO_LOCATION, None, download=True),
    "no-snapshot": Case("snapshot-missing", "VolumeSnapshot {space}/missing does not exist", snapshot="missing"),
    "no-snapshot-to-restore": Case(
        "snapshot-not-in-repository",
        f"snapshot {_NO_SNAPSHOT}: it is not in the repository$",
        ready=True,
        download=True,
    ),
    "wrong-keys": Case(
        "credentials-wrong", _NOT_READY + "the secret access key is not accepted: ", {"secret_key": _WRONG_KEY}
    ),
    "wrong-keys-later": Case(
        "credentials-wrong",
        _CHECKED_AGAIN + _AT + "the secret access key is not accepted: ",
        ready=True,
        spoil=_replace_keys,
    ),
    "wrong-password": Case(
        "password-wrong", _NOT_READY + "the repository password does not match: ", prepare=_create_with_password
    ),
    "wrong-password-later": Case(
        "password-wrong", _AT + "the repository password does not match: ", ready=True, spoil=_change_password
    ),
    "no-bucket": Case("bucket-missing", _NOT_READY + "the bucket does not exist: ", {"bucket": "missing-bucket"}),
    "refusing": Case("storage-unreachable", _PENDING + _REFUSED, {"url": _REFUSING}),
    "refusing-later": Case("storage-unreachable", _CHECKED_AGAIN + _REFUSED, ready=True, spoil=_change_url),
}


@dataclass
class Ended:
    """What became of the transfers of some cases, by their names, and all objects before and after."""

    space: str
    cases: dict[str, Case]
    transfers: dict[str, Json] = field(default_factory=dict)
    handles: set[str] = field(default_factory=set)
    before: set[str] = field(default_factory=set)
    after: set[str] = field(default_factory=set)


@pytest.fixture(scope="module")
def ended(agent: Bed, module_space: str, rows: set[str]) -> Iterator[Ended]:
    """Everything that is wrong, at the same time, to its end."""
    volume = Volume(agent, module_space)
    result = Ended(module_space, {name: case for name, case in _CASES.items() if name in rows})
    _prepare(volume, result)
    with _black_hole(), relies_on(agent, Shared.AGENTS):
        result.before = everything(agent, module_space)
        transfers = {name: _build(volume, name, case) for name, case in result.cases.items()}
        agent.user.apply(*(transfers[name] for name, case in result.cases.items() if not case.ready))
        _make_ready(agent, result)
        agent.user.apply(*(transfers[name] for name, case in result.cases.items() if case.ready))
        seconds = _LIMIT_SECONDS + 30
        result.transfers = {name: wait_released(agent, each, seconds=seconds) for name, each in transfers.items()}
        result.after = everything(agent, module_space)
    yield result
    _remove(agent, result)


def _called(space: str, name: str) -> str:
    """Return the name of the objects of a case: the transfer, its snapshot or its target, its location."""
    return f"{space}-{name}"


def _prepare(volume: Volume, result: Ended) -> None:
    """Create what the transfers need, except what their cases lack."""
    bed, space = volume.bed, volume.namespace
    volume.fill("open('/data/file', 'wb').write(bytes(range(256)) * 4096)")
    taken = (name for name, case in result.cases.items() if not case.download and not case.snapshot)
    volume.take_snapshots(_called(space, name) for name in taken)
    objects = []
    for name, case in result.cases.items():
        called = _called(space, name)
        if case.location is not None:
            objects += Place(bed, called).build(**case.location)
        if case.download:
            objects.append(volume.target(called))
    bed.user.apply(*objects)
    for name, case in result.cases.items():
        if case.prepare is not None:
            case.prepare(Place(bed, _called(space, name)), space)
    contents = [one for one in bed.api.objects(VOLUME_SNAPSHOT_CONTENTS) if _is_of(one, space)]
    result.handles = {one["status"]["snapshotHandle"] for one in contents}


def _make_ready(bed: Bed, result: Ended) -> None:
    """Create the repositories of the cases that need one, and spoil each once it is Ready."""
    space = result.space
    cases = [(Place(bed, _called(space, name)), case) for name, case in result.cases.items() if case.ready]
    bed.user.apply(*(place.repository(space) for place, _ in cases))
    for place, case in cases:
        name = place.repository(space)["metadata"]["name"]
        bed.user.wait(f"backuprepository/{name}", "jsonpath={.status.phase}=Ready", namespace=NAMESPACE)
        if case.spoil is not None:
            case.spoil(place, space)


def _is_of(content: Json, space: str) -> bool:
    return bool(content["spec"]["volumeSnapshotRef"]["namespace"] == space)


def _build(volume: Volume, name: str, case: Case) -> Json:
    called = _called(volume.namespace, name)
    if case.download:
        return volume.download(called, snapshot_id=_NO_SNAPSHOT, location=called)
    return volume.upload(called, snapshot=case.snapshot or called, location=called)


@contextmanager
def _black_hole() -> Iterator[None]:
    run("ip", "route", "add", "blackhole", _BLACK_HOLE)
    try:
        yield
    finally:
        run("ip", "route", "del", "blackhole", _BLACK_HOLE)


def _remove(bed: Bed, ended: Ended) -> None:
    called = {_called(ended.space, name): case for name, case in ended.cases.items()}
    names = [f"secret/{name}-keys" for name in called]
    names += [f"backupstoragelocation.velero.io/{name}" for name in called]
    names += [f"{'datadownload' if case.download else 'dataupload'}.velero.io/{name}" for name, case in called.items()]
    names += [f"backuprepository.velero.io/{ended.space}-{name}-kopia" for name in called]
    bed.user.kubectl("delete", "-n", NAMESPACE, "--ignore-not-found", "--wait=false", *names)


@_SAMPLE
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.cause(c.cause)) for n, c in _CASES.items()])
def test_it_fails_soon_and_names_object_and_cause(ended: Ended, name: str) -> None:
    transfer = ended.transfers[name]
    status = transfer["status"]
    assert status["phase"] == "Failed"
    message = _CASES[name].message.format(location=_called(ended.space, name), space=ended.space)
    assert re.match(message, status["message"]), status["message"]
    assert "\n" not in status["message"]
    assert _WRONG_KEY not in status["message"]
    done = datetime.fromisoformat(status["completionTimestamp"])
    assert done - datetime.fromisoformat(transfer["metadata"]["creationTimestamp"]) <= timedelta(seconds=_LIMIT_SECONDS)
    if _CASES[name].cause in _PERMANENT:
        # How long the pod takes to start depends on the machine.
        assert done - datetime.fromisoformat(status["startTimestamp"]) <= timedelta(seconds=_PERMANENT_SECONDS)


def test_describe_shows_the_same(agent: Bed, ended: Ended) -> None:
    for transfer in ended.transfers.values():
        described = agent.user.kubectl(
            "describe", f"{transfer['kind']}/{transfer['metadata']['name']}", "-n", NAMESPACE
        )
        events = described.partition("Events:")[2]
        assert transfer["status"]["message"] in events


def test_nothing_is_left_but_the_resources_themselves(agent: Bed, ended: Ended) -> None:
    left = {name.partition("/")[0] for name in ended.after - ended.before}
    kinds = ("dataupload", "datadownload", "backuprepository")
    assert left == {f"{NAMESPACE} {kind}.velero.io" for kind in kinds}
    assert agent.api.objects(VOLUME_SNAPSHOTS, ended.space) == []
    assert not [one for one in agent.api.objects(VOLUME_SNAPSHOT_CONTENTS) if _is_of(one, ended.space)]
    assert not [handle for handle in ended.handles if (agent.folder / "snapshots" / handle).exists()]
