"""The storage of kopia repositories in S3, or a service compatible with it.

Knows kopia's flags, variables and configuration for it (`datamover.storage.aws` has the identities).
Source: kopia 0.23.1, cli/storage_s3.go, repo/blob/s3.
"""

import json
from base64 import b64encode, urlsafe_b64encode
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final, Self

from core.endpoints import parse_endpoint
from core.errors import ConfigError
from core.models.base import JsonDict
from datamover.runtime.work_dir import WorkDir
from datamover.storage.aws import AwsAssumedRole, AwsIdentity, AwsKeys
from datamover.storage.providers import PROBE_PREFIX, KopiaAccess, Storage, trust_variables

__all__ = ["S3Storage"]

_NO_KEYS: Final = "no keys in the location: using the keys of the environment, or of the pod or its node"

_PAST: Final = "2000-01-01T00:00:00Z"


@dataclass(frozen=True)
class S3Storage(Storage):
    """A prefix in a bucket of S3 or a compatible service.

    Without `keys`, kopia uses the keys of its environment, else the identity of the pod or its node.
    `in_past` is a view of the bucket's versions at a time before any repository.
    """

    bucket: str
    prefix: str
    url: str = ""
    region: str = ""
    keys: AwsIdentity | None = None
    verify_tls: bool = True
    ca_pem: bytes = b""
    in_past: bool = False

    def __post_init__(self) -> None:
        """Reject a role that would be assumed without checking who answers."""
        if isinstance(self.keys, AwsAssumedRole) and not self.verify_tls:
            raise ConfigError(
                "source_profile: not supported without a check of certificates (insecureSkipTLSVerify, "
                "--s3-insecure): kopia would not check the certificate of AWS's token service either; set its authority"
            )

    @property
    def description(self) -> str:
        """`s3://bucket/prefix at endpoint`."""
        return f"s3://{self.bucket}/{self.prefix} at {self.url or self._endpoint}"

    @property
    def _endpoint(self) -> str:
        if self.region.startswith("cn-"):
            return f"s3.{self.region}.amazonaws.com.cn"
        return "s3.amazonaws.com"

    @property
    def _address(self) -> tuple[str, bool]:
        """Host and port, and whether TLS is used."""
        return parse_endpoint(self.url) if self.url else (self._endpoint, True)

    def for_bucket_check(self) -> Self:
        """Return a view of the bucket's versions: kopia mistakes a missing bucket for one without a repository.

        Source: kopia 0.23.1, repo/blob/s3/s3_pit.go and translateError in s3_storage.go.
        """
        return replace(self, in_past=True)

    @property
    def credentials_origin(self) -> str:
        """The role, or that the location has no keys."""
        return self.keys.origin if self.keys else _NO_KEYS

    @property
    def needs_pod(self) -> bool:
        """Whether there are no keys, of a user or to assume a role with."""
        return not isinstance(self.keys, AwsKeys | AwsAssumedRole)

    def for_probe(self) -> Self:
        """Return a prefix below this one, without a repository."""
        return replace(self, prefix=f"{self.prefix}{PROBE_PREFIX}")

    def access(self, work_dir: WorkDir) -> KopiaAccess:
        """Return kopia's arguments, and the keys if this storage has its own.

        The keys are passed as empty arguments: so kopia reads its environment on each call,
        then the instance's identity, and writes none to its configuration. To assume a role with keys,
        it must have them in its configuration, and has no flags for the role.
        """
        if isinstance(self.keys, AwsAssumedRole):
            return self._access_by_token(self.keys, work_dir)
        endpoint, tls = self._address
        arguments = [
            "s3",
            f"--bucket={self.bucket}",
            f"--prefix={self.prefix}",
            f"--endpoint={endpoint}",
            f"--region={self.region}",
            "--access-key=",
            "--secret-access-key=",
            "--session-token=",
        ]
        if not tls:
            arguments.append("--disable-tls")
        elif not self.verify_tls:
            arguments.append("--disable-tls-verification")
        elif self.ca_pem:
            arguments.append(f"--root-ca-pem-path={work_dir.write('ca.pem', self.ca_pem)}")
        if self.in_past:
            arguments.append(f"--point-in-time={_PAST}")
        if self.keys is None:
            return KopiaAccess(arguments)
        return KopiaAccess(arguments, self.keys.variables)

    def _access_by_token(self, role: AwsAssumedRole, work_dir: WorkDir) -> KopiaAccess:
        """Return arguments that name a file with the configuration of this storage.

        Source: kopia 0.23.1, cli/command_repository_connect_from_config.go, repo/token.go.
        """
        token = urlsafe_b64encode(json.dumps({"version": "1", "storage": self.config()}).encode()).rstrip(b"=")
        file = work_dir.write(f"s3-{sha256(token).hexdigest()[:16]}.token", token)
        # An authority in the configuration would be the only one, also for AWS's token service.
        variables = {**role.variables, **trust_variables(work_dir, self.ca_pem)}
        secrets = tuple(filter(None, (role.keys.secret_key, role.keys.session_token)))
        return KopiaAccess(["from-config", f"--token-file={file}"], variables, secrets)

    def config(self) -> JsonDict:
        """Return the bucket and its endpoint, without keys except a role's, consistent with `access`."""
        endpoint, tls = self._address
        role = self.keys.config if isinstance(self.keys, AwsAssumedRole) else {}
        config: JsonDict = {
            "bucket": self.bucket,
            "prefix": self.prefix,
            "endpoint": endpoint,
            "region": self.region,
            "accessKeyID": "",
            "secretAccessKey": "",
            "sessionToken": "",
            **role,
        }
        if not tls:
            config["doNotUseTLS"] = True
        elif not self.verify_tls:
            config["doNotVerifyTLS"] = True
        elif self.ca_pem and not role:
            config["rootCA"] = b64encode(self.ca_pem).decode()
        if self.in_past:
            config["pointInTime"] = _PAST
        return {"type": "s3", "config": config}
