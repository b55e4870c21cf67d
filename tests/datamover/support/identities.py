"""Services that give identities access, in the place of Azure's and Google's: each checks what it is asked.

Source: Microsoft identity platform, OAuth 2.0 client credentials flow; Azure Instance Metadata Service, managed
identities; Azure REST API, Storage Accounts - List Keys 2023-05-01; RFC 7523 as Google's token endpoint uses it.
"""

import base64
import json
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.datamover.support.emulators import bearer_token
from tests.datamover.support.internet import Answer, Request

__all__ = ["ACCOUNT_PATH", "CLIENT", "CLIENT_SECRET", "TENANT", "AzureIdentities", "GoogleIdentities"]

TENANT: Final = "11111111-2222-3333-4444-555555555555"
CLIENT: Final = "66666666-7777-8888-9999-000000000000"
CLIENT_SECRET: Final = "secret-of-the-client"
ACCOUNT_PATH: Final = "/subscriptions/sub-1/resourceGroups/group-1/providers/Microsoft.Storage/storageAccounts"

_AUDIENCES: Final = {
    "https://storage.azure.com/.default": "https://storage.azure.com",
    "https://management.core.windows.net//.default": "https://management.core.windows.net/",
}


def _denied(description: str, status: int = 400) -> Answer:
    return Answer({"error": "invalid_client", "error_description": f"{description}\r\nTrace ID: 0"}, status)


@dataclass
class AzureIdentities:
    """The login, instance metadata and management of one tenant, with one storage account."""

    account: str = ""
    key: str = ""
    federated_token: str = ""
    denies_keys: bool = False
    failures: int = 0
    requests: list[str] = field(default_factory=list)

    def login(self, request: Request) -> Answer:
        """Answer as login.microsoftonline.com."""
        self.requests.append(request.path)
        if request.path.endswith("/discovery/instance"):
            return Answer({"tenant_discovery_endpoint": f"https://{request.host}/{TENANT}/v2.0", "metadata": []})
        if request.path.endswith("/openid-configuration"):
            base = f"https://{request.host}/{TENANT}"
            end = f"{base}/oauth2/v2.0"
            return Answer(
                {
                    "token_endpoint": f"{end}/token",
                    "authorization_endpoint": f"{end}/authorize",
                    "issuer": f"{base}/v2.0",
                }
            )
        if (request.method, request.path) != ("POST", f"/{TENANT}/oauth2/v2.0/token"):
            return Answer("", 404)
        form = request.form
        audience = next((found for scope in form["scope"].split() if (found := _AUDIENCES.get(scope))), "")
        if (form["grant_type"], form["client_id"]) != ("client_credentials", CLIENT) or not audience:
            return _denied("AADSTS70011: The provided request is not valid.")
        if not self._proves_client(form):
            return _denied("AADSTS7000215: Invalid client secret provided.", 401)
        return self._token(audience)

    def metadata(self, request: Request) -> Answer:
        """Answer as 169.254.169.254."""
        self.requests.append(request.path)
        query = request.query
        if self.failures:
            self.failures -= 1
            return Answer({"error": "try again"}, 503)
        if request.headers.get("metadata") != "true":
            return Answer({"error": "invalid_request", "error_description": "Required metadata header"}, 400)
        if request.path != "/metadata/identity/oauth2/token" or query["api-version"] != "2018-02-01":
            return Answer("", 404)
        if query.get("client_id", CLIENT) != CLIENT:
            return Answer({"error": "invalid_request", "error_description": "Identity not found"}, 400)
        return self._token(query["resource"])

    def management(self, request: Request) -> Answer:
        """Answer as management.azure.com."""
        self.requests.append(request.path)
        claims = _claims(request.headers.get("authorization", "").removeprefix("Bearer "))
        if claims.get("aud") != "https://management.core.windows.net/":
            return Answer({"error": {"code": "InvalidAuthenticationTokenAudience", "message": "the audience"}}, 401)
        if self.denies_keys:
            return Answer({"error": {"code": "AuthorizationFailed", "message": "no permission for listKeys"}}, 403)
        wanted = ("POST", f"{ACCOUNT_PATH}/{self.account}/listKeys")
        if (request.method, request.path) != wanted or "api-version" not in request.query:
            return Answer({"error": {"code": "ResourceNotFound", "message": "there is no such account"}}, 404)
        read_only = {"keyName": "key1", "value": "cmVhZC1vbmx5", "permissions": "READ"}
        return Answer({"keys": [read_only, {"keyName": "key2", "value": self.key, "permissions": "FULL"}]})

    def _proves_client(self, form: dict[str, str]) -> bool:
        if "client_assertion" in form:
            bearer = form["client_assertion_type"] == "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
            return bearer and form["client_assertion"] == self.federated_token
        return form.get("client_secret") == CLIENT_SECRET

    def _token(self, audience: str) -> Answer:
        return Answer({"access_token": bearer_token(audience), "token_type": "Bearer", "expires_in": 3599})


class GoogleIdentities:
    """Google's token endpoint, and a service account with a key."""

    email = "mover@project-1.iam.gserviceaccount.com"

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._key, self._public = folder / "key.pem", folder / "public.pem"
        _openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", str(self._key))
        _openssl("pkey", "-in", str(self._key), "-pubout", "-out", str(self._public))
        self.granted = 0

    @property
    def credentials_file(self) -> str:
        """The key of the service account, as Google's console hands it out."""
        return json.dumps(
            {
                "type": "service_account",
                "project_id": "project-1",
                "private_key_id": "key-1",
                "private_key": self._key.read_text(),
                "client_email": self.email,
                "client_id": "1",
                "token_uri": "https://oauth2.googleapis.com/token",
            }
        )

    def token(self, request: Request) -> Answer:
        """Answer as oauth2.googleapis.com; grant a token for an assertion that the key has signed."""
        form = request.form
        signed, _, signature = form["assertion"].rpartition(".")
        claims = _claims(form["assertion"])
        valid = [
            (request.method, request.path) == ("POST", "/token"),
            form["grant_type"] == "urn:ietf:params:oauth:grant-type:jwt-bearer",
            claims["iss"] == self.email,
            claims["aud"] == "https://oauth2.googleapis.com/token",
            "https://www.googleapis.com/auth/devstorage.full_control" in claims["scope"].split(),
            claims["exp"] > time.time(),
            self._verifies(signed, signature),
        ]
        if not all(valid):
            return Answer({"error": "invalid_grant", "error_description": "Invalid JWT Signature."}, 400)
        self.granted += 1
        return Answer({"access_token": "token-of-google", "token_type": "Bearer", "expires_in": 3599})

    def _verifies(self, signed: str, signature: str) -> bool:
        file = self._key.with_name("signature")
        file.write_bytes(_decode(signature))
        argv = ["openssl", "dgst", "-sha256", "-verify", str(self._public), "-signature", str(file)]
        return subprocess.run(argv, input=signed.encode(), capture_output=True, check=False).returncode == 0


def _claims(token: str) -> dict[str, Any]:
    parts = token.split(".")
    return dict(json.loads(_decode(parts[1]))) if len(parts) == 3 else {}


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
