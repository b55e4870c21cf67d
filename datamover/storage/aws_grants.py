"""Keys of an AWS role, granted for a token: by a token service (IRSA), or by the node's agent (EKS Pod Identity).

Loaded only where a location needs it, since an HTTP client takes memory. Does not know who asks for keys.
Source: AWS Security Token Service API reference, AssumeRoleWithWebIdentity and AssumeRole; AWS SDKs, container
credential provider; for which of them is used, and where: minio-go 7.2.0, pkg/credentials/iam_aws.go.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from html import escape, unescape
from typing import Final
from urllib.parse import urlencode
from urllib.request import Request

from core.redact import Redactor
from datamover.storage.s3 import DEFAULT_SESSION, AwsRole
from datamover.storage.token_requests import (
    RefusedError,
    build_client,
    build_direct_client,
    parse_json,
    read_token,
    send,
)

__all__ = ["ask_node", "assume_role", "encode_refusal"]

_VERSION: Final = "2011-06-15"
_SCHEMA: Final = f"https://sts.amazonaws.com/doc/{_VERSION}/"
_NAMES: Final = ("AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration")
_GRANTED: Final = re.compile(rf"<({'|'.join(_NAMES)})>([^<]+)</")


def encode_refusal(reason: str) -> bytes:
    """Return an error as a token service does."""
    inner = f"<Type>Sender</Type><Code>AccessDenied</Code><Message>{escape(reason)}</Message>"
    return f'<ErrorResponse xmlns="{_SCHEMA}"><Error>{inner}</Error></ErrorResponse>'.encode()


def assume_role(role: AwsRole, authority_pem: bytes, redactor: Redactor) -> bytes:
    """Return keys of the role from AWS's token service, for the token that its file contains now.

    They are encoded as the answer to a user who assumes a role, which is what kopia asks for.

    Args:
        authority_pem: trusted in addition to the system's authorities.
        redactor: learns token and keys.

    Raises:
        RepositoryError: they were not granted, or the service does not answer.
    """
    token = read_token(role.token_file, "AWS_WEB_IDENTITY_TOKEN_FILE")
    redactor.add(token)
    form = {
        "Action": "AssumeRoleWithWebIdentity",
        "Version": _VERSION,
        "RoleArn": role.arn,
        "RoleSessionName": role.session_name or DEFAULT_SESSION,
        "WebIdentityToken": token,
    }
    attempted = f"cannot assume role {role.arn} with the token in {role.token_file}"
    request = Request(role.token_service, urlencode(form).encode())  # noqa: S310 - https
    answer = send(build_client(authority_pem), request, attempted).decode(errors="replace")
    return _encode_grant({name: unescape(value) for name, value in _GRANTED.findall(answer)}, attempted, redactor)


def ask_node(url: str, token_file: str, redactor: Redactor) -> bytes:
    """Return keys of this pod's role from the agent of EKS Pod Identity on the node, as `assume_role` does.

    Raises:
        RepositoryError: they were not granted, or the agent does not answer.
    """
    token = read_token(token_file, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
    redactor.add(token)
    attempted = f"cannot get keys of this pod's role with the token in {token_file}"
    request = Request(url, headers={"Authorization": token})  # noqa: S310 - link-local
    answer = parse_json(send(build_direct_client(), request, attempted))
    values = {"SessionToken" if name == "Token" else name: value for name, value in answer.items()}
    return _encode_grant(values, attempted, redactor)


def _encode_grant(values: Mapping[str, object], attempted: str, redactor: Redactor) -> bytes:
    try:
        keys = {name: str(values[name]) for name in _NAMES}
        datetime.fromisoformat(keys["Expiration"])
    except (KeyError, ValueError):
        raise RefusedError(f"{attempted}: the answer has no keys") from None
    redactor.add(keys["SecretAccessKey"], keys["SessionToken"])
    inner = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in keys.items())
    return (
        f'<AssumeRoleResponse xmlns="{_SCHEMA}"><AssumeRoleResult><Credentials>{inner}</Credentials>'
        "</AssumeRoleResult></AssumeRoleResponse>"
    ).encode()
