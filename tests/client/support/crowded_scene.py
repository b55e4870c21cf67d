"""A large cluster without a real API server: 10,000 transfers in all phases on 500 nodes."""

from tests.client.support.status_scene import StatusScene, transfer
from tests.support.objects import JsonDict

_NODES = 500
_TRANSFERS = 10_000
_KINDS = ("DataUpload", "DataDownload", "PodVolumeBackup", "PodVolumeRestore")
_PHASES = (*["Completed"] * 7, "Failed", "InProgress", "New")
_TIME = "2026-11-21T11:00:00Z"

CROWDED_PATHS = (
    "/",
    "/transfers",
    "/transfers?state=active&sort=node",
    "/transfers/du/t-00000",
    "/nodes/node-001",
    "/queue",
    "/repositories",
    "/repositories/app-0-default-kopia",
)


def crowded_scene() -> StatusScene:
    """Return the scene: of ten transfers seven are completed, one failed, one runs, and one is pending."""
    scene = StatusScene()
    for number in range(_NODES):
        scene.put_agent(f"node-{number:03}")
    spec = {"backupStorageLocation": "default", "maintenanceFrequency": "1h0m0s", "repositoryType": "kopia"}
    for number in range(100):
        name = f"app-{number}-default-kopia"
        scene.put("BackupRepository", name, spec=spec | {"volumeNamespace": f"app-{number}"}, status={"phase": "Ready"})
    for number in range(_TRANSFERS):
        kind, phase = _KINDS[number % len(_KINDS)], _phase_of(number)
        status: JsonDict = {"progress": {"totalBytes": 2**34, "bytesDone": 2**33}}
        if phase != "New":
            status |= {"node": f"node-{number % _NODES:03}", "acceptedTimestamp": _TIME, "startTimestamp": _TIME}
        if phase in {"Completed", "Failed"}:
            status["completionTimestamp"] = _TIME
        raw = transfer(kind, f"t-{number:05}", phase, reason="Queued" if phase == "New" else "", **status)
        if kind == "DataUpload":
            raw["spec"] |= {"sourceNamespace": f"app-{number % 97}", "sourcePVC": f"data-{number % 11}"}
        scene.kube.put(raw)
    waiting = [number for number in range(_TRANSFERS) if _phase_of(number) == "New"]
    places = [
        {"kind": _KINDS[number % len(_KINDS)], "name": f"t-{number:05}", "position": position}
        for position, number in enumerate(waiting, start=1)
    ]
    scene.answer(queue={"queued": len(waiting), "queue": places, "lastError": ""})
    return scene


def _phase_of(number: int) -> str:
    """Return a phase such that each kind and each node has all of them."""
    return _PHASES[(number // len(_KINDS) + number // _NODES) % len(_PHASES)]
