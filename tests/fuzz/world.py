"""A whole agent on a fake API server, with every kind of object that it reads; and what must hold of it.

Each case distorts one object, or some answers, for a few seconds of virtual time. The agent must go on, log
no unexpected exception, and handle healthy transfers afterward.
"""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.clock import Deadline
from core.errors import AgentError
from core.kube.client import KubeClient
from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    CONFIG_MAPS,
    DATA_UPLOADS,
    EVENTS,
    JOBS,
    PERSISTENT_VOLUMES,
    PRIORITY_CLASSES,
    SECRETS,
    VOLUME_SNAPSHOT_CONTENTS,
    Resource,
)
from core.kube.transport import Retry
from core.models.names import COPIES_ANNOTATION, COPY_LABEL, OUTCOME_ANNOTATION, OWNER_UID_LABEL, REPO_NAME_LABEL
from datamover.kinds import TRANSFER_KINDS
from datamover.kopia.storage_calls import WaitReporter
from datamover.pod.cluster import ClusterReader
from datamover.pod.follower import TransferFollower, WatchedTransfer
from datamover.runtime.cancellation import Canceler
from exposer.template import AgentTemplate
from nodeagent.app import Agent, build_agent
from nodeagent.config.parse import parse_config
from nodeagent.runtime.settings import MaintenanceSwitch, Settings
from nodeagent.startup import AgentSpec
from tests.fuzz.distorter import Distorter, ObjectKey, key_of
from tests.nodeagent.support.dispatching import agent_pod, cluster_node
from tests.nodeagent.support.harness import accepted, volumes_of
from tests.nodeagent.support.simulation import BACKUP_DONE, RESTORE_DONE
from tests.nodeagent.support.transfers import (
    NAMESPACE,
    NODE,
    data_download,
    data_upload,
    mover_pod,
    pod_volume_backup,
    pod_volume_restore,
    workload_pod,
)
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict, build_object

if TYPE_CHECKING:
    from tests.fuzz.cases import Round

CONFIG_MAP = "agent-config"
_SECONDS = 7.0
"""Virtual time of a case: more than the pause between two checks of a pending transfer."""

_ANSWERS = 3
"""The number of answers that are distorted as a whole."""

_RECORDED = Path(__file__).parents[1] / "recordings" / "velero-1.18.2" / "backuprepository.json"
_CONFIG = {
    "loadConcurrency": {
        "globalConfig": 3,
        "perNodeConfig": [{"nodeSelector": {"matchLabels": {"a": "b"}}, "number": 4}],
    },
    "priorityClassName": "low",
    "backupPVC": {"hostpath": {"secretNames": ["token"], "configMapNames": ["kms"]}},
    "restorePVC": {"secretNames": ["token"]},
}
_WARNING = {
    "type": "Warning",
    "reason": "FailedMount",
    "message": "no such volume",
    "lastTimestamp": "2026-11-21T12:00:00Z",
}
_PENDING: JsonDict = {"conditions": [{"type": "PodScheduled", "status": "True"}], "phase": "Pending"}


def _running(transfer: JsonDict, **status: str) -> JsonDict:
    """Return a transfer of `NODE` that is InProgress."""
    whole = accepted(transfer)
    whole["status"] = {"phase": "InProgress", "node": NODE, "startTimestamp": "2026-11-21T11:00:00Z"} | status
    return whole


def _ended(message: str, exit_code: int = 0) -> JsonDict:
    terminated = {"exitCode": exit_code, "message": message, "reason": "Completed"}
    return {"containerStatuses": [{"name": "mover", "state": {"terminated": terminated}}], "phase": "Succeeded"}


