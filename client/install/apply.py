"""Server-side apply of an installation: conflicts first, definitions next, then everything else in its order.

Before the first object is applied, all of them are tried: a conflict or an invalid object changes nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, NamedTuple

from client.install.options import place_of, resource_of
from client.session import Session
from core.clock import Clock, Deadline
from core.errors import AgentError
from core.kube.client import KubeClient
from core.kube.errors import ApplyConflictError, InvalidError, NotFoundError, NotServedError
from core.kube.resources import CUSTOM_RESOURCE_DEFINITIONS, NAMESPACES, Resource
from core.kube.transport import is_unserved
from core.kube.types import Manifest, Object
from core.models.names import helm_release, is_ours
from nodeagent.runtime.preflight import schema_of

_TIMEOUT: Final = timedelta(minutes=1)
"""An API server serves a definition within seconds."""

_POLL_SECONDS: Final = 0.2


class DefinitionError(AgentError):
    """A definition is not served: its names clash, or the API server is too slow."""


async def _sort_definitions(
    client: KubeClient, definitions: Sequence[Manifest]
) -> tuple[list[Manifest], dict[str, str]]:
    """Return which definitions do not exist yet or are ours and older, and why the others stay, by their names."""
    applied, kept = [], {}
    for definition in definitions:
        name = definition["metadata"]["name"]
        found = await client.read(CUSTOM_RESOURCE_DEFINITIONS, "", name)
        if found is not None and found["metadata"].get("deletionTimestamp"):
            raise DefinitionError(f"CustomResourceDefinition {name} is being deleted, with all its objects: try again")
        if found is not None and (why := _explain_kept(definition, found)):
            kept[name] = why
        else:
            applied.append(definition)
    return applied, kept


def _explain_kept(ours: Manifest, found: Mapping[str, Any]) -> str | None:
    lacking = find_lacking(ours, found)
    what = f"it lacks {', '.join(lacking)}" if lacking else "it has all fields of ours"
    if release := helm_release(found):
        return f"belongs to the release {release} of Helm, and stays as it is: {what}"
    if not is_ours(found):
        return f"is not ours, and stays as it is: {what}"
    # An older command would remove them, with their values, for the installations of all namespaces.
    if newer := find_lacking(found, ours):
        return f"is newer, and stays as it is: it also has {', '.join(newer)}; {what}"
    return None


def find_lacking(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the served versions and fields of our definition that theirs lacks, such as `v1 .spec.uploaderType`."""
    lacking = []
    known = {version["name"]: version for version in theirs["spec"]["versions"] if version.get("served")}
    for version in (version for version in ours["spec"]["versions"] if version.get("served")):
        name = version["name"]
        if name in known:
            missing = _missing_fields(schema_of(version), schema_of(known[name]), "")
            lacking += [f"{name} {path}" for path in missing]
        else:
            lacking.append(name)
    return lacking


def _missing_fields(ours: Manifest, theirs: Manifest, path: str) -> Iterator[str]:
    """Yield the fields that `theirs` lacks; of one that it lacks, not those below it."""
    if theirs.get("x-kubernetes-preserve-unknown-fields"):
        return
    others = theirs.get("properties") or {}
    for name, schema in (ours.get("properties") or {}).items():
        if name in others:
            yield from _missing_fields(schema, others[name], f"{path}.{name}")
        else:
            yield f"{path}.{name}"
    if "items" in ours and "items" in theirs:
        yield from _missing_fields(ours["items"], theirs["items"], f"{path}[]")


async def _wait_definitions(client: KubeClient, clock: Clock, definitions: Sequence[Manifest]) -> None:
    deadline = Deadline.after(clock, _TIMEOUT)
    for definition in definitions:
        name = definition["metadata"]["name"]
        while (cause := await _explain_unserved(client, definition)) and not deadline.expired:
            await clock.sleep(_POLL_SECONDS)
        if cause:
            raise DefinitionError(f"CustomResourceDefinition {name} is not served: {cause}")


async def _explain_unserved(client: KubeClient, definition: Manifest) -> str | None:
    found = await client.read(CUSTOM_RESOURCE_DEFINITIONS, "", definition["metadata"]["name"])
    if found is None:
        return "it does not exist"
    conditions = {one["type"]: one for one in (found.get("status") or {}).get("conditions") or []}
    for kind in ("NamesAccepted", "Established"):
        condition = conditions.get(kind) or {}
        if condition.get("status") != "True":
            return f"it is not {kind}: {condition.get('message') or 'no reason yet'}"
    # Established a moment before discovery, which every user may read, has all versions: Kubernetes v1.34,
    # apiextensions-apiserver, customresource_handler.go.
    spec, names = definition["spec"], definition["spec"]["names"]
    for one in spec["versions"]:
        if await is_unserved(client.transport, Resource(names["kind"], names["plural"], spec["group"], one["name"])):
            return "its objects are not served yet"
    return None


