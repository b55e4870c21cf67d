"""The backup repositories' password.

Knows the Secret, its key and the password that all peers agree on. Never overwrites what is
there, and never shows it.
"""

import base64
import logging

from core.kube.client import KubeClient
from core.kube.errors import AlreadyExistsError
from core.kube.resources import SECRETS
from core.logs import fields
from core.models.base import JsonDict
from core.models.names import REPO_CREDENTIALS_KEY, REPO_CREDENTIALS_SECRET, REPO_DEFAULT_PASSWORD

__all__ = ["ensure_repository_password"]

_log = logging.getLogger(__name__)


async def ensure_repository_password(client: KubeClient, namespace: str) -> None:
    """See to it that the Secret `velero-repo-credentials` exists.

    An operator who wants another password creates the Secret before the first backup.
    Source: Velero v1.18, pkg/repository/keys/keys.go (EnsureCommonRepositoryKey).

    Raises:
        KubeError: the API server refused.
    """
    if await client.read(SECRETS, namespace, REPO_CREDENTIALS_SECRET) is not None:
        return
    manifest: JsonDict = {
        "apiVersion": SECRETS.api_version,
        "kind": SECRETS.kind,
        "metadata": {"name": REPO_CREDENTIALS_SECRET, "namespace": namespace},
        "type": "Opaque",
        "data": {REPO_CREDENTIALS_KEY: base64.b64encode(REPO_DEFAULT_PASSWORD.encode()).decode()},
    }
    try:
        await client.create(SECRETS, manifest)
    except AlreadyExistsError:
        # Somebody was faster; theirs counts.
        return
    told = fields(kind=SECRETS.kind, namespace=namespace, name=REPO_CREDENTIALS_SECRET)
    _log.info("the repository password was absent and has its default now", extra=told)
