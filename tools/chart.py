"""What of `deploy/chart` is generated from the builders: templates of constant objects, and the schema of the values.

The builders get expressions of Helm's templates as names, so that what they return is a template itself. What
an option adds or leaves out is written by hand, in the other templates; tests compare the result with the builders.
"""

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from importlib.resources import files
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from client.install.daemonset import build_daemonset
from client.install.manifests import (
    build_agent_roles,
    build_mover_roles,
    build_network_policy,
    build_priority_classes,
    build_restore_test_account,
    build_security_constraints,
    build_volume_secrets_roles,
)
from client.install.options import (
    FLAGS_OF_INSTALL,
    OWN_LOCATION_KEYS,
    TRUTH_KEYS,
    TRUTH_VALUES,
    TYPOGRAPHIC_QUOTES,
    AgentOptions,
    ContainerResources,
    InstallOptions,
    ProxyOptions,
)
from client.permissions import VERIFY_PERMISSIONS
from core.kube.types import PodToleration
from core.models.base import JsonDict
from core.version import VERSION
from nodeagent.runtime.permissions import COPY_PERMISSIONS, MOVER_PERMISSIONS, agent_permissions
from tools.documents import GENERATED, build_file, dump
from tools.monitoring import generate_chart_monitoring

_OPTIONS: Final = InstallOptions(
    namespace="{{ .Release.Namespace }}",
    image='{{ .Values.image | default (printf "node-agent:%s" .Chart.AppVersion) }}',
    image_pull_policy="{{ .Values.imagePullPolicy }}",
    service_account='{{ .Values.serviceAccount | default "node-agent" }}',
    mover_service_account='{{ .Values.moverServiceAccount | default "node-agent-mover" }}',
    agent=AgentOptions(
        config_map='{{ include "node-agent.configMap" . }}',
        repository_config_map="{{ .Values.agent.repositoryConfigMap }}",
        maintenance_config_map="{{ .Values.agent.maintenanceConfigMap }}",
        kubelet_root='{{ .Values.agent.kubeletRoot | trimSuffix "/" }}',
        features="{{ .Values.agent.features }}",
        resources=ContainerResources(cpu_request="0", memory_request="0", cpu_limit="0", memory_limit="0"),
    ),
    proxy=ProxyOptions(
        http='{{ include "node-agent.literal" .Values.proxy.http }}',
        https='{{ include "node-agent.literal" .Values.proxy.https }}',
        no_proxy='{{ include "node-agent.literal" .Values.proxy.noProxy }}',
    ),
    monitoring_namespace="{{ .Values.monitoringNamespace }}",
)

_CRDS_VALUE: Final[JsonDict] = {
    "type": "object",
    "properties": {"install": {"type": "boolean"}},
    "additionalProperties": False,
}
"""No option: the command has a flag for what to print or apply."""

_LABELS: Final[JsonDict] = {"type": "object", "additionalProperties": {"type": "string"}}
_MONITORING_VALUE: Final[JsonDict] = {
    "type": "object",
    "properties": {name: {"type": "boolean"} for name in ("podMonitor", "rules", "dashboard")}
    | {"labels": _LABELS, "dashboardLabels": _LABELS, "runbook": {"type": "string"}},
    "additionalProperties": False,
}
"""No option: the command installs what agents need, and `deploy/monitoring` has the objects."""


_REQUIRED: Final[JsonDict] = {"required": ["provider"]}
_SCALARS: Final[Mapping[object, JsonDict]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    Any: {},
    PodToleration: {"type": "object", "additionalProperties": {}},
}


_ENDPOINT: Final = r"""^(https?://)?([^\s/?#@:\[\]"']+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/*$"""
_TEXT: Final[JsonDict] = {"type": "string", "not": {"pattern": TYPOGRAPHIC_QUOTES}}
_LOCATION_CONFIG: Final[JsonDict] = {
    "type": "object",
    "properties": {
        **dict.fromkeys(OWN_LOCATION_KEYS, False),
        **{key: {"enum": list(TRUTH_VALUES)} for key in TRUTH_KEYS},
        "s3Url": {**_TEXT, "pattern": _ENDPOINT},
    },
    "additionalProperties": _TEXT,
}
_ARGUMENT: Final[JsonDict] = {"type": "string", "not": {"pattern": f"^({'|'.join(FLAGS_OF_INSTALL)})(=|$)"}}
_FORMER_VALUES: Final[JsonDict] = {"linux": {"const": True}, "windows": {"type": "boolean"}}
"""Accepted where they change nothing; templates/daemonset.yaml says what `windows` has become."""

_SECTIONS: Final[JsonDict] = {
    "if": {
        "properties": {"location": {"properties": {"provider": {"pattern": "^(velero.io/)?aws$"}}, **_REQUIRED}},
        "required": ["location"],
    },
    "then": {"properties": {"credentials": {"pattern": r"^$|(^|\n)\s*\["}}},
}
"""What `nodeagent install` refuses too: values that contradict others, or that no program can read."""


