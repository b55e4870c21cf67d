"""Which fields of this version the served custom resource definitions drop, whose they are, and what to do about it."""

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import field

from core.kube.client import KubeClient
from core.kube.resources import (
    CUSTOM_RESOURCE_DEFINITIONS,
    DATA_DOWNLOADS,
    DATA_UPLOADS,
    POD_VOLUME_BACKUPS,
    POD_VOLUME_RESTORES,
    Resource,
)
from core.kube.types import UncheckedObject
from core.models.base import WireModel
from core.models.names import helm_release, is_ours

__all__ = ["DefinitionReport", "find_dropped", "judge_definitions", "read_definitions"]

_OF_ALL: Final = ("status.activities", "status.fallbackFull", "status.incrementalBytes")
_RESTORE_TYPE: Final = "spec.restoreType"

_FIELDS: Final[dict[Resource, tuple[str, ...]]] = {
    DATA_UPLOADS: ("spec.parentSnapshot", *_OF_ALL, "status.sourceSize"),
    DATA_DOWNLOADS: (_RESTORE_TYPE, "spec.csiSnapshot", "spec.snapshotSize", *_OF_ALL),
    POD_VOLUME_BACKUPS: ("spec.parentSnapshot", *_OF_ALL, "status.sourceSize"),
    POD_VOLUME_RESTORES: (_RESTORE_TYPE, "spec.snapshotSize", *_OF_ALL),
}
"""The fields that this version reads or writes, and that not all definitions have from Velero 1.17 on.

Source: tests/recordings/velero-*/crds, compared with ours by a test.
"""

_BY_NAME: Final = {resource.full_name: resource for resource in _FIELDS}


class DefinitionReport(WireModel):
    """What the definitions of transfers drop: a section of `/status`.

    `message` is empty if they have every field. `warning`: they have replaced newer ones; otherwise they are of an
    older Velero server, which does not use the fields. `next_velero`: they are Velero's own, of 1.19 or later.
    """

    message: str = ""
    warning: bool = False
    next_velero: bool = False


class _Schema(WireModel):
    properties: dict[str, "_Schema"] = field(default_factory=dict)
    keeps_unknown: bool = field(name="x-kubernetes-preserve-unknown-fields", default=False)

    def has(self, path: Sequence[str]) -> bool:
        if not path or self.keeps_unknown:
            return True
        child = self.properties.get(path[0])
        return child is not None and child.has(path[1:])


class _Validation(WireModel):
    schema: _Schema = field(name="openAPIV3Schema", default_factory=_Schema)


class _Version(WireModel):
    name: str
    validation: _Validation = field(name="schema", default_factory=_Validation)


class _Spec(WireModel):
    versions: list[_Version]


class _Definition(WireModel):
    spec: _Spec


async def read_definitions(client: KubeClient) -> list[UncheckedObject]:
    """Return the definitions of transfers, as far as they exist.

    Raises:
        KubeError: one cannot be read.
    """
    found = [await client.read(CUSTOM_RESOURCE_DEFINITIONS, "", name) for name in _BY_NAME]
    return [one for one in found if one is not None]


def find_dropped(definition: UncheckedObject) -> tuple[str, ...]:
    """Return the fields of this version that the API server drops from the objects of a definition.

    Raises:
        ContractError: the definition is invalid.
    """
    resource = _BY_NAME[definition["metadata"]["name"]]
    versions = _Definition.from_wire(definition).spec.versions
    schema = next((one.validation.schema for one in versions if one.name == resource.version), _Schema())
    return tuple(path for path in _FIELDS[resource] if not schema.has(path.split(".")))


def judge_definitions(definitions: Iterable[UncheckedObject]) -> DefinitionReport:
    """Return what the definitions drop, and whether that needs action.

    Ours were installed for a version that had fewer fields. Velero's own are of one release: where some have the fields
    of 1.19 and others do not, these have replaced newer ones.

    Raises:
        ContractError: a definition is invalid.
    """
    dropped = {one["metadata"]["name"]: (one, find_dropped(one)) for one in definitions}
    foreign = [fields for one, fields in dropped.values() if not is_ours(one)]
    lacking = {name: one for name, (one, fields) in dropped.items() if fields}
    warning = any(map(is_ours, lacking.values())) or (any(foreign) and not all(foreign))
    parts = [f"definition {name} lacks {', '.join(dropped[name][1])}" for name in sorted(lacking)]
    why = _explain_remedy(lacking.values()) if warning else "as Velero before 1.19 does, whose server uses none"
    return DefinitionReport(
        message=f"{'; '.join(parts)}: {why}" if parts else "",
        warning=warning,
        next_velero=_is_next_velero(dropped),
    )


def _explain_remedy(lacking: Iterable[UncheckedObject]) -> str:
    """Return who restores the fields: the command, a release of Helm, or Velero."""
    steps = set()
    for one in lacking:
        if release := helm_release(one):
            steps.add(f"upgrade the release {release} of Helm")
        elif is_ours(one):
            steps.add("run nodeagent install --crds-only")
        else:
            steps.add("apply the Velero server's again")
    return f"the API server drops these fields; {', '.join(sorted(steps, reverse=True))}"


def _is_next_velero(dropped: dict[str, tuple[UncheckedObject, tuple[str, ...]]]) -> bool:
    one, fields = dropped.get(DATA_DOWNLOADS.full_name, (None, ()))
    return one is not None and not is_ours(one) and _RESTORE_TYPE not in fields
