"""The record of deletions that have begun: a ConfigMap has the transfers of each backup until their snapshots are gone.

It is written before the first transfer is deleted. Without it nothing would tell a snapshot whose deletion was
interrupted from one whose custom resource was lost, and which may be the only copy of a volume. It also has what went
within a day, which limits what may go next, and the report of the last run.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec
from msgspec import structs

from client.backups.copies import Copy
from client.backups.retention import WINDOW, GoneCopy
from client.install.options import build_object
from core.errors import ContractError
from core.kube.client import KubeClient
from core.kube.errors import AlreadyExistsError, NotFoundError
from core.kube.resources import CONFIG_MAPS, LEASES
from core.kube.types import Manifest
from core.models.backups import REPORT_KEY, RetentionReport, read_report
from core.models.names import DELETIONS_CONFIGMAP, DELETIONS_LEASE
from core.snapshot_contract import TransferToDelete

__all__ = ["HISTORY_KEY", "DeletionRecord", "Located", "build_lease", "build_record", "locate"]

HISTORY_KEY: Final = "_history"
"""The key of what was deleted lately; no entry's key begins with an underscore."""

_RULES_KEY: Final = "_rules"
_RULES: Final = "Versions with other rules of retention cannot read this, and delete nothing."
"""A schedule keeps its image, and so its rules, until it is renewed: this keeps older ones from deleting."""

Located = tuple[str, TransferToDelete]
"""The name of a BackupStorageLocation, and a transfer with snapshots in it."""

_Seconds = int
"""Since the epoch; 0 stands for a time that is not known."""

_Entry = dict[str, dict[str, tuple[str, _Seconds]] | list[str]]
"""By the BackupStorageLocation, and by the transfer as `TransferToDelete` writes it: the name of the PVC, and when the
copy was completed. A list of transfers, as versions before wrote it, says neither."""

_History = dict[str, dict[str, dict[str, list[tuple[_Seconds, _Seconds]]]]]
"""By the location, the namespace and the name of the PVC: when copies went, and when they were completed."""


def build_record(namespace: str) -> Manifest:
    """Return the ConfigMap without an entry; applying it again keeps what there is."""
    return build_object("v1", CONFIG_MAPS.kind, DELETIONS_CONFIGMAP, namespace) | {"data": {_RULES_KEY: _RULES}}


def build_lease(namespace: str) -> Manifest:
    """Return the Lease of deletions without a holder: without `spec`, so that applying it again keeps what there is."""
    return build_object(LEASES.api_version, LEASES.kind, DELETIONS_LEASE, namespace)


class _Detail(NamedTuple):
    """What the limit of deletions needs of a recorded copy; one that was never completed has no time, and no limit."""

    claim: str = ""
    completed: datetime | None = None


def locate(copy: Copy) -> Located:
    """Return where the snapshots of the copy are."""
    return copy.location, TransferToDelete(copy.volume_namespace, copy.backup, copy.uid)