def generate_chart() -> dict[str, str]:
    """Return the text of each generated file by its path in `deploy/chart`."""
    agent = _OPTIONS.agent
    own = agent_permissions(_OPTIONS.config_map, agent.repository_config_map, agent.maintenance_config_map)
    texts = {
        "Chart.yaml": _build_chart(),
        "values.schema.json": json.dumps(build_schema(), indent=2) + "\n",
        "files/daemonset.yaml": GENERATED + dump(_build_daemonset_parts()),
        "files/security-context-constraints.yaml": GENERATED + dump(_build_constraints()),
        "templates/agent-rbac.yaml": build_file(build_agent_roles(_OPTIONS), permissions=own),
        "templates/mover-rbac.yaml": build_file(build_mover_roles(_OPTIONS), permissions=MOVER_PERMISSIONS),
        "templates/volume-secrets-rbac.yaml": _if(
            "volumeSecrets", build_file(build_volume_secrets_roles(_OPTIONS), permissions=COPY_PERMISSIONS)
        ),
        "templates/restore-tests.yaml": _if(
            "restoreTests", build_file(build_restore_test_account(_OPTIONS), permissions=VERIFY_PERMISSIONS)
        ),
        "templates/priority-classes.yaml": _if("priorityClasses", build_file(build_priority_classes(_OPTIONS))),
        "templates/network-policy.yaml": _if("monitoringNamespace", build_file([build_network_policy(_OPTIONS)])),
    }
    texts |= {f"files/monitoring/{name}": text for name, text in generate_chart_monitoring().items()}
    definitions = files("client.install") / "crds"
    return texts | {f"files/crds/{entry.name}": entry.read_text(encoding="utf-8") for entry in definitions.iterdir()}


def build_schema() -> JsonDict:
    """Return the JSON Schema of the chart's values, in which a name that is no option is an error."""
    schema = _schema_of(InstallOptions)
    properties = schema["properties"]
    # Helm chooses the namespace with the release.
    del properties["namespace"]
    # Helm passes `global` to a chart that another one contains.
    properties |= {"crds": _CRDS_VALUE, "monitoring": _MONITORING_VALUE, "global": {"type": "object"}}
    properties["agent"]["properties"]["extraArgs"]["items"] = _ARGUMENT
    properties["agent"]["properties"] |= _FORMER_VALUES
    properties["location"]["properties"]["config"] = _LOCATION_CONFIG
    properties["credentials"] = _TEXT
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, **_SECTIONS}


def value_name(option: str) -> str:
    """Return the name of an option, such as `host_path`, as one of the chart's values: `hostPath`."""
    first, *others = option.split("_")
    return first + "".join(part.capitalize() for part in others)


def _schema_of(kind: object) -> JsonDict:
    if is_dataclass(kind):
        hints, members = get_type_hints(kind), fields(kind)
        required = [value_name(each.name) for each in members if _is_required(each)]
        return {
            "type": "object",
            "properties": {value_name(each.name): _schema_of(hints[each.name]) for each in members},
            "additionalProperties": False,
            # Without any value the object is absent.
            **({"if": {"minProperties": 1}, "then": {"required": required}} if required else {}),
        }
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in {Union, types.UnionType}:
        (present,) = [each for each in arguments if each is not types.NoneType]
        return _schema_of(present)
    if origin is tuple:
        return {"type": "array", "items": _schema_of(arguments[0])}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema_of(arguments[1])}
    return dict(_SCALARS[kind])


def _is_required(member: Field[object]) -> bool:
    return member.default is MISSING and member.default_factory is MISSING


def _build_chart() -> str:
    return GENERATED + dump(
        {
            "apiVersion": "v2",
            "name": "node-agent",
            "description": "Moves the data of Kubernetes volumes; a drop-in replacement for Velero's node-agent",
            "type": "application",
            "version": VERSION,
            "appVersion": VERSION,
        }
    )


def _build_daemonset_parts() -> JsonDict:
    """Return the DaemonSet, and the security contexts of privileged agents."""
    privileged = replace(_OPTIONS, agent=replace(_OPTIONS.agent, privileged=True))
    pod = build_daemonset(privileged)["spec"]["template"]["spec"]
    contexts = {"pod": pod["securityContext"], "container": pod["containers"][0]["securityContext"]}
    return {"daemonset": build_daemonset(_OPTIONS), "privileged": contexts}


def _build_constraints() -> JsonDict:
    agent, mover = build_security_constraints(_OPTIONS)
    privileged = replace(_OPTIONS, agent=replace(_OPTIONS.agent, privileged=True))
    return {"agent": agent, "privileged": build_security_constraints(privileged)[0], "mover": mover}


def _if(value: str, text: str) -> str:
    """Return a template that has content only where a value is not empty."""
    return f"{{{{- if .Values.{value} }}}}\n{text}{{{{- end }}}}\n"
