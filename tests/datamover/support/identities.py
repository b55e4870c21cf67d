"""Services that give identities access, in the place of the clouds' own: each checks what it is asked.

Source: Microsoft identity platform, OAuth 2.0 client credentials flow; Azure Instance Metadata Service, managed
identities; Azure REST API, Storage Accounts - List Keys 2023-05-01; RFC 7523 as Google's token endpoint uses it.
"""

import base64
import hmac
import json
import re
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.message import Message
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pytest

from datamover.storage.s3 import AwsRole
from tests.datamover.support.emulators import bearer_token
from tests.datamover.support.internet import Answer, Request, serve_internet
from tests.datamover.support.s3proxy import Answer as Refusal
from tests.datamover.support.s3server import S3Server
from tests.testbed.pki import Authority

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
    lifetime: timedelta = timedelta(hours=1)
    requests: list[str] = field(default_factory=list)
    granted: dict[str, datetime] = field(default_factory=dict)

    def login(self, request: Request) -> Answer:
        """Answer as login.microsoftonline.com."""
        self.requests.append(request.path)
        if request.path.endswith("/discovery/instance"):
            return Answer({"tenant_discovery_endpoint": f"https://{request.host}/{TENANT}/v2.0", "metadata": []})
        if request.path.endswith("/openid-configuration"):
            base = f"https://{request.host}/{TENANT}"
            end = f"{base}/oauth2/v2.0"
            ends = {"token_endpoint": f"{end}/token", "authorization_endpoint": f"{end}/authorize"}
            return Answer({**ends, "issuer": f"{base}/v2.0"})
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
        seconds = int(self.lifetime.total_seconds())
        token = bearer_token(audience)
        self.granted[token] = datetime.now(UTC) + 2 * self.lifetime
        return Answer({"access_token": token, "token_type": "Bearer", "expires_in": seconds})

    def check(self, headers: Message) -> Refusal | None:
        """Return the storage's answer to a request whose token has expired: twice as late as it is said to."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        accepted = scheme != "Bearer" or datetime.now(UTC) < self.granted[token]
        return None if accepted else Refusal(401, "<Error><Code>InvalidAuthenticationInfo</Code></Error>")


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


class AwsIdentities:
    """AWS's token service: a user whose keys may assume one role, which has the keys of a bucket.

    Source: AWS Security Token Service API reference, AssumeRole; AWS Signature Version 4.
    """

    user = ("AKIDOFTHEUSER", "secret-key-of-the-user")
    role = "arn:aws:iam::210987654321:role/backups"

    def __init__(self, access_key: str, secret_key: str) -> None:
        self._keys = access_key, secret_key
        self.lifetime = timedelta(hours=1)
        self.denies = False
        self.granted: list[str] = []

    def token(self, request: Request) -> Answer:
        """Answer as sts.amazonaws.com, in the region of the host's name."""
        region = request.host.split(".")[1]
        if not self._is_signed(request, "us-east-1" if region == "amazonaws" else region):
            return self._rejected("SignatureDoesNotMatch", "The request signature we calculated does not match")
        form = request.form
        wanted = {"Action": "AssumeRole", "Version": "2011-06-15", "RoleArn": self.role}
        if wanted.items() - form.items() or not re.fullmatch(r"[\w+=,.@-]{2,64}", form["RoleSessionName"]):
            return self._rejected("ValidationError", "invalid parameters", status=400)
        if self.denies:
            text = f"User: arn:aws:iam::1:user/u is not authorized to perform: sts:AssumeRole on resource: {self.role}"
            return self._rejected("AccessDenied", text)
        self.granted.append(form["RoleSessionName"])
        until = (datetime.now(UTC) + self.lifetime).strftime("%Y-%m-%dT%H:%M:%SZ")
        return Answer(
            '<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>'
            f"<AccessKeyId>{self._keys[0]}</AccessKeyId><SecretAccessKey>{self._keys[1]}</SecretAccessKey>"
            f"<SessionToken>token-of-the-session</SessionToken><Expiration>{until}</Expiration>"
            "</Credentials></AssumeRoleResult></AssumeRoleResponse>"
        )

    def _rejected(self, code: str, message: str, status: int = 403) -> Answer:
        error = f"<Type>Sender</Type><Code>{code}</Code><Message>{message}</Message>"
        schema = "https://sts.amazonaws.com/doc/2011-06-15/"
        return Answer(f'<ErrorResponse xmlns="{schema}"><Error>{error}</Error></ErrorResponse>', status)

    def _is_signed(self, request: Request, region: str) -> bool:
        """Return whether the user's secret key has signed the request for that region, just now."""
        algorithm, _, rest = request.headers.get("authorization", "").partition(" ")
        parts = dict(part.strip().split("=", 1) for part in rest.split(","))
        sent = request.headers["x-amz-date"]
        scope = f"{sent[:8]}/{region}/sts/aws4_request"
        age = datetime.now(UTC) - datetime.strptime(sent, "%Y%m%dT%H%M%S%z")
        names = parts["SignedHeaders"].split(";")
        headers = [f"{name}:{request.headers[name]}" for name in names]
        end = ["", ";".join(names), sha256(request.body.encode()).hexdigest()]
        canonical = "\n".join([request.method, request.path, "", *headers, *end])
        key = f"AWS4{self.user[1]}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        text = "\n".join([algorithm, sent, scope, sha256(canonical.encode()).hexdigest()])
        return (
            algorithm == "AWS4-HMAC-SHA256"
            and parts["Credential"] == f"{self.user[0]}/{scope}"
            and {"host", "x-amz-date"} <= set(names)
            and abs(age) < timedelta(minutes=15)
            and parts["Signature"] == hmac.digest(key, text.encode(), "sha256").hex()
        )


