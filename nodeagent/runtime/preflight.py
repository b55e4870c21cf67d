"""Checks before an agent or a command works: the API server, permissions, resource definitions, the pods directory.

Thousands of agents that start at the same time ask for all of their rules first (SelfSubjectRulesReview), and only
about what these do not show: not every authorizer can list its rules. Nor do rules show what an authorizer before
RBAC denies, so commands that must not stop halfway ask about each verb.
"""

import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Final

from core.clock import Clock, Deadline
from core.errors import ConfigError, Translated
from core.kube import errors
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection
from core.kube.types import UncheckedObject
from core.models.base import JsonDict, WireModel
from core.models.names import helm_release, is_ours
from core.text import some_of
from exposer.workload import list_pods
from nodeagent.runtime.permissions import Permission, Scope
from nodeagent.runtime.workqueue import work_in_parallel

_GROUP: Final = "authorization.k8s.io"
_ACCESS_REVIEWS: Final[kube.Resource[UncheckedObject]] = kube.Resource(
    "SelfSubjectAccessReview", "selfsubjectaccessreviews", _GROUP, namespaced=False
)
_RULES_REVIEWS: Final[kube.Resource[UncheckedObject]] = kube.Resource(
    "SelfSubjectRulesReview", "selfsubjectrulesreviews", _GROUP, namespaced=False
)
"""Every authenticated user may create both. Source: Kubernetes, ClusterRole system:basic-user."""

_NO_NAMESPACE: Final = "no.namespace"
"""No namespace can have a name with a dot, so no RoleBinding adds rules: what is allowed in it is allowed in each."""

_AT_A_TIME: Final = 8
"""Access reviews in parallel, of a few milliseconds each; without any rules there are about ninety."""


def _allows(rule: JsonDict, permission: Permission, verb: str, name: str) -> bool:
    """Return whether a rule of a SelfSubjectRulesReview allows it; `name` is empty for all objects.

    Source: Kubernetes v1.34, authorization.k8s.io/v1 ResourceRule; pkg/apis/rbac/v1/evaluation_helpers.go.
    """

    def has(key: str, *wanted: str) -> bool:
        return not {"*", *wanted}.isdisjoint(rule.get(key) or ())

    parts = (f"*/{permission.subresource}",) if permission.subresource else ()
    names = rule.get("resourceNames")
    return (
        has("verbs", verb)
        and has("apiGroups", permission.resource.group)
        and has("resources", permission.path, *parts)
        and (not names or name in names)
    )


async def missing_permissions(
    client: KubeClient, namespace: str, permissions: Iterable[Permission], *, by_rules: bool = False
) -> dict[Permission, str]:
    """Return the missing ones of `permissions`, each as text; `by_rules`: what the caller's rules show is not asked."""
    places = {Scope.OWN_NAMESPACE: namespace, Scope.CLUSTER: _NO_NAMESPACE} if by_rules else {}
    rules = {scope: await _read_rules(client, place) for scope, place in places.items()}
    asked = [
        (permission, verb, name)
        for permission in permissions
        for verb in permission.verbs
        for name in permission.names or ("",)
        if not any(_allows(rule, permission, verb, name) for rule in rules.get(permission.scope, ()))
    ]
    try:
        answers = await work_in_parallel(
            asked, lambda one: _allowed(client, namespace, *one), at_a_time=_AT_A_TIME, name="access review"
        )
    except ExceptionGroup as e:
        # Not except*: Python before 3.11.4, such as Debian 12's, wraps what is raised there in a group.
        raise e.exceptions[0] from None
    lacking: dict[Permission, dict[str, None]] = {}
    for (permission, verb, _), allowed in zip(asked, answers, strict=True):
        if not allowed:
            lacking.setdefault(permission, {})[verb] = None
    return {
        permission: f"{','.join(verbs)} {permission.path}{permission.only} {permission.where}"
        for permission, verbs in lacking.items()
    }


async def _read_rules(client: KubeClient, namespace: str) -> Sequence[JsonDict]:
    try:
        review = _RULES_REVIEWS.build({}, spec={"namespace": namespace})
        answer = await client.create(_RULES_REVIEWS, review)
    except (errors.ForbiddenError, errors.InvalidError, errors.NotFoundError):
        return ()
    rules: Sequence[JsonDict] = answer["status"].get("resourceRules") or ()
    return rules


async def _allowed(client: KubeClient, namespace: str, permission: Permission, verb: str, name: str) -> bool:
    attributes = {
        "namespace": namespace if permission.scope is Scope.OWN_NAMESPACE else "",
        "verb": verb,
        "group": permission.resource.group,
        "resource": permission.resource.plural,
        "subresource": permission.subresource or "",
        "name": name,
    }
    review = _ACCESS_REVIEWS.build({}, spec={"resourceAttributes": attributes})
    answer = await client.create(_ACCESS_REVIEWS, review)
    return bool(answer["status"].get("allowed"))


