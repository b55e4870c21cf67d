"""Whether a Velero server is in the namespace: it then controls repositories and locations, and the agents do not.

It is seen by its Deployment, whatever its replicas: a server that is scaled down or replaced comes back. `velero
install` and Velero's chart write the label; the name is that of `velero install`, from which the server's own
maintenance Jobs inherit.
Source: Velero v1.18, Labels in pkg/install/resources.go, as recorded in tests/data/velero-1.18.2; buildJob in
pkg/repository/maintenance/maintenance.go; Velero's chart, charts/velero/templates/deployment.yaml.
"""

from typing import Final

from core.kube.client import KubeClient, Selection
from core.kube.resources import DEPLOYMENTS

__all__ = ["has_velero_server"]

_NAME: Final = "velero"
_LABEL: Final = ("component", "velero")


async def has_velero_server(client: KubeClient, namespace: str) -> bool:
    """Return whether the Deployment of a Velero server is in the namespace.

    Raises:
        KubeError: the API server rejected the list.
    """
    found = [one["metadata"] for one in await client.list(Selection(DEPLOYMENTS, namespace))]
    return any(meta["name"] == _NAME or _LABEL in (meta.get("labels") or {}).items() for meta in found)
