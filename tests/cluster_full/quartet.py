"""One transfer of each kind, held while data moves, and what holds when it ended as expected.

The volumes are `local` ones: the paths of CSI volumes are covered by tests from the recordings
(tests/exposer/test_workload.py).
"""

import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from core.kube.resources import (
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from tests.cluster.bed import Bed
from tests.cluster.gate import HELD_BYTES, Gate
from tests.cluster.handkopia import open_kopia
from tests.cluster.scenes import RESOURCES, Place, Volume, is_final, wait_until
from tests.cluster.workloads import Workload
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.processes import BedError

_OWNER_LABEL = "nodeagent.io/owner-uid"
_END_SECONDS = 120
_CLEAN_SECONDS = 90
_LOOK_SECONDS = 0.3

_FILL = f"""
import os
for number in range(4):
    with open(f"/data/file-{{number}}", "wb") as file:
        file.write(os.urandom({HELD_BYTES // 3}))
"""


@dataclass
class Seed:
    """A claim and a pod with data, both backed up once, through the gate.

    Attributes:
        bed: Where it is.
        gate: What every storage location of its transfers is behind.
        space: Its namespace.
        kept: The Completed DataUpload and PodVolumeBackup, by kind.
    """

    bed: Bed
    gate: Gate
    space: str
    kept: dict[str, Json] = field(default_factory=dict)

    @property
    def volume(self) -> Volume:
        """The claim."""
        return Volume(self.bed, self.space)

    @property
    def writer(self) -> Workload:
        """The pod."""
        return Workload(self.bed, self.space, "writer", {"data": HELD_BYTES + (8 << 20)})

    @property
    def place(self) -> Place:
        """Where its backups are."""
        return Place(self.bed, self.space)

    def prepare(self) -> None:
        """Make the volumes and back them up."""
        self.volume.fill(_FILL, size="128Mi")
        self.writer.start()
        self.writer.wait_ready()
        self.volume.take_snapshots(["seed"])
        self.bed.user.apply(*self.place.build(url=self.gate.url))
        upload = self.volume.upload(f"{self.space}-seed-du", snapshot="seed", location=self.place.name)
        backup = self.writer.backup("data")
        backup["metadata"]["name"] = f"{self.space}-seed-pvb"
        backup["spec"]["backupStorageLocation"] = self.place.name
        self.bed.user.apply(upload, backup)
        for transfer in (upload, backup):
            self.kept[transfer["kind"]] = wait_until(self.bed, transfer, "Completed")


@dataclass
class Quartet:
    """Four transfers of a scenario, uploads into a repository that has nothing yet: no two have the same name.

    Attributes:
        seed: Whose data they move.
        name: The scenario's.
        transfers: The transfers as they were made, by kind.
    """

    seed: Seed
    name: str
    transfers: dict[str, Json] = field(default_factory=dict)

    @property
    def bed(self) -> Bed:
        """Where it is."""
        return self.seed.bed

    @property
    def place(self) -> Place:
        """Where its uploads go."""
        return Place(self.bed, f"{self.seed.space}-{self.name}")

    @property
    def reader(self) -> Workload:
        """The pod that waits for its data."""
        return Workload(self.bed, self.seed.space, f"reader-{self.name}")

    def make_repository(self) -> None:
        """Have the repository of its uploads made before they are."""
        place = self.place
        repository = place.repository(self.seed.space)
        self.bed.user.apply(*place.build(url=self.seed.gate.url), repository)
        name = f"backuprepository/{repository['metadata']['name']}"
        self.bed.user.wait(name, "jsonpath={.status.phase}=Ready", namespace=NAMESPACE)

    def make(self) -> None:
        """Make the transfers and what they are about."""
        seed, place = self.seed, self.place
        label = f"{seed.space}-{self.name}"
        self.bed.user.apply(*place.build(url=seed.gate.url))
        seed.volume.take_snapshots([self.name])
        self.reader.start()
        target = f"back-{self.name}"
        upload = seed.volume.upload(f"{label}-du", snapshot=self.name, location=place.name)
        kept = seed.kept["DataUpload"]["status"]["snapshotID"]
        download = seed.volume.download(target, snapshot_id=kept, location=seed.place.name)
        download["metadata"]["name"] = f"{label}-dd"
        backup = seed.writer.backup("data")
        backup["metadata"]["name"] = f"{label}-pvb"
        backup["spec"]["backupStorageLocation"] = place.name
        restore = self.reader.restore("data", backup=seed.kept["PodVolumeBackup"])
        restore["metadata"]["name"] = f"{label}-pvr"
        restore["spec"]["backupStorageLocation"] = seed.place.name
        self.transfers = {transfer["kind"]: transfer for transfer in (upload, download, backup, restore)}
        claim = seed.volume.target(target)
        claim["spec"]["resources"]["requests"]["storage"] = "128Mi"
        self.bed.user.apply(claim, *self.transfers.values())

    def hold(self) -> None:
        """Have the gate shut and make the transfers; returns when all of them are held while data moves."""
        self.seed.gate.shut()
        self.make()
        self.wait("InProgress")
        self.seed.gate.wait_held(*(str(pod["status"]["podIP"]) for pod in self.pods().values()))

    def wait(self, *phases: str) -> dict[str, Json]:
        """Wait until all transfers are in one of the phases; returns them by kind."""
        return wait_all(self.bed, self.transfers.values(), *phases)

    def read(self) -> dict[str, Json]:
        """All transfers as they are now, by kind."""
        return {kind: _read(self.bed, transfer) for kind, transfer in self.transfers.items()}

    def pods(self) -> dict[str, Json]:
        """The mover pods by kind of their transfers."""
        found = {}
        for kind, transfer in self.transfers.items():
            pod = self.bed.api.get(PODS, NAMESPACE, transfer["metadata"]["name"])
            if pod is None:
                raise BedError(f"{kind} {transfer['metadata']['name']} has no mover pod")
            found[kind] = pod
        return found

    def cancel(self) -> None:
        """Have all of them canceled."""
        for kind, transfer in self.transfers.items():
            body = {"spec": {"cancel": True}}
            self.bed.api.patch(RESOURCES[kind], body, name=transfer["metadata"]["name"], namespace=NAMESPACE)

    def differences(self, ended: dict[str, Json], folder: Path) -> list[str]:
        """What of the data is not as it was; nothing where all is well."""
        source, pod = self._folder("data"), self._folder("writer")
        found = []
        for kind, original in (("DataUpload", source), ("PodVolumeBackup", pod)):
            copy = folder / kind
            with open_kopia(self.bed, self.seed.space, prefix=self.place.name) as kopia:
                kopia.run("restore", ended[kind]["status"]["snapshotID"], str(copy))
            found += _differences(original, copy)
        found += _differences(source, self._folder(f"back-{self.name}"))
        return found + _differences(pod, self._folder(self.reader.name))

    def remove(self) -> None:
        """Have everything of the scenario deleted; nothing may block the deletion of a transfer."""
        bed, space = self.bed, self.seed.space
        names = [f"{transfer['kind'].lower()}/{transfer['metadata']['name']}" for transfer in self.transfers.values()]
        if names:
            bed.user.kubectl("delete", *names, "-n", NAMESPACE, "--ignore-not-found", "--timeout=60s")
        self.reader.delete()
        mine = [f"pvc/back-{self.name}", f"pvc/{self.reader.name}"]
        bed.user.kubectl("delete", *mine, "-n", space, "--ignore-not-found", "--timeout=60s")
        self.place.remove(space)

    def _folder(self, claim: str) -> Path:
        return Volume(self.bed, self.seed.space, claim).path()


def wait_all(bed: Bed, transfers: Iterable[Json], *phases: str, seconds: float = _END_SECONDS) -> dict[str, Json]:
    """Wait until all transfers are in one of some phases, any final one if none is named; returns them by kind."""
    transfers, deadline = list(transfers), time.monotonic() + seconds
    while True:
        found = {transfer["kind"]: _read(bed, transfer) for transfer in transfers}
        statuses = {kind: transfer.get("status", {}) for kind, transfer in found.items()}
        if all((status.get("phase", "") in phases) if phases else is_final(found[k]) for k, status in statuses.items()):
            return found
        wrong = [
            kind
            for kind, status in statuses.items()
            if phases and is_final(found[kind]) and status["phase"] not in phases
        ]
        if wrong or time.monotonic() > deadline:
            raise BedError(f"not {phases or 'final'}: {statuses}")
        time.sleep(_LOOK_SECONDS)


def wait_leaked(bed: Bed, *, seconds: float = _CLEAN_SECONDS) -> list[str]:
    """The leaked objects of transfers, after so many seconds for their cleanup at most."""
    deadline = time.monotonic() + seconds
    while (left := _leaked(bed)) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return left


def _leaked(bed: Bed) -> list[str]:
    """Objects that carry an owner, and volumes and snapshots of the agents' namespace or of no claim."""
    tests: list[tuple[Resource, Callable[[Json], bool]]] = [
        (PODS, _is_owned),
        (PERSISTENT_VOLUME_CLAIMS, _is_owned),
        (VOLUME_SNAPSHOTS, _is_owned),
        (
            VOLUME_SNAPSHOT_CONTENTS,
            lambda each: _is_owned(each) or each["spec"]["volumeSnapshotRef"]["namespace"] == NAMESPACE,
        ),
        (PERSISTENT_VOLUMES, lambda each: each.get("status", {}).get("phase") == "Released"),
        (PERSISTENT_VOLUMES, lambda each: each["spec"].get("claimRef", {}).get("namespace") == NAMESPACE),
    ]
    found = [f"{r.plural} {each['metadata']['name']}" for r, test in tests for each in bed.api.objects(r) if test(each)]
    for resource in RESOURCES.values():
        held = [each for each in bed.api.objects(resource) if is_final(each) and each["metadata"].get("finalizers")]
        found += [f"{resource.plural} {each['metadata']['name']}" for each in held]
    return found


def _is_owned(item: Json) -> bool:
    return _OWNER_LABEL in (item["metadata"].get("labels") or {})


def _read(bed: Bed, transfer: Json) -> Json:
    try:
        return bed.api.get(RESOURCES[transfer["kind"]], NAMESPACE, transfer["metadata"]["name"]) or {}
    except OSError:
        # An API server that was killed is not back yet.
        return {}


def _differences(source: Path, copy: Path) -> list[str]:
    argv = ["diff", "--recursive", "--no-dereference", "--exclude=.velero", str(source), str(copy)]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.splitlines()
