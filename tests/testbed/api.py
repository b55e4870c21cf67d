"""A small blocking client of the Kubernetes API: the product is not tested with its own. Objects are JSON dicts."""

import http.client
import json
import select
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from core.kube.resources import Resource
from tests.testbed.processes import LIMIT_SECONDS

Json = dict[str, Any]

_ERROR_FROM = 400
_BUSY_ATTEMPTS = 50
_BUSY_SECONDS = 0.2


class ApiError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


@dataclass
class Api:
    """Talks to the server a kubeconfig names; the file must be JSON, as the test bed writes it."""

    kubeconfig: Path
    _context: ssl.SSLContext = field(init=False)
    _headers: dict[str, str] = field(init=False)
    _address: str = field(init=False)
    _kept: list[http.client.HTTPSConnection] = field(init=False, default_factory=list, repr=False, compare=False)
    """Connections for further requests: to set one up costs more than most requests."""

    def __post_init__(self) -> None:
        config = json.loads(self.kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._address = urlsplit(cluster["server"]).netloc
        self._context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._headers = {"Accept": "application/json"}
        if "token" in user:
            self._headers["Authorization"] = f"Bearer {user['token']}"
        else:
            self._context.load_cert_chain(user["client-certificate"], user["client-key"])

    def request(
        self, method: str, path: str, *, body: Json | None = None, content_type: str = "application/json"
    ) -> Json:
        """Send one request and return the parsed answer.

        Raises:
            ApiError: The server rejected it.
            OSError: The server was not reached.
        """
        text = self.text(method, path, body=body, content_type=content_type)
        parsed: Json = json.loads(text)
        return parsed

    def text(self, method: str, path: str, *, body: Json | None = None, content_type: str = "application/json") -> str:
        """Like `request`, for answers that are not JSON, such as a log."""
        status, text = self._send(method, path, body=body, content_type=content_type)
        attempts = 1
        # A kind that was defined a moment ago is answered so until its storage is there.
        while status == http.HTTPStatus.TOO_MANY_REQUESTS and attempts < _BUSY_ATTEMPTS:
            time.sleep(_BUSY_SECONDS)
            status, text = self._send(method, path, body=body, content_type=content_type)
            attempts += 1
        if status >= _ERROR_FROM:
            raise ApiError(status, f"{method} {path}: {_message(text)}")
        return text

    def _send(self, method: str, path: str, *, body: Json | None, content_type: str) -> tuple[int, str]:
        data = None if body is None else json.dumps(body)
        headers = {**self._headers, "Content-Type": content_type}
        connection = self._kept_connection()
        try:
            connection.request(method, path, body=data, headers=headers)
            response = connection.getresponse()
            status, text = response.status, response.read().decode()
        except BaseException:
            connection.close()
            raise
        self._kept.append(connection)
        return status, text

    def _kept_connection(self) -> http.client.HTTPSConnection:
        """A connection of an earlier request that the server has not closed meanwhile, or else a new one."""
        while True:
            try:
                connection = self._kept.pop()
            except IndexError:
                return http.client.HTTPSConnection(self._address, context=self._context, timeout=LIMIT_SECONDS)
            # Between requests there is nothing to read but the end.
            if connection.sock is not None and not select.select([connection.sock], [], [], 0)[0]:
                return connection
            connection.close()

    def close(self) -> None:
        """Close the connections that are kept; later requests set up others."""
        while self._kept:
            self._kept.pop().close()

    def __del__(self) -> None:
        """Close the connections, unless the constructor failed."""
        if hasattr(self, "_kept"):
            self.close()

    def served(self) -> Iterator[Resource]:
        """Each kind that can be listed, in one of its versions: a group may have some in its older ones only.

        Source: https://kubernetes.io/docs/concepts/overview/kubernetes-api/#discovery-api
        """
        groups = self.request("GET", "/apis")["groups"]
        versions = [("", "v1"), *((group["name"], one["version"]) for group in groups for one in group["versions"])]
        seen = set()
        for group, version in versions:
            path = f"/apis/{group}/{version}" if group else f"/api/{version}"
            for one in self.request("GET", path)["resources"]:
                if "list" in one["verbs"] and "/" not in one["name"] and (group, one["name"]) not in seen:
                    seen.add((group, one["name"]))
                    yield Resource(one["kind"], one["name"], group, version, namespaced=one["namespaced"])

    def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        try:
            return self.request("GET", resource.path(namespace, name))
        except ApiError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                return None
            raise

    def objects(self, resource: Resource, namespace: str = "", *, selector: str = "") -> list[Json]:
        """All objects of a kind, in one namespace or in all."""
        query = f"?{urlencode({'labelSelector': selector})}" if selector else ""
        items: list[Json] = self.request("GET", resource.path(namespace) + query)["items"]
        return items

    def snapshot(self, resource: Resource) -> tuple[list[Json], str]:
        """All objects of a kind, and the resource version from which to watch for changes."""
        answer = self.request("GET", resource.path())
        # Items of a list have no kind, objects of a watch do.
        what = {"apiVersion": answer["apiVersion"], "kind": answer["kind"].removesuffix("List")}
        return [{**item, **what} for item in answer["items"]], answer["metadata"]["resourceVersion"]

    def create(self, resource: Resource, body: Json) -> Json:
        """Create an object in the namespace its metadata names; `body` may leave its kind out."""
        typed = {"apiVersion": resource.api_version, "kind": resource.kind}
        return self.request("POST", resource.path(body["metadata"].get("namespace", "")), body=typed | body)

    def patch(self, resource: Resource, body: Json, *, name: str, namespace: str = "", sub: str = "") -> Json:
        """Send a JSON merge patch; `sub` is a subresource, such as `status`."""
        path = resource.path(namespace, name, subresource=sub)
        return self.request("PATCH", path, body=body, content_type="application/merge-patch+json")

    def delete(self, resource: Resource, namespace: str, name: str) -> None:
        """Ask for the deletion of an object; one that no longer exists is no error."""
        try:
            self.request("DELETE", resource.path(namespace, name))
        except ApiError as error:
            if error.status != http.HTTPStatus.NOT_FOUND:
                raise

    def watch(
        self, resource: Resource, resource_version: str, *, name: str = "", seconds: int = LIMIT_SECONDS
    ) -> Iterator[Json]:
        """Yield watch events of a kind in all namespaces, from a resource version on.

        Args:
            resource_version: The version after which to begin; empty: what is there comes first, as ADDED.
            name: If not empty, only objects of this name.
            seconds: How long to watch. The server may end it before; the caller then starts again.
        """
        query = urlencode(
            {
                "watch": "1",
                "resourceVersion": resource_version,
                "timeoutSeconds": seconds,
                "fieldSelector": f"metadata.name={name}" if name else "",
            }
        )
        connection = http.client.HTTPSConnection(self._address, context=self._context)
        try:
            connection.request("GET", f"{resource.path()}?{query}", headers=self._headers)
            response = connection.getresponse()
            if response.status >= _ERROR_FROM:
                raise ApiError(response.status, f"watch of {resource.plural}")
            for line in response:
                yield json.loads(line)
        finally:
            connection.close()


def _message(text: str) -> str:
    try:
        return str(json.loads(text).get("message", text))
    except ValueError:
        return text
