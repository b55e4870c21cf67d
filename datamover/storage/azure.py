"""Azure's blobs: from the config of a location and its credentials to how kopia reaches them.

Knows the peer's config keys, the clouds, and the flags and variables that kopia and Azure's own
library heed. Does not know where the credentials were found.
Source: Velero v1.18, pkg/util/azure; kopia 0.23.1, cli/storage_azure.go; azidentity 1.13.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from core.errors import RepositoryError
from datamover.runtime.work_dir import WorkFolder
from datamover.storage.credentials import CredentialsText, parse_variables
from datamover.storage.providers import NEARBY, Reach, Storage, trust_variables

__all__ = ["AzureStorage", "build_azure"]

_KEYS: Final = ("AZURE_STORAGE_ACCOUNT_ACCESS_KEY", "AZURE_STORAGE_KEY")
"""Of a credentials file: the account's key, unless `storageAccountKeyEnvVar` names another."""

_IDENTITY: Final = ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_CLIENT_CERTIFICATE")


@dataclass(frozen=True)
class _Cloud:
    """Where a cloud keeps blobs, and who vouches for identities there; empty: the public one's."""

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
"""By `AZURE_CLOUD_NAME` in lower case."""


@dataclass(frozen=True)
class AzureStorage(Storage):
    """A prefix in an Azure blob container; `variables` are kopia's own: AZURE_STORAGE_KEY and the like."""

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

    def nearby(self) -> Self:
        """Return a prefix below this one."""
        return replace(self, prefix=f"{self.prefix}{NEARBY}")

    def reach(self, folder: WorkFolder) -> Reach:
        """Return kopia's arguments, and the credentials."""
        arguments = [
            "azure",
            f"--container={self.container}",
            f"--prefix={self.prefix}",
            f"--storage-account={self.account}",
        ]
        if self.domain:
            arguments.append(f"--storage-domain={self.domain}")
        return Reach(arguments, {**self.variables, **trust_variables(folder, self.ca_pem)})


def build_azure(
    config: Mapping[str, str], source: CredentialsText | None, *, container: str, prefix: str, ca_pem: bytes
) -> AzureStorage:
    """Return the storage that `config` and the credentials name.

    Raises:
        RepositoryError: they cannot be used.
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
        raise RepositoryError(f"AZURE_CLOUD_NAME {name!r} is no cloud that is known here")
    return cloud


def _account_key(config: Mapping[str, str], given: Mapping[str, str]) -> str:
    """Return the account's key; empty: an identity is to be used."""
    if named := config.get("storageAccountKeyEnvVar", ""):
        if not given.get(named):
            raise RepositoryError(f"config.storageAccountKeyEnvVar: the credentials have no {named}")
        return given[named]
    return next((given[name] for name in _KEYS if given.get(name)), "")


def _domain(account: str, uri: str) -> str:
    """Return what follows the account's name in the address that kopia makes of both."""
    if not uri:
        return ""
    parts = urlsplit(uri)
    name, _, domain = parts.netloc.partition(".")
    if parts.scheme != "https" or name != account or not domain or parts.path.strip("/"):
        raise RepositoryError(f"config.storageAccountURI {uri!r} is no https://{account}.<domain>, as kopia needs it")
    return domain


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise RepositoryError(f"AZURE_CLIENT_CERTIFICATE_PATH {path} cannot be read: {e}") from e
