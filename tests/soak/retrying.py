"""The test bed's API client for tests that kill API servers: it retries until there is an answer."""

import http.client
import time
from dataclasses import dataclass

from core.kube.resources import Resource
from tests.testbed.api import Api, ApiError, Json

_RETRY_SECONDS = 300
_PAUSE_SECONDS = 0.5


@dataclass
class RetryingApi(Api):
    """Makes nothing twice: what a lost answer made counts as made."""

    def _send(self, method: str, path: str, *, body: Json | None, content_type: str) -> tuple[int, str]:
        deadline = time.monotonic() + _RETRY_SECONDS
        while True:
            try:
                status, text = super()._send(method, path, body=body, content_type=content_type)
            except (OSError, http.client.HTTPException):
                if time.monotonic() > deadline:
                    raise
            else:
                if status < http.HTTPStatus.INTERNAL_SERVER_ERROR or time.monotonic() > deadline:
                    return status, text
            time.sleep(_PAUSE_SECONDS)

    def create(self, resource: Resource, body: Json) -> Json:
        """Create an object in the namespace its metadata names, if there is none of that name."""
        metadata = body["metadata"]
        try:
            return super().create(resource, body)
        except ApiError as error:
            if error.status != http.HTTPStatus.CONFLICT:
                raise
            return self.get(resource, metadata.get("namespace", ""), metadata["name"]) or body