@dataclass
class DeletionRecord:
    """The record in a namespace; `entries` are as read and written by this process, by backup.

    One command writes at a time: that which holds the Lease of deletions.
    """

    client: KubeClient
    namespace: str
    entries: dict[str, dict[Located, _Detail]] = field(default_factory=dict)
    history: list[GoneCopy] = field(default_factory=list)
    report: RetentionReport | None = None

    async def read(self) -> None:
        """Read it; a ConfigMap that does not exist has no entries.

        Raises:
            ContractError: an entry is invalid: only these commands should write it.
            KubeError: it cannot be read.
        """
        stored = await self.client.read(CONFIG_MAPS, self.namespace, DELETIONS_CONFIGMAP)
        data = dict(stored.get("data") or {}) if stored else {}
        self.report = read_report(data)
        for key in (REPORT_KEY, _RULES_KEY):
            data.pop(key, None)
        history = data.pop(HISTORY_KEY, "{}")
        try:
            name = HISTORY_KEY
            self.history = _parse_history(history)
            self.entries = {}
            for name, text in data.items():
                self.entries[name] = _parse(text)
        except (ValueError, OverflowError) as e:
            place = f"ConfigMap {self.namespace}/{DELETIONS_CONFIGMAP}"
            raise ContractError(f"{place}: invalid entry {name}: {e}") from e

    @property
    def recorded(self) -> frozenset[Located]:
        """All transfers in it."""
        return frozenset(one for entry in self.entries.values() for one in entry)

    def find_gone(self, existing: Collection[str], now: datetime) -> list[GoneCopy]:
        """Return what went lately, with what is being deleted: recorded transfers that do not exist any more."""
        pending = [
            GoneCopy((one.volume_namespace, detail.claim), location, now, detail.completed)
            for entry in self.entries.values()
            for (location, one), detail in entry.items()
            if one.uid not in existing and detail.completed is not None
        ]
        return [*self.history, *pending]

    async def add(self, copies: Iterable[Copy]) -> None:
        """Note, in one request, that the snapshots of these transfers are to be deleted.

        Raises:
            KubeError: it cannot be written.
        """
        changed: dict[str, dict[Located, _Detail]] = {}
        for one in copies:
            entry = changed.setdefault(one.backup, dict(self.entries.get(one.backup, {})))
            entry[locate(one)] = _Detail(one.volume[1], one.completed if one.has_data else None)
        await self._write({backup: _format(entry) for backup, entry in changed.items()})
        self.entries |= changed

    async def drop(
        self, transfers: Collection[TransferToDelete], gone_at: datetime | None = None, *, proved: bool = False
    ) -> None:
        """Note that nothing is to be deleted any more of these transfers.

        `gone_at`: since they went then, with their snapshots; `proved`: by witnesses, not by one clock alone.

        Raises:
            KubeError: it cannot be written.
        """
        left, history = {}, self.history.copy()
        for backup, entry in self.entries.items():
            left[backup] = {where: detail for where, detail in entry.items() if where[1] not in transfers}
            history += [
                GoneCopy((one.volume_namespace, detail.claim), location, gone_at, detail.completed)
                for (location, one), detail in entry.items()
                if gone_at is not None and one in transfers and detail.completed is not None
            ]
        changes = {
            name: _format(entry) if entry else None for name, entry in left.items() if entry != self.entries[name]
        }
        if gone_at is not None:
            if proved:
                # What a wrong clock has noted in the future went before now.
                history = [one._replace(at=min(one.at, gone_at)) for one in history if one.at > gone_at - WINDOW]
            changes[HISTORY_KEY] = _format_history(history)
        if changes:
            await self._write(changes)
        self.entries = {name: entry for name, entry in left.items() if entry}
        self.history = history

    async def write_report(self, report: RetentionReport) -> None:
        """Keep the report of a run, for `nodeagent status` and the leader.

        Raises:
            KubeError: it cannot be written.
        """
        await self._write({REPORT_KEY: report.to_json()})

    async def forget(self, backup: str) -> None:
        """Take a backup that a person has deleted out of the last report.

        Raises:
            KubeError: it cannot be written.
        """
        if self.report is not None:
            held = [one for one in self.report.held if one.backup != backup]
            if gone := len(self.report.held) - len(held):
                await self.write_report(
                    structs.replace(self.report, held=held, held_count=self.report.held_count - gone)
                )

    async def _write(self, data: Mapping[str, str | None]) -> None:
        try:
            await self.client.patch(CONFIG_MAPS, self.namespace, DELETIONS_CONFIGMAP, {"data": data})
        except NotFoundError:
            record = build_record(self.namespace)
            kept = {key: text for key, text in data.items() if text is not None}
            try:
                await self.client.create(CONFIG_MAPS, record | {"data": record["data"] | kept})
            except AlreadyExistsError:
                await self.client.patch(CONFIG_MAPS, self.namespace, DELETIONS_CONFIGMAP, {"data": data})


def _to_seconds(moment: datetime | None) -> _Seconds:
    return int(moment.timestamp()) if moment is not None else 0


def _to_time(seconds: _Seconds) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds else None


def _format(entry: Mapping[Located, _Detail]) -> str:
    found: dict[str, dict[str, tuple[str, _Seconds]]] = {}
    for (location, one), detail in sorted(entry.items()):
        found.setdefault(location, {})[str(one)] = (detail.claim, _to_seconds(detail.completed))
    return msgspec.json.encode(found).decode()


def _parse(text: str) -> dict[Located, _Detail]:
    found: dict[Located, _Detail] = {}
    for location, entry in msgspec.json.decode(text, type=_Entry).items():
        details = entry if isinstance(entry, dict) else dict.fromkeys(entry, ("", 0))
        for one, (claim, completed) in details.items():
            found[location, TransferToDelete.parse(one)] = _Detail(claim, _to_time(completed))
    return found


def _format_history(history: Iterable[GoneCopy]) -> str:
    found: _History = {}
    for one in history:
        namespace, claim = one.volume
        times = found.setdefault(one.location, {}).setdefault(namespace, {}).setdefault(claim, [])
        times.append((_to_seconds(one.at), _to_seconds(one.completed)))
    return msgspec.json.encode(found).decode()


def _parse_history(text: str) -> list[GoneCopy]:
    return [
        GoneCopy((namespace, claim), location, datetime.fromtimestamp(at, UTC), datetime.fromtimestamp(completed, UTC))
        for location, namespaces in msgspec.json.decode(text, type=_History).items()
        for namespace, claims in namespaces.items()
        for claim, times in claims.items()
        for at, completed in times
    ]
