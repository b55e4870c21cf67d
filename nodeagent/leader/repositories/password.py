"""The Secret with the backup repositories' password: created with Velero's default, never overwritten."""

import base64
import logging

from core.kube.client import KubeClient
from core.kube.errors import AlreadyExistsError
from core.kube.resources import SECRETS
from core.kube.types import Manifest
from core.logs import fields
from core.models.names import REPO_CREDENTIALS_KEY, REPO_CREDENTIALS_SECRET, REPO_DEFAULT_PASSWORD

__all__ = ["ensure_repository_password"]

_log = logging.getLogger(__name__)


async def ensure_repository_password(client: KubeClient, namespace: str) -> bool:
    """Ensure that the Secret `velero-repo-credentials` exists; return whether it did not.

    To use another password, an operator creates the Secret before the first backup.
    Source: Velero v1.18, pkg/repository/keys/keys.go (EnsureCommonRepositoryKey).

    Raises:
        KubeError: the API server rejected the request.
    """
    if await client.read(SECRETS, namespace, REPO_CREDENTIALS_SECRET) is not None:
        return False
    manifest: Manifest = {
        "apiVersion": SECRETS.api_version,
        "kind": SECRETS.kind,
        "metadata": {"name": REPO_CREDENTIALS_SECRET, "namespace": namespace},
        "type": "Opaque",
        "data": {REPO_CREDENTIALS_KEY: base64.b64encode(REPO_DEFAULT_PASSWORD.encode()).decode()},
    }
    try:
        await client.create(SECRETS, manifest)
    except AlreadyExistsError:
        # Created concurrently; that password counts.
        return True
    log_fields = fields(kind=SECRETS.kind, namespace=namespace, name=REPO_CREDENTIALS_SECRET)
    _log.info("created the repository password Secret with the default password", extra=log_fields)
    return True