_log = logging.getLogger(__name__)

_KINDS: Final = (*kube.TRANSFERS, kube.BACKUP_REPOSITORIES, kube.BACKUP_STORAGE_LOCATIONS)
_SNAPSHOT_KINDS: Final = (kube.VOLUME_SNAPSHOTS, kube.VOLUME_SNAPSHOT_CONTENTS)

PREFLIGHT_NAME: Final = "preflight"
"""The name that is read to check a definition: a get needs no permission beyond what every kind needs."""

_SHOWN: Final = 6
"""Missing permissions that fit into a line; if more are missing, the whole role is."""

_SETTLE: Final = timedelta(seconds=10)
"""How long a Running pod may have no directory: it ends, or its node has just booted."""

_POLL_SECONDS: Final = 2.0

_MIRROR: Final = "kubernetes.io/config.mirror"
"""The annotation of a mirror pod: the UID of its static pod on the node. Source: Kubernetes v1.34."""


async def check_cluster(client: KubeClient, namespace: str, permissions: Iterable[Permission]) -> None:
    """Check that the agent has `permissions` and can work in `namespace`; warn if only an optional part cannot.

    Raises:
        ConfigError: the API server does not answer, or something is missing; the message names all of it.
    """
    with Translated(errors.KubeError, ConfigError, "cannot check the cluster"):
        await check_permissions(client, namespace, permissions)
        missing = await _missing_kinds(client, namespace, _KINDS)
        without = await _missing_kinds(client, namespace, _SNAPSHOT_KINDS)
    if missing:
        raise ConfigError(
            f"custom resource definitions missing: {', '.join(missing)}: run nodeagent install --crds-only"
        )
    if without:
        _log.warning("no snapshot API in this cluster (%s): every DataUpload will fail", ", ".join(without))


async def _missing_kinds(client: KubeClient, namespace: str, kinds: Sequence[kube.Resource]) -> list[str]:
    missing = []
    for kind in kinds:
        try:
            await client.get(kind, namespace, PREFLIGHT_NAME)
        except errors.NotServedError:
            missing.append(f"{kind.full_name}/{kind.version}")
        except (errors.NotFoundError, errors.MalformedObjectError):
            # It is served.
            continue
    return missing


async def check_permissions(client: KubeClient, namespace: str, permissions: Iterable[Permission]) -> None:
    """Check that the agent's account has `permissions`; warn if only optional ones are missing.

    Raises:
        ConfigError: the API server does not answer, or a required one is missing; the message names all of them.
    """
    with Translated(errors.KubeError, ConfigError, "cannot check the cluster"):
        missing = await missing_permissions(client, namespace, permissions, by_rules=True)
    required = [text for permission, text in missing.items() if not permission.without]
    if required:
        raise ConfigError(
            f"permissions missing: {some_of(required, _SHOWN, '; ')}: "
            "compare the roles of the ServiceAccount with those in deploy/agent"
        )
    for permission, text in missing.items():
        if permission.without:
            _log.warning("no permission to %s: %s", text, permission.without)


async def check_host_pods(client: KubeClient, clock: Clock, node: str, directory: str | None) -> None:
    """Check that `directory` is the kubelet's pods directory; warn where the agent has none, or cannot read it.

    `directory` is where the agent of `node` has the volume `host-pods` mounted; None: nowhere.

    Raises:
        ConfigError: it lacks the directories of Running pods; the message is one line.

    Source: Velero v1.18, pkg/cmd/cli/nodeagent/server.go (validatePodVolumesHostPath).
    """
    if directory is None:
        what = "PodVolumeBackups and PodVolumeRestores will fail"
        _log.warning("the DaemonSet does not mount the volume host-pods: %s", what)
        return
    deadline = Deadline.after(clock, _SETTLE)
    while True:
        running = await _list_running(client, node)
        try:
            present = list_pods(directory)
        except (FileNotFoundError, PermissionError) as e:
            result = "pod volumes are not checked; deploy/agent/daemonset.yaml has the mount and the group for it"
            _log.warning("directory %s cannot be read: %s: %s", directory, e.strerror, result)
            return
        except OSError as e:
            raise ConfigError(f"directory {directory} cannot be read: {e.strerror}") from e
        missing = sorted(pod for entry, pod in running.items() if entry not in present)
        if not missing:
            _log.info("directory %s has an entry for each of the %d Running pods of the node", directory, len(running))
            return
        if deadline.expired:
            what = f"{directory} has no entry for {len(missing)} of {len(running)} Running pods of node {node}"
            raise ConfigError(
                f"the volume host-pods is not the kubelet's pods directory: {what}, such as {missing[0]}: "
                "its hostPath in the DaemonSet must be the directory pods in the kubelet's root directory"
            )
        await clock.sleep(_POLL_SECONDS)


