"""Reads a cluster once: a constant number of requests, apart from the pages of its lists.

Everything is read with the user's permissions. What cannot be read is named in the snapshot, and never looks healthy.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from client.installation import InstalledAgents, read_agents
from client.leader_page import LeaderPage, LeaderUnavailableError, node_of_holder, read_leader_page
from client.status import parse
from client.status.records import (
    TRANSFER_KINDS,
    AgentRecord,
    ClusterSnapshot,
    ConfigRecord,
    LeaseRecord,
    LocationRecord,
    TransferKind,
    TransferRecord,
    Unread,
    UnreadPart,
)
from core.errors import AgentError, ConfigError, ContractError
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError, UnauthorizedError, UnreachableError
from core.kube.types import Object, UncheckedObject
from core.models.backups import RetentionReport, deletes_by_old_rules, read_report
from core.models.names import AGENT_SELECTOR, DELETIONS_CONFIGMAP, DISPATCHER_LEASE, SCHEDULE_LABEL
from nodeagent.config.keys import LoadConcurrency
from nodeagent.coverage.read import ObservedVolumes, VolumeReader
from nodeagent.runtime.settings import Settings

_T = TypeVar("_T")

_NO_CONFIG = (ConfigRecord(), LoadConcurrency())


class StatusReader:
    """Reads the cluster for one command.

    An API server that does not answer is an UnreachableError, and one that rejects the credentials an
    UnauthorizedError. All else that cannot be read is named in the snapshot.
    """

    def __init__(self, client: KubeClient, namespace: str, *, now: Callable[[], datetime]) -> None:
        """Read through `client`; `now` returns the API server's time."""
        self._client = client
        self._namespace = namespace
        self.now = now
        self._unread: list[Unread] = []

    async def read(self) -> ClusterSnapshot:
        """Return everything, as far as it can be read."""
        self._unread = []
        namespace = self._namespace
        no_agents = tuple[AgentRecord, ...]()
        reading = asyncio.create_task(self._try(UnreadPart.AGENTS, self._read_agents, no_agents), name="agents")
        cron_jobs = asyncio.create_task(self._list_cron_jobs(), name="CronJobs")
        rules, agents, transfers, volumes, repositories, locations = await asyncio.gather(
            self._read_rules(reading, lambda: cron_jobs),
            reading,
            self._read_transfers(TRANSFER_KINDS),
            VolumeReader(self._client, namespace, self.now, cron_jobs=cron_jobs).read(),
            self._read_all(
                UnreadPart.REPOSITORIES, Selection(kube.BACKUP_REPOSITORIES, namespace), parse.repository_record
            ),
            self._read_locations(),
        )
        return dataclasses.replace(
            rules,
            at=self.now(),
            transfers=transfers,
            volumes=volumes.plan(rules.config.leave_out_namespaces),
            agents=agents,
            repositories=repositories,
            locations=locations,
            unread=tuple(self._unread),
        )

    async def observe_volumes(self, volume_namespace: str = "") -> ObservedVolumes:
        """Return the volumes, of one namespace if one is named, and the schedules that are to back them up."""
        return await VolumeReader(self._client, self._namespace, self.now, volume_namespace).read()

    async def read_volumes(self, volume_namespace: str = "") -> ClusterSnapshot:
        """Return the backups and volumes, of one namespace if one is named, and the configuration alone."""
        self._unread = []
        installed, transfers, volumes, locations = await asyncio.gather(
            self._try(UnreadPart.FLAGS, self._read_installed, None),
            self._read_transfers([kind for kind in TRANSFER_KINDS if not kind.restores]),
            self.observe_volumes(volume_namespace),
            self._read_locations(),
        )
        settings = installed.settings if installed is not None else None
        config, _ = await self._try(UnreadPart.CONFIG, lambda: self._read_config(settings), _NO_CONFIG)
        return ClusterSnapshot(
            self._namespace,
            self.now(),
            transfers=transfers,
            config=config,
            volumes=volumes.plan(config.leave_out_namespaces),
            locations=locations,
            unread=tuple(self._unread),
        )

    async def _read_locations(self) -> tuple[LocationRecord, ...]:
        places = Selection(kube.BACKUP_STORAGE_LOCATIONS, self._namespace)
        return await self._read_all(UnreadPart.LOCATIONS, places, parse.location_record)

    async def _read_transfers(self, kinds: Sequence[TransferKind]) -> tuple[TransferRecord, ...]:
        none = list[TransferRecord]()
        found = await asyncio.gather(
            *(self._try(UnreadPart.TRANSFERS, partial(self._list, one), none, restores=one.restores) for one in kinds)
        )
        return tuple(record for listed in found for record in listed)

    async def read_rules(self, agents: Sequence[AgentRecord]) -> ClusterSnapshot:
        """Return what no watch shows: the leader, its page, the settings, retention; by a handful of requests."""
        self._unread = []
        known: asyncio.Future[Sequence[AgentRecord]] = asyncio.get_running_loop().create_future()
        known.set_result(agents)
        read = await self._read_rules(known, self._list_cron_jobs)
        return dataclasses.replace(read, unread=tuple(self._unread))

    async def _list(self, kind: TransferKind) -> list[TransferRecord]:
        found: list[TransferRecord] = []
        async for texts in self._client.raw_pages(Selection(kind.resource, self._namespace)):
            found += [parse.decode_transfer(kind, text) for text in texts]
        return found

    async def _read_rules(
        self,
        agents: Awaitable[Sequence[AgentRecord]],
        list_cron_jobs: Callable[[], Awaitable[Sequence[UncheckedObject]]],
    ) -> ClusterSnapshot:
        lease, installed, retention, old_schedules = await asyncio.gather(
            self._try(UnreadPart.LEASE, self._read_lease, LeaseRecord()),
            self._try(UnreadPart.FLAGS, self._read_installed, None),
            self._try(UnreadPart.RETENTION, self._read_retention, None),
            self._try(UnreadPart.RETENTION, lambda: _find_old_schedules(list_cron_jobs()), tuple[str, ...]()),
        )
        settings = installed.settings if installed is not None else None
        page, (config, concurrency) = await asyncio.gather(
            self._try(UnreadPart.PAGE, lambda: self._read_page(settings, lease, agents), None),
            self._try(UnreadPart.CONFIG, lambda: self._read_config(settings), _NO_CONFIG),
        )
        slots = await self._try(UnreadPart.NODES, lambda: self._read_slots(concurrency), dict[str, int]())
        return ClusterSnapshot(
            self._namespace,
            self.now(),
            lease=lease,
            config=config,
            slots=slots,
            settings=settings,
            wanted_agents=installed.wanted if installed is not None else 0,
            ready_agents=installed.ready if installed is not None else 0,
            page=page,
            retention=retention,
            old_schedules=old_schedules,
        )

    async def _try(
        self, part: UnreadPart, read: Callable[[], Awaitable[_T]], otherwise: _T, *, restores: bool = False
    ) -> _T:
        try:
            return await read()
        except (UnreachableError, UnauthorizedError):
            if part is not UnreadPart.PAGE:
                raise
            self._unread.append(Unread(part, "it did not answer in time"))
        except AgentError as e:
            self._unread.append(Unread(part, str(e), restores=restores))
        return otherwise

    async def _each(self, part: UnreadPart, selection: Selection, build: Callable[[Object], _T]) -> tuple[_T, ...]:
        records = []
        async for page in self._client.pages(selection):
            # Each was logged, which is a note about the answer.
            names = [str((raw.get("metadata") or {}).get("name", "?")) for raw in page.malformed]
            self._unread += [Unread(part, f"{name} does not have the form of its kind") for name in names]
            for raw in page.items:
                try:
                    records.append(build(raw))
                except ContractError as e:
                    self._unread.append(Unread(part, str(e)))
        return tuple(records)

    async def _read_agents(self) -> tuple[AgentRecord, ...]:
        """Return the records of all agents; hundreds of pods cost too much to be read as a whole."""
        selection = Selection(kube.PODS, self._namespace, AGENT_SELECTOR)
        texts = [text async for page in self._client.raw_pages(selection) for text in page]
        return tuple(parse.decode_agent(text) for text in texts)

    async def _read_all(self, part: UnreadPart, selection: Selection, build: Callable[[Object], _T]) -> tuple[_T, ...]:
        return await self._try(part, lambda: self._each(part, selection, build), ())

    async def _read_lease(self) -> LeaseRecord:
        record = parse.lease_record(*await self._client.read_stamped(kube.LEASES, self._namespace, DISPATCHER_LEASE))
        return replace(record, seen=self.now())

    async def _read_installed(self) -> InstalledAgents:
        """Return the agents' settings, and how many agents there are to be."""
        try:
            return await read_agents(self._client, self._namespace)
        except ConfigError as e:
            if isinstance(e.__cause__, KubeError):
                raise e.__cause__ from e
            raise

    async def _read_retention(self) -> RetentionReport | None:
        stored = await self._client.read(kube.CONFIG_MAPS, self._namespace, DELETIONS_CONFIGMAP)
        return read_report(stored.get("data") if stored else None)

    async def _list_cron_jobs(self) -> Sequence[UncheckedObject]:
        return await self._client.list(Selection(kube.CRON_JOBS, self._namespace, label_selector=SCHEDULE_LABEL))

    async def _read_page(
        self, settings: Settings | None, lease: LeaseRecord, agents: Awaitable[Sequence[AgentRecord]]
    ) -> LeaderPage | None:
        node = node_of_holder(lease.holder)
        pods = [agent.pod for agent in await agents if node and agent.node == node]
        if settings is None or not pods:
            missing = "the flags of the agents are not known" if settings is None else "there is no leader with a pod"
            raise LeaderUnavailableError(missing)
        return await read_leader_page(self._client, self._namespace, settings, pods[0])

    async def _read_config(self, settings: Settings | None) -> tuple[ConfigRecord, LoadConcurrency]:
        if settings is None:
            raise ConfigError("the flags of the agents are not known, which name their ConfigMap")
        name = settings.config_map_name
        return parse.config_record(
            name, await self._client.read(kube.CONFIG_MAPS, self._namespace, name) if name else None
        )

    async def _read_slots(self, concurrency: LoadConcurrency) -> dict[str, int]:
        """Return the slots of each node; nodes are read only where rules for single ones exist."""
        if not concurrency.per_node_config:
            return {}
        texts = [text async for page in self._client.raw_pages(Selection(kube.NODES)) for text in page]
        return parse.slots_by_node(texts, concurrency)


async def _find_old_schedules(cron_jobs: Awaitable[Sequence[UncheckedObject]]) -> tuple[str, ...]:
    return tuple(one["metadata"]["name"] for one in await cron_jobs if deletes_by_old_rules(one))
