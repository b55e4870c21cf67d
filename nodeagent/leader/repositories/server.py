"""Whether a Velero server is in the namespace: it then controls repositories and locations, and the agents do not.

It is seen by its Deployment, whatever its replicas: a server that is scaled down or replaced comes back. The label is
written by `velero install` and by Velero's chart.
Source: Velero v1.18, Labels in pkg/install/resources.go, as recorded in tests/data/velero-1.18.2; Velero's chart,
charts/velero/templates/deployment.yaml.
"""

from typing import Final

from core.kube.client import KubeClient, Selection
from core.kube.resources import DEPLOYMENTS

__all__ = ["has_velero_server"]

_SERVER_SELECTOR: Final = "component=velero"


async def has_velero_server(client: KubeClient, namespace: str) -> bool:
    """Return whether the Deployment of a Velero server is in the namespace.

    Raises:
        KubeError: the API server rejected the list.
    """
    selection = Selection(DEPLOYMENTS, namespace, label_selector=_SERVER_SELECTOR)
    return bool(await client.list(selection))
