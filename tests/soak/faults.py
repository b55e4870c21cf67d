"""Faults for one transfer, and the final phases that each allows."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from core.kube.resources import CONFIG_MAPS, PODS
from tests.cluster.interruptions import evict, exhaust_memory, kill_kopia, kill_mover, movers_of
from tests.cluster.scenes import RESOURCES, is_final
from tests.soak.ground import Ground
from tests.soak.journal import Ending
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.processes import BedError
from tests.testbed.storage.objects import FAULT_CONFIG_MAP

WRONG_LOCATION = "soak-wrong-keys"
"""A storage location whose keys no server accepts."""

_ALL = ("DataUpload", "DataDownload", "PodVolumeBackup", "PodVolumeRestore")
_CLAIMS_ONLY = ("DataUpload", "DataDownload")
_STALL_SECONDS = 8
_LONGEST_DELAY_SECONDS = 12.0

_COMPLETED = Ending(frozenset({"Completed"}))


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        kinds: The kinds of transfer that it may affect.
        ending: How such a transfer may end.
        spoil: Changes the transfer before it is made.
        strike: Happens once it was made; `holds`: its data has to be moving then.
        patient: It ends only after one leader has seen it for minutes, which may be after the soak's other faults.
    """

    name: str
    kinds: tuple[str, ...] = _ALL
    ending: Ending = _COMPLETED
    spoil: Callable[[Json], None] | None = None
    strike: Callable[[Ground, Json, random.Random], None] | None = None
    holds: bool = False
    patient: bool = False


def hold(ground: Ground, transfer: Json) -> None:
    """Return once a transfer is held while data moves by its ground's gate, which is shut."""
    moving = ground.wait(
        transfer, lambda found: is_final(found) or found.get("status", {}).get("phase") == "InProgress"
    )
    if not moving or is_final(moving):
        raise BedError(f"{transfer['metadata']['name']} ended before it was held: {moving.get('status')}")
    ground.gate.wait_held(str(ground.mover(transfer)["status"]["podIP"]))


def _at_pod(strike: Callable[[Json], None]) -> Callable[[Ground, Json, random.Random], None]:
    """Interrupt a transfer by its mover pod; it continues in another attempt, so that it may not end as Failed."""
    return lambda ground, transfer, _chance: strike(ground.mover(transfer))


def _delete_pod(ground: Ground, transfer: Json, _chance: random.Random) -> None:
    pod = ground.mover(transfer)
    ground.bed.api.delete(PODS, NAMESPACE, transfer["metadata"]["name"])
    _wait_ended(pod)


def _evict_pod(ground: Ground, transfer: Json, _chance: random.Random) -> None:
    pod = ground.mover(transfer)
    evict(ground.bed, pod)
    _wait_ended(pod)


def _wait_ended(pod: Json) -> None:
    """Until then the gate stays shut: otherwise the mover might complete before the kubelet ends it."""
    for mover in movers_of(pod):
        mover.wait_gone()


def _stall(ground: Ground, _transfer: Json, _chance: random.Random) -> None:
    time.sleep(_STALL_SECONDS)


def _cancel(ground: Ground, transfer: Json, chance: random.Random) -> None:
    time.sleep(chance.uniform(0, _LONGEST_DELAY_SECONDS))
    body = {"spec": {"cancel": True}}
    ground.bed.api.patch(RESOURCES[transfer["kind"]], body, name=transfer["metadata"]["name"], namespace=NAMESPACE)


def _delete(ground: Ground, transfer: Json, chance: random.Random) -> None:
    time.sleep(chance.uniform(0, _LONGEST_DELAY_SECONDS))
    ground.bed.api.delete(RESOURCES[transfer["kind"]], NAMESPACE, transfer["metadata"]["name"])


def _fail_provisioning(ground: Ground, transfer: Json, _chance: random.Random) -> None:
    name = transfer["metadata"]["name"]
    _set_fault(ground, name, f"provision {NAMESPACE}/{name} fail:the disk is full")
    time.sleep(_STALL_SECONDS)
    _set_fault(ground, name, None)


def _set_fault(ground: Ground, name: str, line: str | None) -> None:
    """Ask the test bed's storage for a fault of one claim, or for none any more."""
    namespace, config_map = FAULT_CONFIG_MAP
    ground.bed.api.create(CONFIG_MAPS, {"metadata": {"namespace": namespace, "name": config_map}})
    ground.bed.api.patch(CONFIG_MAPS, {"data": {name: line}}, name=config_map, namespace=namespace)


def _lose_location(transfer: Json) -> None:
    transfer["spec"]["backupStorageLocation"] = "soak-nowhere"


def _take_wrong_keys(transfer: Json) -> None:
    transfer["spec"]["backupStorageLocation"] = WRONG_LOCATION


def _lose_source(transfer: Json) -> None:
    spec = transfer["spec"]
    match transfer["kind"]:
        case "DataUpload":
            spec["csiSnapshot"]["volumeSnapshot"] = "never-taken"
        case "PodVolumeBackup":
            spec["volume"] = "nothing"
        case _:
            spec["snapshotID"] = "0123456789abcdef0123456789abcdef"


def _failed(pattern: str) -> Ending:
    return Ending(frozenset({"Failed"}), pattern)


FAULTS = (
    Fault("mover killed", strike=_at_pod(kill_mover), holds=True),
    Fault("kopia killed", strike=_at_pod(kill_kopia), holds=True),
    Fault("out of memory", strike=_at_pod(exhaust_memory), holds=True),
    Fault("pod deleted", strike=_delete_pod, holds=True),
    Fault("pod evicted", strike=_evict_pod, holds=True),
    Fault("storage stalls", strike=_stall, holds=True),
    Fault("provisioning fails for a while", _CLAIMS_ONLY, strike=_fail_provisioning),
    Fault("canceled", ending=Ending(frozenset({"Canceled", "Completed"})), strike=_cancel),
    Fault("deleted", ending=Ending(frozenset({"deleted", "Canceled", "Completed"})), strike=_delete),
    Fault("no location", ending=_failed("BackupStorageLocation.*does not exist"), spoil=_lose_location, patient=True),
    Fault("wrong keys", ending=_failed("secret access key is not accepted"), spoil=_take_wrong_keys),
    Fault("no source", ending=_failed("does not exist|not in the repository|has no volume"), spoil=_lose_source),
)
