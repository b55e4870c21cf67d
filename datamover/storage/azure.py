"""Azure Blob Storage: from the config and credentials of a BackupStorageLocation to kopia's access to it.

Knows Velero's config keys, the clouds, and the flags and variables of kopia and Azure's library.
Does not know where the credentials come from.
Source: Velero v1.18, pkg/util/azure; kopia 0.23.1, cli/storage_azure.go; azidentity 1.13.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from core.errors import RepositoryError
from datamover.runtime.work_dir import WorkDir
from datamover.storage.credentials import CredentialsText, parse_variables
from datamover.storage.providers import PROBE_PREFIX, Storage, StorageAccess, trust_variables

__all__ = ["AzureStorage", "build_azure"]

_KEYS: Final = ("AZURE_STORAGE_ACCOUNT_ACCESS_KEY", "AZURE_STORAGE_KEY")
"""Variables of a credentials file with the account's key, unless `storageAccountKeyEnvVar` names another."""

_IDENTITY: Final = ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_CLIENT_CERTIFICATE")


@dataclass(frozen=True)
class _Cloud:
    """The domain of blob endpoints and the authority for identities; empty: the public cloud's."""

    domain: str = ""
    authority: str = ""


_CHINA: Final = _Cloud("blob.core.chinacloudapi.cn", "https://login.chinacloudapi.cn/")
_GOVERNMENT: Final = _Cloud("blob.core.usgovcloudapi.net", "https://login.microsoftonline.us/")
_CLOUDS: Final[Mapping[str, _Cloud]] = {
    "": _Cloud(),
    "azurecloud": _Cloud(),
    "azurepubliccloud": _Cloud(),
    "azurechinacloud": _CHINA,
    "azureusgovernment": _GOVERNMENT,
    "azureusgovernmentcloud": _GOVERNMENT,
}
"""Keyed by `AZURE_CLOUD_NAME` in lower case."""


@dataclass(frozen=True)
class AzureStorage(Storage):
    """A prefix in an Azure blob container; `variables` are kopia's, such as AZURE_STORAGE_KEY."""

    container: str
    prefix: str
    account: str
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca_pem: bytes = b""
    domain: str = ""

    @property
    def description(self) -> str:
        """`azure://account/container/prefix`."""
        return f"azure://{self.account}/{self.container}/{self.prefix}"

    def for_probe(self) -> Self:
        """Return a prefix below this one, without a repository."""
        return replace(self, prefix=f"{self.prefix}{PROBE_PREFIX}")

    def access(self, work_dir: WorkDir) -> StorageAccess:
        """Return kopia's arguments, and the credentials."""
        arguments = [
            "azure",
            f"--container={self.container}",
            f"--prefix={self.prefix}",
            f"--storage-account={self.account}",
        ]
        if self.domain:
            arguments.append(f"--storage-domain={self.domain}")
        return StorageAccess(arguments, {**self.variables, **trust_variables(work_dir, self.ca_pem)})


def build_azure(
    config: Mapping[str, str], source: CredentialsText | None, *, container: str, prefix: str, ca_pem: bytes
) -> AzureStorage:
    """Return the storage that `config` and the credentials describe.

    Raises:
        RepositoryError: they are incomplete or invalid.
    """
    account = config.get("storageAccount", "")
    if not account:
        raise RepositoryError("config.storageAccount is not set")
    given = parse_variables(source) if source else {}
    cloud = _cloud(given.get("AZURE_CLOUD_NAME", ""))
    variables = {name: given[name] for name in _IDENTITY if given.get(name)}
    if certificate := given.get("AZURE_CLIENT_CERTIFICATE_PATH", ""):
        variables["AZURE_CLIENT_CERTIFICATE"] = _read(certificate)
    if key := _account_key(config, given):
        variables["AZURE_STORAGE_KEY"] = key
    if authority := config.get("activeDirectoryAuthorityURI", "") or cloud.authority:
        variables["AZURE_AUTHORITY_HOST"] = authority
    return AzureStorage(
        container=container,
        prefix=prefix,
        account=account,
        variables=variables,
        ca_pem=ca_pem,
        domain=_domain(account, config.get("storageAccountURI", "")) or cloud.domain,
    )


def _cloud(name: str) -> _Cloud:
    cloud = _CLOUDS.get(name.lower())
    if cloud is None:
        raise RepositoryError(f'AZURE_CLOUD_NAME: unknown cloud "{name}"')
    return cloud


def _account_key(config: Mapping[str, str], given: Mapping[str, str]) -> str:
    """Return the account's key; empty to use an identity."""
    if named := config.get("storageAccountKeyEnvVar", ""):
        if not given.get(named):
            raise RepositoryError(f"config.storageAccountKeyEnvVar: not in the credentials: {named}")
        return given[named]
    return next((given[name] for name in _KEYS if given.get(name)), "")


def _domain(account: str, uri: str) -> str:
    """Return the domain that kopia appends to the account's name."""
    if not uri:
        return ""
    parts = urlsplit(uri)
    name, _, domain = parts.netloc.partition(".")
    if parts.scheme != "https" or name != account or not domain or parts.path.strip("/"):
        raise RepositoryError(f'config.storageAccountURI: must be https://{account}.<domain>: "{uri}"')
    return domain


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise RepositoryError(f"AZURE_CLIENT_CERTIFICATE_PATH: cannot read {path}: {e}") from e
