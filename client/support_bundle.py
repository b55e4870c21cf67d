"""Collects what is needed to help with an installation, without secrets (`client.bundle_fields`).

Everything is read with the user's permissions. What cannot be read is named in the bundle, and the rest is collected.
Lists are read page by page, logs and pages of agents are limited in size and number.
"""

import io
import json
import tarfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from client.bundle_fields import COLLECTED, CONFIG_MAP_FIELDS, Collected, select_fields
from client.installation import read_settings
from client.leader_page import check_reachable, status_address
from client.session import Session
from core.errors import AgentError
from core.kube.client import Selection
from core.kube.errors import UnauthorizedError, UnreachableError
from core.kube.resources import CONFIG_MAPS, LEASES, PODS
from core.kube.types import Pod
from core.models import names as wire
from core.models.base import JsonDict, format_time
from core.redact import redact, redact_values
from core.version import VERSION
from exposer.pod_status import is_ready, mover_container
from nodeagent.runtime.settings import Settings

_AGENT_LOG_BYTES: Final = 256 * 1024
_MOVER_LOG_BYTES: Final = 64 * 1024
_PODS: Final = 20
"""Agents whose pages, and pods whose logs are collected; those that are not ready, and the newest, come first."""

_AGENT_CONTAINER: Final = "node-agent"
"""Source: Velero v1.18, pkg/install/daemonset.go; ours has the same name."""

_PAGE_BYTES: Final = 2 * 1024 * 1024


@dataclass(frozen=True)
class BundleFile:
    """One file of a bundle, and what it has in a few words."""

    name: str
    about: str
    content: bytes


@dataclass
class Bundle:
    """The files of a bundle, and what is missing in it, one sentence each."""

    files: list[BundleFile] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


