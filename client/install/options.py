"""What can be chosen about an installation, and what all of its objects have in common."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from core.kube import resources as kube
from core.kube.types import Manifest, PodToleration
from core.models.base import JsonDict
from core.models.names import MOVER_SERVICE_ACCOUNT, PART_OF_LABELS, SERVICE_ACCOUNT
from core.version import VERSION
from nodeagent.runtime.settings import DEFAULT_NAMESPACE

DEFAULT_IMAGE: Final = f"node-agent:{VERSION}"

CONFIG_MAP: Final = "node-agent-config"
"""The ConfigMap of a `configuration` that names none."""

FLAGS_OF_INSTALL: Final = (
    "--node-agent-configmap",
    "--backup-repository-configmap",
    "--repo-maintenance-job-configmap",
    "--mover-service-account",
    "--features",
    "--metrics-address",
)
"""Flags of agents that follow from options, which are checked; the last one from the port of probes and scrapers."""

OWN_LOCATION_KEYS: Final = ("bucket", "prefix")
"""Keys of a location's config that Velero sets itself, so that nobody reads a user's.

Source: Velero v1.18, NewObjectBackupStoreGetter in pkg/persistence/object_store.go.
"""

TRUTH_KEYS: Final = ("s3ForcePathStyle", "insecureSkipTLSVerify", "enableSharedConfig")
TRUTH_VALUES: Final = ("1", "t", "T", "TRUE", "true", "True", "0", "f", "F", "FALSE", "false", "False")
"""Source: velero-plugin-for-aws v1.12, object_store.go; Go, strconv.ParseBool."""

TYPOGRAPHIC_QUOTES: Final = "[\u2018-\u201f]"
"""Pattern: what web pages and editors make of quotes."""


@dataclass(frozen=True, kw_only=True)
class ContainerResources:
    """Requests and limits of each agent as Kubernetes quantities; `0` is none, as in `velero install`."""

    cpu_request: str = "50m"
    memory_request: str = "128Mi"
    cpu_limit: str = "0"
    memory_limit: str = "512Mi"


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """Proxies of agents and data movers, as the environment variables have them.

    `no_proxy` need not have the API server, which is always reached without a proxy.
    """

    http: str | None = None
    https: str | None = None
    no_proxy: str | None = None


@dataclass(frozen=True, kw_only=True)
class LocationOptions:
    """The default BackupStorageLocation; `ca_certificate` is a bundle in PEM; None: the image's own."""

    provider: str
    bucket: str
    prefix: str | None = None
    config: Mapping[str, str] = field(default_factory=dict)
    ca_certificate: str | None = None


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """What the DaemonSet has; None leaves its field or flag out.

    `repository_config_map` is for new backup repositories, `maintenance_config_map` for maintenance Jobs. Without
    `host_path`, agents do not see the directories of pods, and volumes of pods are not transferred. `extra_args` are
    more flags of `nodeagent serve`.
    """

    config_map: str | None = None
    repository_config_map: str | None = None
    maintenance_config_map: str | None = None
    priority_class: str | None = None
    kubelet_root: str = "/var/lib/kubelet"
    host_path: bool = True
    privileged: bool = False
    resources: ContainerResources = ContainerResources()
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    pod_annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[PodToleration, ...] = ()
    features: str | None = None
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InstallOptions:
    """One installation.

    An account that is named exists already; None: one is created, with `service_account_annotations`. `credentials` is
    the content of the file for the object storage; None: no Secret is created, as no BackupStorageLocation without
    `location`. `configuration` is a document for `config_map`; None: the ConfigMap is the user's. Only pods of
    `monitoring_namespace` may read the agents' HTTP pages; None: there is no NetworkPolicy. With `volume_secrets`,
    agents may copy Secrets and ConfigMaps that drivers of volumes need; with `restore_tests`, there is the account that
    the leader's restore tests need.
    """

    namespace: str = DEFAULT_NAMESPACE
    image: str = DEFAULT_IMAGE
    image_pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    service_account: str | None = None
    mover_service_account: str | None = None
    service_account_annotations: Mapping[str, str] = field(default_factory=dict)
    agent: AgentOptions = AgentOptions()
    proxy: ProxyOptions = ProxyOptions()
    credentials: str | None = field(default=None, repr=False)
    location: LocationOptions | None = None
    configuration: JsonDict | None = None
    openshift: bool = False
    monitoring_namespace: str | None = None
    priority_classes: bool = False
    volume_secrets: bool = False
    restore_tests: bool = False

    @property
    def account(self) -> str:
        """The ServiceAccount of the agents."""
        return self.service_account or SERVICE_ACCOUNT

    @property
    def mover_account(self) -> str:
        """The ServiceAccount of data movers."""
        return self.mover_service_account or MOVER_SERVICE_ACCOUNT

    @property
    def config_map(self) -> str | None:
        """The ConfigMap with the agents' configuration, or None."""
        return self.agent.config_map or (None if self.configuration is None else CONFIG_MAP)

    def cluster_name(self, suffix: str) -> str:
        """Return the name of a cluster-scoped object: the namespace is part of it, so that two can be installed."""
        return f"{self.namespace}-{suffix}"


def build_object(
    api_version: str, kind: str, name: str, namespace: str = "", labels: Mapping[str, str] = PART_OF_LABELS
) -> Manifest:
    """Return an object without content; without `namespace` it is cluster-scoped."""
    metadata: Manifest = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": api_version, "kind": kind, "metadata": {**metadata, "labels": dict(labels)}}


def resource_of(manifest: Mapping[str, Any]) -> kube.Resource:
    """Return the resource of an object."""
    return kube.BY_KIND[manifest["kind"]]


def place_of(obj: Mapping[str, Any]) -> str:
    """Return kind, namespace and name of an object as text, such as `DaemonSet velero/node-agent`."""
    meta = obj["metadata"]
    return f"{obj['kind']} {'/'.join(meta[key] for key in ('namespace', 'name') if meta.get(key))}"