MANAGER: Final = "nodeagent-cli"
"""The field manager of `nodeagent install`."""

_UNKNOWN_TO_DRY_RUN: Final = "BadRequest"
"""The reason of the API server where an admission webhook does not support a dry run.

Source: Kubernetes v1.34, apiserver pkg/admission/plugin/webhook/errors/statuserror.go.
"""


class ConflictsError(AgentError):
    """Others have set fields of the installation, and they are not to be taken over; nothing was applied."""


class ApplyResult(StrEnum):
    """What became of an object."""

    CREATED = "created"
    CHANGED = "configured"
    UNCHANGED = "unchanged"


class Applied(NamedTuple):
    """An object as it is stored, and what became of it."""

    stored: Object
    result: ApplyResult


async def apply_installation(
    tools: Session,
    definitions: Sequence[Manifest],
    objects: Sequence[Manifest],
    on_result: Callable[[str, ApplyResult], None],
    *,
    force: bool,
) -> list[Applied]:
    """Apply everything; return what became of the objects, without the definitions, in their order.

    `on_result` gets each object as text and what became of it. `force` takes over, and notes, what others have set.

    Raises:
        ConflictsError: without `force`, others have set fields.
        DefinitionError: a definition is not served.
    """
    newer, kept = await _sort_definitions(tools.client, definitions)
    for name, why in kept.items():
        tools.on_note(f"CustomResourceDefinition {name} {why}")
    groups = frozenset(definition["spec"]["group"] for definition in definitions)
    taken = await _find_conflicts(tools, [*newer, *objects], groups)
    if taken and not force:
        raise ConflictsError(
            f"nothing was applied: {len(taken)} fields have other values (--force-conflicts takes them over): "
            + "; ".join(taken)
        )

    async def apply(manifest: Manifest) -> Applied:
        applied = await _apply(tools.client, manifest, force=force)
        on_result(place_of(manifest), applied.result)
        return applied

    for definition in newer:
        await apply(definition)
    await _wait_definitions(tools.client, tools.clock, definitions)
    applied = [await apply(manifest) for manifest in objects]
    for field in taken:
        tools.on_note(f"took over {field}")
    return applied


async def _find_conflicts(tools: Session, manifests: Sequence[Manifest], defined: frozenset[str]) -> list[str]:
    """Return the fields that others have set to other values, as text, of all objects; nothing is stored."""
    taken: list[str] = []
    namespaces = [one for one in manifests if one["kind"] == NAMESPACES.kind]
    absent = [one["metadata"]["name"] for one in namespaces if await _read(tools.client, one) is None]
    for manifest in manifests:
        if manifest["metadata"].get("namespace") in absent:
            continue
        try:
            await tools.client.apply(resource_of(manifest), manifest, manager=MANAGER, dry_run=True)
        except ApplyConflictError as e:
            place = place_of(manifest)
            taken += [f"{one.field} of {place}, which {one.manager} has set" for one in e.conflicts]
        except NotFoundError as e:
            if isinstance(e, NotServedError) and resource_of(manifest).group not in defined:
                raise
            # Its definition, or the role that it binds, is applied later: so it cannot be tried yet.
            continue
        except InvalidError as e:
            if e.reason != _UNKNOWN_TO_DRY_RUN:
                raise
            tools.on_note(f"{place_of(manifest)} could not be tried before it is applied: {e}")
    return taken


async def _apply(client: KubeClient, manifest: Manifest, *, force: bool) -> Applied:
    before = await _read(client, manifest)
    stored = await client.apply(resource_of(manifest), manifest, manager=MANAGER, force=force)
    if before is None:
        return Applied(stored, ApplyResult.CREATED)
    same = before["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]
    return Applied(stored, ApplyResult.UNCHANGED if same else ApplyResult.CHANGED)


async def _read(client: KubeClient, manifest: Manifest) -> Object | None:
    meta = manifest["metadata"]
    return await client.read(resource_of(manifest), meta.get("namespace", ""), meta["name"])
