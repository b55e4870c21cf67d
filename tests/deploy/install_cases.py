"""Options of an installation: the defaults, everything at once, and each option alone."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

from client.install.options import AgentOptions, ContainerResources, InstallOptions, LocationOptions, ProxyOptions

_RESOURCES: Final = ContainerResources(cpu_request="1", memory_request="0", cpu_limit="2", memory_limit="1Gi")

_AGENT: Final = AgentOptions(
    config_map="own-config",
    repository_config_map="own-repositories",
    maintenance_config_map="own-maintenance",
    priority_class="own-class",
    kubelet_root="/var/lib/k0s/kubelet/",
    host_path=False,
    privileged=True,
    resources=_RESOURCES,
    pod_labels={"team": "storage", "role": "is that of agents"},
    pod_annotations={"prometheus.io/scrape": "", "note": 'it\'s "quoted"'},
    node_selector={"pool": "storage"},
    tolerations=({"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1200000},),
    features="EnableCSI",
    extra_args=("--log-format=json", '--quoted=it\'s {{ no }} "template"'),
)

_INSTALL: Final = InstallOptions(
    namespace="second",
    image="registry.example.com:5000/node-agent@sha256:0123",
    image_pull_policy="Always",
    pull_secrets=("first", "second"),
    service_account="own-account",
    mover_service_account="own-mover",
    service_account_annotations={"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/x"},
    agent=_AGENT,
    proxy=ProxyOptions(
        http="http://u:p'%22$$x$(NODE_NAME)@proxy:3128", https="https://proxy:3129", no_proxy=".svc,10.0.0.0/8"
    ),
    credentials="[default]\naws_access_key_id = x\n",
    location=LocationOptions(
        provider="aws",
        bucket="backups",
        prefix="1",
        config={"region": "eu-central-1", "s3ForcePathStyle": "true"},
        ca_certificate="-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
    ),
    configuration={"loadConcurrency": {"globalConfig": 2}, "note": "<&> ä", "list": [], "large": 12345678},
    openshift=True,
    monitoring_namespace="monitoring",
    priority_classes=True,
    volume_secrets=True,
    restore_tests=True,
)

EVERYTHING: Final = replace(
    _INSTALL,
    service_account="",
    mover_service_account="",
    agent=replace(_AGENT, host_path=True, privileged=False, priority_class=""),
)
"""As much as can be chosen at once."""


def _alone(options: Any, chosen: Any) -> dict[str, Any]:
    """Return `options` with each of its options in turn as it was chosen."""
    return {member.name: replace(options, **{member.name: getattr(chosen, member.name)}) for member in fields(options)}


COMBINED: Final[dict[str, InstallOptions]] = {
    "defaults": InstallOptions(),
    "everything": EVERYTHING,
    "the least": _INSTALL,
    "privileged with everything": replace(EVERYTHING, agent=replace(EVERYTHING.agent, privileged=True)),
    "constraints without directories": InstallOptions(openshift=True, agent=AgentOptions(host_path=False)),
    "a short location": InstallOptions(location=LocationOptions(provider="gcp", bucket="backups")),
    "proxies without exceptions": InstallOptions(proxy=ProxyOptions(http="http://proxy:3128")),
    "exceptions without a proxy": InstallOptions(proxy=ProxyOptions(no_proxy=".svc")),
    "no resources": InstallOptions(
        agent=AgentOptions(resources=replace(_RESOURCES, cpu_request="0", cpu_limit="0", memory_limit="0"))
    ),
}
"""Each option at both of its values, and what depends on several options."""

CASES: Final[dict[str, InstallOptions]] = {
    **COMBINED,
    **_alone(InstallOptions(), _INSTALL),
    **{f"agent.{name}": InstallOptions(agent=agent) for name, agent in _alone(AgentOptions(), _AGENT).items()},
}