def _event(name: str, about: JsonDict, **fields: str) -> JsonDict:
    meta = about["metadata"]
    ref = {"kind": about["kind"], "namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]}
    return build_object(EVENTS, name, meta["namespace"], involvedObject=ref, **fields)


def _transfers() -> list[JsonDict]:
    kept = {
        OUTCOME_ANNOTATION: json.dumps({"phase": "Completed", "result": json.loads(RESTORE_DONE), "pvName": "pv-1"})
    }
    done = accepted(data_upload("done", annotations={COPIES_ANNOTATION: "ConfigMap/copy"}))
    done["status"] = {"phase": "Completed"}
    return [
        data_upload("upload"),
        data_download("download"),
        pod_volume_backup("backup"),
        pod_volume_restore("restore"),
        accepted(data_upload("exposing")),
        _running(data_upload("moving")),
        _running(data_upload("ended")),
        _running(data_download("bound", annotations=kept)),
        accepted(data_upload("away"), node="node-b"),
        done,
    ]


def _pods(transfers: dict[str, JsonDict]) -> list[JsonDict]:
    waiting = mover_pod(transfers["exposing"], **_PENDING)
    return [
        agent_pod(NODE, name=socket.gethostname().lower()),
        agent_pod("node-b", ready=False),
        waiting,
        mover_pod(transfers["moving"], phase="Running"),
        mover_pod(transfers["ended"], **_ended(BACKUP_DONE)),
        agent_pod("node-c", name="leaked", labels={OWNER_UID_LABEL: "no-owner"}),
        _event("waiting.1", waiting, **_WARNING),
        _event("moving.1", transfers["moving"], reason="Data-Path-Progress", message='{"totalBytes":9,"doneBytes":3}'),
        _event("moving.2", transfers["moving"], reason="Data-Path-Waiting", message="waiting for the storage"),
    ]


def _object(resource: Resource, name: str, namespace: str = NAMESPACE, /, **fields: Any) -> JsonDict:
    return build_object(resource, name, namespace if resource.namespaced else "", **fields)


def _surroundings() -> list[JsonDict]:
    location = {"provider": "aws", "objectStorage": {"bucket": "b"}, "credential": {"name": "keys", "key": "cloud"}}
    repository: JsonDict = json.loads(_RECORDED.read_text())[0]["object"]
    volume = {"claimRef": {"namespace": NAMESPACE, "name": "bound", "uid": "uid-of-claim"}, "csi": {"driver": "d"}}
    content = {"deletionPolicy": "Delete", "driver": "d", "source": {"snapshotHandle": "h"}}
    owned = {OWNER_UID_LABEL: "no-owner"}
    labels = {REPO_NAME_LABEL: repository["metadata"]["name"]}
    reference = {"volumeSnapshotRef": {"namespace": NAMESPACE, "name": "x"}}
    done = {"succeeded": 1, "completionTime": "2026-11-21T11:00:00Z", "conditions": []}
    return [
        _object(CONFIG_MAPS, CONFIG_MAP, data={"a": json.dumps(_CONFIG)}),
        _object(SECRETS, "keys", data={"cloud": "eA=="}),
        _object(SECRETS, "token", "app", data={"k": "eA=="}),
        _object(SECRETS, "token", "app3", type="a"),
        _object(CONFIG_MAPS, "kms", "app", data={"k": "v"}),
        _object(CONFIG_MAPS, "copy", metadata={"labels": owned | {COPY_LABEL: "no-owner"}}),
        _object(BACKUP_STORAGE_LOCATIONS, "default", spec=location),
        repository,
        _object(JOBS, "maintain", metadata={"labels": labels}, status=done),
        _object(PRIORITY_CLASSES, "low", value=1),
        _object(PERSISTENT_VOLUMES, "pv-1", spec=volume),
        _object(VOLUME_SNAPSHOT_CONTENTS, "leaked", metadata={"labels": owned}, spec=content | reference),
        cluster_node(NODE),
        cluster_node("node-b", ready=False),
    ]


def _initial_objects() -> list[JsonDict]:
    transfers = _transfers()
    named = {transfer["metadata"]["name"]: transfer for transfer in transfers}
    volumes = [obj for transfer in transfers if transfer["kind"].startswith("Data") for obj in volumes_of(transfer)]
    return [*_surroundings(), *volumes, workload_pod(named["backup"]), *_pods(named), *transfers]


INITIAL = {key_of(obj): obj for obj in _initial_objects()}
"""The objects of a new world."""


@dataclass
class Log(logging.Handler):
    """Keeps the exceptions that were logged and not raised on purpose."""

    unexpected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        kind = record.exc_info[0] if record.exc_info else None
        if kind is not None and not issubclass(kind, (AgentError, TimeoutError)):
            self.unexpected.append(f"{kind.__name__}: {logging.Formatter().formatException(record.exc_info)}: {text}")  # type: ignore[arg-type] # it is there

    __hash__ = object.__hash__


@dataclass
class World:
    """A running agent, the server behind it, and what it logged."""

    kube: FakeKube
    distorter: Distorter
    agent: Agent
    task: "asyncio.Task[None]"
    log: Log
    touches: int = 0

    async def endure(self, one: "Round") -> None:
        """Let objects, and some answers, be read distorted for a while."""
        self.restore()
        self.distorter.objects = {case.key: case.distort for case in one.cases}
        self.distorter.plural, self.distorter.answer, self.distorter.answers_left = one.plural, one.body, _ANSWERS
        for case in one.cases:
            self.touch(case.key)
        if one.relist:
            self.kube.compact()
            self.kube.watches.cut()
        await asyncio.sleep(_SECONDS)
        await self._read_as_mover()
        self.distorter.objects, self.distorter.plural = {}, ""
        self.check()

    def restore(self) -> None:
        """Store the initial objects again."""
        for obj in INITIAL.values():
            self.kube.put(obj)

    def touch(self, key: ObjectKey) -> None:
        """Change an object, so that every watch delivers it."""
        self.touches += 1
        obj = INITIAL[key]
        labels = obj["metadata"].get("labels", {}) | {"fuzz": str(self.touches)}
        self.kube.put(obj | {"metadata": obj["metadata"] | {"labels": labels}})

    def check(self) -> None:
        """Fail if the agent has ended, or logged an exception that was not raised on purpose."""
        if self.task.done():
            self.task.result()
            raise AssertionError("the agent has ended")
        json.dumps(self.agent.report())
        self.agent.parts.metrics.render()
        assert self.log.unexpected == []

    async def check_canaries(self) -> None:
        """Fail if healthy transfers are not handled by the leader or by the node."""
        self.restore()
        unknown = data_upload("canary-new")
        unknown["spec"]["backupStorageLocation"] = "absent"
        self.kube.put(unknown)
        canceled = accepted(data_upload("canary-canceled"))
        canceled["spec"]["cancel"] = True
        self.kube.put(canceled)
        await self._until("canary-new", "Failed")
        await self._until("canary-canceled", "Canceled")
        self.check()

    async def _until(self, name: str, phase: str) -> None:
        async with asyncio.timeout(300):
            while self._phase(name) != phase:
                await asyncio.sleep(0.5)

    def _phase(self, name: str) -> str:
        found = self.kube._store.find(DATA_UPLOADS, NAMESPACE, name)
        return str((found or {}).get("status", {}).get("phase", ""))

    async def _read_as_mover(self) -> None:
        """Read what a data mover reads; only errors that were raised on purpose may end a read."""
        clock = LoopClock()
        client = KubeClient(self.distorter, Retry(clock, attempts=1))
        reader, deadline = ClusterReader(client, clock, NAMESPACE), Deadline.after(clock, timedelta(seconds=1))
        with suppress(AgentError):
            await reader.location_secrets(await reader.location("default"))
        with suppress(AgentError):
            await reader.ensure_repository("app", "default", deadline=deadline, reporter=WaitReporter())
        with suppress(AgentError):
            await reader.password()
        watched = WatchedTransfer(TRANSFER_KINDS["data-upload"], NAMESPACE, "moving")
        follower = TransferFollower(client, watched, clock=clock, canceler=Canceler())
        task = asyncio.create_task(follower.run(), name="follower")
        await asyncio.sleep(0.1)
        assert not task.done(), "the follower has ended"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    """Run an agent that leads."""
    kube = FakeKube()
    for obj in INITIAL.values():
        kube.put(obj)
    clock, distorter = LoopClock(), Distorter(kube)
    settings = Settings(NODE, namespace=NAMESPACE, config_map_name=CONFIG_MAP, maintenance=MaintenanceSwitch.ON)
    template = AgentTemplate("mover:1", host_pods="/host_pods")
    spec = AgentSpec(settings, NAMESPACE, parse_config(json.dumps(_CONFIG)), template)
    agent = build_agent(KubeClient(distorter, Retry(clock)), clock, spec)
    log = Log()
    root = logging.getLogger()
    root.addHandler(log)
    task = asyncio.create_task(agent.run(), name="agent")
    try:
        await asyncio.sleep(_SECONDS)
        yield World(kube, distorter, agent, task, log)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        root.removeHandler(log)
