"""Server-side apply of an installation: conflicts first, definitions next, then everything else in its order.

Before the first object is applied, all of them are tried: a conflict or an invalid object changes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from client.install.definitions import sort_definitions, wait_definitions
from client.install.objects import place_of, resource_of
from core.clock import Clock
from core.errors import AgentError
from core.kube.client import KubeClient
from core.kube.errors import ApplyConflictError, FieldConflict, InvalidError, NotFoundError, NotServedError
from core.kube.resources import NAMESPACES
from core.kube.types import Manifest, Object

__all__ = ["MANAGER", "Applied", "ApplyResult", "ApplyTools", "ConflictsError", "TakenField", "apply_installation"]

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


class TakenField(NamedTuple):
    """A field that another manager has set to another value; `place` is the object as text."""

    place: str
    conflict: FieldConflict

    def __str__(self) -> str:
        """Return it as text."""
        return f"{self.conflict.field} of {self.place}, which {self.conflict.manager} has set"


@dataclass(frozen=True)
class ApplyTools:
    """What an installation is applied with.

    `on_result` is called with each object as text and what became of it, `on_note` with what the user should know
    beside it.
    """

    client: KubeClient
    clock: Clock
    on_result: Callable[[str, ApplyResult], None]
    on_note: Callable[[str], None]


async def apply_installation(
    tools: ApplyTools, definitions: Sequence[Manifest], objects: Sequence[Manifest], *, force: bool
) -> list[Applied]:
    """Apply everything; return what became of the objects, without the definitions, in their order.

    `force` takes over fields that others have set, and notes each.

    Raises:
        ConflictsError: without `force`, others have set fields.
        DefinitionError: a definition is not served.
        KubeError: the API server rejected an object, or does not answer.
    """
    sorted_ = await sort_definitions(tools.client, definitions)
    for name, why in sorted_.kept.items():
        tools.on_note(f"CustomResourceDefinition {name} {why}")
    groups = frozenset(definition["spec"]["group"] for definition in definitions)
    taken = await _find_conflicts(tools, [*sorted_.applied, *objects], groups)
    if taken and not force:
        raise ConflictsError(
            f"nothing was applied: {len(taken)} fields have other values (--force-conflicts takes them over): "
            + "; ".join(map(str, taken))
        )
    for definition in sorted_.applied:
        await _apply(tools, definition, force=force)
    await wait_definitions(tools.client, tools.clock, definitions)
    applied = [await _apply(tools, manifest, force=force) for manifest in objects]
    for field in taken:
        tools.on_note(f"took over {field}")
    return applied


async def _find_conflicts(
    tools: ApplyTools, manifests: Sequence[Manifest], defined: frozenset[str]
) -> list[TakenField]:
    """Return the fields that others have set, of all objects; nothing is stored.

    Raises:
        NotServedError: the API server does not serve a kind of an API group that is not `defined` by the installation.
        KubeError: an object is rejected.
    """
    taken: list[TakenField] = []
    namespaces = [one for one in manifests if one["kind"] == NAMESPACES.kind]
    absent = [one["metadata"]["name"] for one in namespaces if await _read(tools, one) is None]
    for manifest in manifests:
        if manifest["metadata"].get("namespace") in absent:
            continue
        try:
            await tools.client.apply(resource_of(manifest), manifest, manager=MANAGER, dry_run=True)
        except ApplyConflictError as e:
            taken += [TakenField(place_of(manifest), conflict) for conflict in e.conflicts]
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


async def _apply(tools: ApplyTools, manifest: Manifest, *, force: bool) -> Applied:
    before = await _read(tools, manifest)
    stored = await tools.client.apply(resource_of(manifest), manifest, manager=MANAGER, force=force)
    if before is None:
        result = ApplyResult.CREATED
    else:
        same = before["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]
        result = ApplyResult.UNCHANGED if same else ApplyResult.CHANGED
    tools.on_result(place_of(manifest), result)
    return Applied(stored, result)


async def _read(tools: ApplyTools, manifest: Manifest) -> Object | None:
    meta = manifest["metadata"]
    return await tools.client.read(resource_of(manifest), meta.get("namespace", ""), meta["name"])