@dataclass
class _Sessions:
    """What a service has granted for a token; a storage accepts it for twice as long as it is said to be valid."""

    token: str
    lifetime: timedelta = timedelta(hours=1)
    granted: dict[str, datetime] = field(default_factory=dict)
    failures: int = 0

    def _grant(self) -> tuple[str, datetime]:
        session, now = f"session-{len(self.granted)}", datetime.now(UTC)
        self.granted[session] = now + 2 * self.lifetime
        return session, now + self.lifetime

    def _check(self, session: str, refusal: Refusal) -> Refusal | None:
        accepted = session in self.granted and datetime.now(UTC) < self.granted[session]
        return None if accepted else refusal


@dataclass
class RoleOfPod(_Sessions):
    """The role of a pod's service account, as AWS's token service grants it (IRSA), and EKS Pod Identity's agent.

    Source: AWS Security Token Service API reference, AssumeRoleWithWebIdentity; EKS user guide, Pod Identity.
    """

    access_key: str = ""
    secret_key: str = ""
    arn: str = "arn:aws:iam::123456789012:role/backups"
    failure: Answer = field(default_factory=lambda: Answer("", 503))

    def token_service(self, request: Request) -> Answer:
        """Answer as sts.REGION.amazonaws.com."""
        action = {"Action": "AssumeRoleWithWebIdentity", "Version": "2011-06-15"}
        wanted = {**action, "RoleArn": self.arn, "WebIdentityToken": self.token}
        if wanted.items() - request.form.items() or not request.form["RoleSessionName"]:
            text = "Not authorized to perform sts:AssumeRoleWithWebIdentity"
            return Answer(f"<ErrorResponse><Error><Code>AccessDenied</Code><Message>{text}</Message></Error>", 403)
        session, until = self._grant()
        return Answer(
            '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
            f"<AssumeRoleWithWebIdentityResult><Audience>sts.amazonaws.com</Audience><Credentials>"
            f"<AccessKeyId>{self.access_key}</AccessKeyId><SecretAccessKey>{self.secret_key}</SecretAccessKey>"
            f"<SessionToken>{session}</SessionToken><Expiration>{until.isoformat()}</Expiration></Credentials>"
            "</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        )

    def agent(self, request: Request) -> Answer:
        """Answer as 169.254.170.23."""
        if self.failures:
            self.failures -= 1
            return self.failure
        if (request.path, request.headers.get("authorization")) != ("/v1/credentials", self.token):
            return Answer("", 403)
        session, until = self._grant()
        keys = {"AccessKeyId": self.access_key, "SecretAccessKey": self.secret_key, "Token": session}
        return Answer({**keys, "AccountId": "123456789012", "Expiration": until.isoformat()})

    def check(self, headers: Message) -> Refusal | None:
        """Return the storage's answer to a request whose keys have expired."""
        text = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
        return self._check(headers.get("x-amz-security-token", ""), Refusal(400, text))


@asynccontextmanager
async def serve_role(s3: S3Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AwsRole]:
    """Serve AWS's token service, and yield a role of the service account whose token has a directory of its own."""
    file = folder / "identity" / "token"
    file.parent.mkdir()
    file.write_text("token-of-the-service-account")
    role = RoleOfPod(file.read_text(), access_key=s3.access_key, secret_key=s3.secret_key)
    authority = Authority(folder / "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.pair.certificate))
    async with serve_internet(authority, monkeypatch) as internet:
        internet.hosts["sts.amazonaws.com"] = role.token_service
        yield AwsRole(role.arn, str(file))


class GoogleFederation(_Sessions):
    """Google's Security Token Service, which grants access for the token of another provider.

    Source: Google Cloud IAM documentation, Security Token Service API, method token.
    """

    audience = "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/pool/providers/cluster"

    def credentials_file(self, token_file: Path) -> str:
        """Return the configuration that `gcloud iam workload-identity-pools create-cred-config` writes."""
        return json.dumps(
            {
                "type": "external_account",
                "audience": self.audience,
                "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
                "token_url": "https://sts.googleapis.com/v1/token",
                "credential_source": {"file": str(token_file)},
            }
        )

    def token_service(self, request: Request) -> Answer:
        """Answer as sts.googleapis.com."""
        form = request.form
        if (form["audience"], form["subject_token"]) != (self.audience, self.token):
            return Answer({"error": "invalid_grant", "error_description": "The token is not accepted."}, 400)
        session, _ = self._grant()
        seconds = int(self.lifetime.total_seconds())
        return Answer({"access_token": session, "token_type": "Bearer", "expires_in": seconds})

    def check(self, headers: Message) -> Refusal | None:
        """Return the storage's answer to a request whose token has expired."""
        session = headers.get("authorization", "").removeprefix("Bearer ")
        return self._check(session, Refusal(401, "Invalid Credentials"))
