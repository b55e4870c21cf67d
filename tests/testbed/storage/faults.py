"""Faults that tests ask the storage for.

A fault is one value: `slow:SECONDS`, `fail:MESSAGE` or `never`. It is given by

* the annotation `bed.node-agent.test/fault` on the object (a claim or a VolumeSnapshot),
* the same annotation on its class,
* a line of any key of the ConfigMap `default/bed-faults`, for objects whose maker does not
  ask the test: `WHAT NAMESPACE/NAME FAULT`, where WHAT is `provision`, `snapshot`
  or `delete`, and NAMESPACE/NAME is a pattern, as in `provision velero/* slow:20`. A volume
  and a VolumeSnapshotContent have the namespace and name of the claim or snapshot they are for.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from tests.testbed.storage.objects import CONFIG_MAPS

if TYPE_CHECKING:
    from tests.testbed.api import Json
    from tests.testbed.storage.cache import Cache

__all__ = ["ANNOTATION", "CONFIG_MAP", "Fault", "find_fault"]

ANNOTATION = "bed.node-agent.test/fault"
CONFIG_MAP = ("default", "bed-faults")
_PARTS_OF_A_LINE = 3


@dataclass(frozen=True)
class Fault:
    """What goes wrong: `holds` returns whether it still does, `message` is set if it is an error."""

    kind: str
    value: str

    @property
    def message(self) -> str:
        """The error to report, empty if the fault is a mere wait."""
        return self.value.strip() if self.kind == "fail" else ""

    def raise_as(self, error: type[Exception]) -> None:
        """Raise the error to report, if there is one."""
        if self.message:
            raise error(self.message)

    def holds(self, since: str) -> bool:
        """Whether the object must not be served yet.

        Args:
            since: When it was made or its deletion asked for, as Kubernetes writes it.
        """
        if self.kind != "slow":
            return True
        age = datetime.now(UTC) - datetime.fromisoformat(since)
        return age.total_seconds() < float(self.value)


def find_fault(cache: Cache, what: str, item: Json, *classes: Json | None) -> Fault | None:
    """The fault that holds for an object now, from the nearest object that names one.

    Args:
        cache: Holds the ConfigMap.
        what: `provision`, `snapshot` or `delete`.
        item: The claim, or the VolumeSnapshot, or an object with the metadata of one.
        classes: The classes of the object.
    """
    metadata = item["metadata"]
    texts = [each["metadata"].get("annotations", {}).get(ANNOTATION) for each in (item, *classes) if each]
    name = f"{metadata.get('namespace', '')}/{metadata['name']}"
    texts.append(_from_config_map(cache, what, name))
    text: str | None = next((text for text in texts if text), None)
    if text is None:
        return None
    kind, _, value = text.partition(":")
    fault = Fault(kind, value)
    since = metadata.get("deletionTimestamp") or metadata["creationTimestamp"]
    return fault if fault.holds(since) else None


def _from_config_map(cache: Cache, what: str, name: str) -> str | None:
    found = cache.get(CONFIG_MAPS, *CONFIG_MAP) or {}
    # Each of those who want faults at the same time has a key.
    for line in "\n".join((found.get("data") or {}).values()).splitlines():
        parts = line.split(None, _PARTS_OF_A_LINE - 1)
        if len(parts) == _PARTS_OF_A_LINE and parts[0] == what and fnmatchcase(name, parts[1]):
            return str(parts[2])
    return None