class BundleReader:
    """Reads one namespace, and the parts of the cluster that concern it."""

    def __init__(self, tools: Session) -> None:
        self._client = tools.client
        self._namespace = tools.namespace
        self._tools = tools
        self._bundle = Bundle()

    async def read(self) -> Bundle:
        """Return the bundle, with a file `manifest.json` that lists the others and what is missing.

        Raises:
            UnreachableError: the API server does not answer.
            UnauthorizedError: it rejects the credentials.
        """
        self._bundle = bundle = Bundle()
        for one in COLLECTED:
            self._tools.on_progress(f"reading {one.resource.plural}")
            async with _noted(bundle, f"{one.file}: {one.resource.plural}"):
                await self._add_objects(one)
        settings: Settings | None = None
        async with _noted(bundle, "configuration and pages: the flags of the agents"):
            settings = await read_settings(self._client, self._namespace)
        await self._add_named(settings)
        async with _noted(bundle, "logs and pages: the pods"):
            await self._add_pods(settings)
        about = {
            "namespace": self._namespace,
            "version": VERSION,
            "at": format_time(self._tools.now()),
            "files": [{"name": one.name, "about": one.about, "bytes": len(one.content)} for one in bundle.files],
            "missing": bundle.missing,
        }
        self._add_json("manifest.json", "what this bundle has, and what is missing", about)
        return bundle

    async def _add_objects(self, one: Collected) -> None:
        namespace = self._namespace if one.resource.namespaced else ""
        objects: list[JsonDict] = []
        # Whole objects of one page at a time are in memory.
        async for page in self._client.pages(Selection(one.resource, namespace, one.selector)):
            objects += [select_fields(raw, one.fields) for raw in page.items if one.keeps(raw)]
            names = [str((raw.get("metadata") or {}).get("name", "?")) for raw in page.malformed]
            self._bundle.missing += [redact(f"{one.file}: {name} does not have the form of its kind") for name in names]
        self._add_json(one.file, f"{len(objects)} {one.resource.plural}", objects)

    async def _add_named(self, settings: Settings | None) -> None:
        """Add the ConfigMaps that configure the agents, the ledger of admissions, and the leader's Lease."""
        names = [wire.ADMISSIONS_CONFIGMAP]
        if settings is not None:
            maps = (settings.config_map_name, settings.backup_repository_config_map, settings.maintenance_config_map)
            names += [name for name in maps if name]
        wanted = [(CONFIG_MAPS, name, CONFIG_MAP_FIELDS) for name in names]
        lease = {"spec": {"holderIdentity": True, "renewTime": True, "leaseDurationSeconds": True}}
        for resource, name, fields in [*wanted, (LEASES, wire.DISPATCHER_LEASE, lease)]:
            async with _noted(self._bundle, f"{resource.kind} {name}"):
                raw = await self._client.read(resource, self._namespace, name)
                if raw is None:
                    self._bundle.missing.append(f"{resource.kind} {name} does not exist")
                else:
                    about = f"{resource.kind} {name}"
                    self._add_json(f"objects/{resource.kind.lower()}-{name}.json", about, select_fields(raw, fields))

    async def _add_pods(self, settings: Settings | None) -> None:
        agents = await self._client.list(Selection(PODS, self._namespace, wire.AGENT_SELECTOR))
        movers = await self._client.list(Selection(PODS, self._namespace, wire.OWNER_UID_LABEL))
        for pods, limit, what in ((agents, _AGENT_LOG_BYTES, "agent"), (movers, _MOVER_LOG_BYTES, "data mover")):
            chosen = _first(pods)
            if len(chosen) < len(pods):
                self._bundle.missing.append(
                    f"logs of {len(pods) - len(chosen)} more pods of kind {what}: at most {_PODS}"
                )
            for pod in chosen:
                await self._add_log(pod, limit, what)
        if settings is None:
            return
        async with _noted(self._bundle, "pages of agents"):
            check_reachable(settings)
            for pod in _first(agents):
                await self._add_pages(pod["metadata"]["name"], settings)

    async def _add_log(self, raw: Pod, limit: int, what: str) -> None:
        """Add the log of the container that is ours: others in the pod, which are named, may log anything."""
        pod, (container, *others) = raw["metadata"]["name"], _containers(raw)
        self._tools.on_progress(f"reading the log of {pod}")
        if others:
            shown = redact(", ".join(others))
            self._bundle.missing.append(f"log of Pod {pod}: the other containers' logs are left out: {shown}")
        async with _noted(self._bundle, f"log of Pod {pod}"):
            text = await self._client.pod_log(self._namespace, pod, container=container, limit_bytes=limit)
            self._add_text(f"logs/{pod}.log", f"end of the log of a pod of kind {what}", text)

    async def _add_pages(self, pod: str, settings: Settings) -> None:
        self._tools.on_progress(f"reading the pages of {pod}")
        async with _noted(self._bundle, f"/status of Pod {pod}"):
            port = status_address(settings).port
            page = await self._client.pod_page(self._namespace, pod, port=port, path="/status")
            self._add_json(f"pages/{pod}-status.json", "status page of an agent", redact_values(page))
        async with _noted(self._bundle, f"/metrics of Pod {pod}"):
            port = settings.metrics_address.port
            text = await self._client.pod_text(self._namespace, pod, port=port, path="/metrics")
            self._add_text(f"pages/{pod}-metrics.txt", "metrics of an agent", text[:_PAGE_BYTES])

    def _add_text(self, name: str, about: str, text: str) -> None:
        self._bundle.files.append(BundleFile(name, about, redact(text).encode(errors="replace")))

    def _add_json(self, name: str, about: str, content: Any) -> None:  # noqa: ANN401 - any JSON value
        text = json.dumps(content, indent=1, sort_keys=True) + "\n"
        self._bundle.files.append(BundleFile(name, about, text.encode()))


@asynccontextmanager
async def _noted(bundle: Bundle, what: str) -> AsyncIterator[None]:
    """Record what the block could not read; a cluster that does not answer at all is an error."""
    try:
        yield
    except AgentError as e:
        if isinstance(e, UnreachableError | UnauthorizedError) and "of Pod" not in what:
            raise
        bundle.missing.append(redact(f"{what}: {e}"))


def _containers(pod: Pod) -> list[str]:
    """Return the names of the pod's containers, ours first: an agent's has one name, a data mover's its owner's UID."""
    names = [str(one.get("name", "")) for one in (pod.get("spec") or {}).get("containers") or []]
    mover = mover_container(pod)
    ours = {_AGENT_CONTAINER, mover and mover.get("name")}
    return sorted(names, key=lambda name: name not in ours) or [""]


def _first(pods: Sequence[Pod]) -> list[Pod]:
    """Return the pods that tell most: those that are not ready, then the newest."""
    newest = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), reverse=True)
    return sorted(newest, key=is_ready)[:_PODS]


def pack(bundle: Bundle, folder: str, at: datetime) -> bytes:
    """Return the bundle as tar.gz; its files are in `folder`, and have the time `at`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for one in bundle.files:
            info = tarfile.TarInfo(f"{folder}/{one.name}")
            info.size, info.mtime, info.mode = len(one.content), int(at.timestamp()), 0o600
            archive.addfile(info, io.BytesIO(one.content))
    return buffer.getvalue()