async def _list_running(client: KubeClient, node: str) -> dict[str, str]:
    """Return the Running pods of the node, by the names of their directories."""
    selection = Selection(kube.PODS, field_selector=f"spec.nodeName={node},status.phase=Running")
    with Translated(errors.KubeError, ConfigError, f"cannot list the pods of node {node}"):
        pods = await client.list(selection)
    # The directory of a pod that is being deleted may no longer exist.
    metas = [pod["metadata"] for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    return {
        (meta.get("annotations") or {}).get(_MIRROR) or meta["uid"]: f"{meta['namespace']}/{meta['name']}"
        for meta in metas
    }


_OF_ALL: Final = ("status.activities", "status.fallbackFull", "status.incrementalBytes")
_RESTORE_TYPE: Final = "spec.restoreType"

_FIELDS: Final[dict[kube.Resource, tuple[str, ...]]] = {
    kube.DATA_UPLOADS: ("spec.parentSnapshot", *_OF_ALL, "status.sourceSize"),
    kube.DATA_DOWNLOADS: (_RESTORE_TYPE, "spec.csiSnapshot", "spec.snapshotSize", *_OF_ALL),
    kube.POD_VOLUME_BACKUPS: ("spec.parentSnapshot", *_OF_ALL, "status.sourceSize"),
    kube.POD_VOLUME_RESTORES: (_RESTORE_TYPE, "spec.snapshotSize", *_OF_ALL),
}
"""The fields that this version reads or writes, and that not all definitions have from Velero 1.17 on.

Source: tests/recordings/velero-*/crds, compared with ours by a test.
"""

DROPPED_STATUS_FIELDS: Final = frozenset(
    field.removeprefix("status.") for known in _FIELDS.values() for field in known if field.startswith("status.")
)
"""The fields of `status` that the definitions of an older Velero drop."""

_BY_NAME: Final = {resource.full_name: resource for resource in _FIELDS}


class DefinitionReport(WireModel):
    """What the definitions of transfers drop: a section of `/status`.

    `message` is empty if they have every field. `warning`: they have replaced newer ones; otherwise they are of an
    older Velero server, which does not use the fields. `next_velero`: they are Velero's own, of 1.19 or later.
    """

    message: str = ""
    warning: bool = False
    next_velero: bool = False


async def read_definitions(client: KubeClient) -> list[UncheckedObject]:
    """Return the definitions of transfers, as far as they exist."""
    found = [await client.read(kube.CUSTOM_RESOURCE_DEFINITIONS, "", name) for name in _BY_NAME]
    return [one for one in found if one is not None]


def find_dropped(definition: UncheckedObject) -> tuple[str, ...]:
    """Return the fields that the API server drops from the objects of a definition."""
    resource = _BY_NAME[definition["metadata"]["name"]]
    schema = next((schema_of(one) for one in definition["spec"]["versions"] if one["name"] == resource.version), {})
    return tuple(path for path in _FIELDS[resource] if not _has_field(schema, path.split(".")))


def schema_of(version: JsonDict) -> JsonDict:
    """Return the schema of a version of a definition; empty: it has none."""
    schema: JsonDict = (version.get("schema") or {}).get("openAPIV3Schema") or {}
    return schema


def _has_field(schema: JsonDict, path: Sequence[str]) -> bool:
    if not path or schema.get("x-kubernetes-preserve-unknown-fields"):
        return True
    child = (schema.get("properties") or {}).get(path[0])
    return child is not None and _has_field(child, path[1:])


def judge_definitions(definitions: Iterable[UncheckedObject]) -> DefinitionReport:
    """Return what the definitions drop, and whether that needs action.

    Ours were installed for a version that had fewer fields. Velero's own are of one release: where some have the fields
    of 1.19 and others do not, these have replaced newer ones.
    """
    dropped = {one["metadata"]["name"]: (one, find_dropped(one)) for one in definitions}
    foreign = [fields for one, fields in dropped.values() if not is_ours(one)]
    lacking = {name: one for name, (one, fields) in dropped.items() if fields}
    warning = any(map(is_ours, lacking.values())) or (any(foreign) and not all(foreign))
    parts = [f"definition {name} lacks {', '.join(dropped[name][1])}" for name in sorted(lacking)]
    why = _explain_remedy(lacking.values()) if warning else "as Velero before 1.19 does, whose server uses none"
    one, fields = dropped.get(kube.DATA_DOWNLOADS.full_name, (None, ()))
    next_velero = one is not None and not is_ours(one) and _RESTORE_TYPE not in fields
    message = f"{'; '.join(parts)}: {why}" if parts else ""
    return DefinitionReport(message=message, warning=warning, next_velero=next_velero)


def _explain_remedy(lacking: Iterable[UncheckedObject]) -> str:
    steps = set()
    for one in lacking:
        if release := helm_release(one):
            steps.add(f"upgrade the release {release} of Helm")
        elif is_ours(one):
            steps.add("run nodeagent install --crds-only")
        else:
            steps.add("apply the Velero server's again")
    return f"the API server drops these fields; {', '.join(sorted(steps, reverse=True))}"
