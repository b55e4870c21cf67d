"""Azure Blob Storage: from the config and credentials of a BackupStorageLocation to kopia's access to it.

Source: Velero v1.18, pkg/util/azure; kopia 0.23.1, cli/storage_azure.go and repo/blob/azure/azure_storage.go;
azidentity 1.13; azcore 1.22, arm/runtime/runtime.go.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self
from urllib.parse import urlsplit

from core.clock import Clock
from core.errors import RepositoryError
from core.redact import Redactor
from datamover.runtime.work_dir import WorkDir
from datamover.storage import providers

_STORAGE_KEY: Final = "AZURE_STORAGE_KEY"
_SAS_TOKEN: Final = "AZURE_STORAGE_SAS_TOKEN"  # noqa: S105
_TENANT: Final = "AZURE_TENANT_ID"
_CLIENT: Final = "AZURE_CLIENT_ID"
_AUTHORITY: Final = "AZURE_AUTHORITY_HOST"
_METADATA_HOST: Final = "AZURE_POD_IDENTITY_AUTHORITY_HOST"
_SECRET: Final = "AZURE_CLIENT_SECRET"  # noqa: S105 - the name of a variable
_CERTIFICATE: Final = "AZURE_CLIENT_CERTIFICATE"
_TOKEN_FILE: Final = "AZURE_FEDERATED_TOKEN_FILE"  # noqa: S105
_IDENTITY: Final = (_TENANT, _CLIENT, _SECRET, _CERTIFICATE, _SAS_TOKEN)
_USER: Final = "AZURE_USERNAME"
_OWN: Final = (_SECRET, _CERTIFICATE, f"{_CERTIFICATE}_PATH", _USER)
"""With one of them, an identity is the file's."""

_INHERITED: Final = (*_IDENTITY, _TOKEN_FILE, _AUTHORITY, _METADATA_HOST, _STORAGE_KEY)
_KEYS: Final = ("AZURE_STORAGE_ACCOUNT_ACCESS_KEY", _STORAGE_KEY)
"""Variables of a credentials file with the account's key, unless `storageAccountKeyEnvVar` names another."""

_OF_CERTIFICATE: Final = ("AZURE_CLIENT_CERTIFICATE_PASSWORD", "AZURE_CLIENT_SEND_CERTIFICATE_CHAIN")

_FALSE: Final = frozenset({"", "0", "f", "false"})
_TRUE: Final = frozenset({"1", "t", "true"})


@dataclass(frozen=True)
class _Cloud:
    """The domain of blob endpoints and the authority for identities (None: the public cloud's), and the management."""

    domain: str | None = None
    authority: str | None = None
    management: str = "https://management.azure.com"
    audience: str = "https://management.core.windows.net/"


_CHINA: Final = _Cloud(
    "blob.core.chinacloudapi.cn",
    "https://login.chinacloudapi.cn/",
    "https://management.chinacloudapi.cn",
    "https://management.core.chinacloudapi.cn/",
)
_GOVERNMENT: Final = _Cloud(
    "blob.core.usgovcloudapi.net",
    "https://login.microsoftonline.us/",
    "https://management.usgovcloudapi.net",
    "https://management.core.usgovcloudapi.net/",
)
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
class AzureStorage(providers.BucketStorage):
    """A prefix in an Azure container; `variables` are kopia's, `account_key` is where to fetch a missing one."""

    account: str
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca_pem: bytes = b""
    domain: str | None = None
    account_key: providers.AzureAccountKey | None = field(default=None, repr=False)

    @property
    def description(self) -> str:
        """`azure://account/container/prefix`."""
        return f"azure://{self.account}/{self.bucket}/{self.prefix}"

    @property
    def needs_pod(self) -> bool:
        """Whether there is neither a key nor a secret."""
        return not any(self.variables.get(name) for name in providers.SECRET_VARIABLES)

    async def with_fetched_credentials(self, clock: Clock, redactor: Redactor) -> Self:
        """Return this storage with the account's key, if Azure's management has to give it."""
        if self.account_key is None:
            return self
        from datamover.storage.azure_keys import fetch_account_key  # noqa: PLC0415 - few locations need it

        key = await fetch_account_key(self.account_key, clock, redactor)
        return replace(self, account_key=None, variables={**self.variables, _STORAGE_KEY: key})

    def access(self, work_dir: WorkDir) -> providers.KopiaAccess:
        """Return kopia's arguments, and the credentials."""
        flags = ["azure", f"--container={self.bucket}", f"--prefix={self.prefix}", f"--storage-account={self.account}"]
        if self.domain:
            flags.append(f"--storage-domain={self.domain}")
        # kopia would prefer an inherited signature to the location's key.
        variables = {_SAS_TOKEN: "", **self.variables, **providers.trust_variables(work_dir, self.ca_pem)}
        return providers.KopiaAccess(flags, variables)


def read_azure_variables(source: providers.CredentialsText | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the credentials file, and what kopia would read of the environment.

    As with Velero, only the environment names a token file: its content is sent to the authority that a location names.
    The token is for the client that the environment names, too, unless the file has a secret of its own.
    """
    inherited = {name: environment[name] for name in _INHERITED if environment.get(name)}
    given = providers.parse_variables(source) if source else {}
    given.pop(_TOKEN_FILE, None)
    if _TOKEN_FILE in inherited and not any(given.get(name) for name in _OWN):
        given |= {name: inherited[name] for name in (_TENANT, _CLIENT) if name in inherited}
    return {**inherited, **given}


def build_azure(
    config: Mapping[str, str], given: Mapping[str, str], *, container: str, prefix: str, ca_pem: bytes
) -> AzureStorage:
    """Return the storage that `config` and the variables `given` describe. Raises RepositoryError without access."""
    if not (account := config.get("storageAccount", "")):
        raise RepositoryError("config.storageAccount is not set")
    cloud_name = given.get("AZURE_CLOUD_NAME", "")
    if (cloud := _CLOUDS.get(cloud_name.lower())) is None:
        raise RepositoryError(f'AZURE_CLOUD_NAME: unknown cloud "{cloud_name}"')
    authority = config.get("activeDirectoryAuthorityURI", "") or cloud.authority
    domain = _domain(account, config.get("storageAccountURI", "")) or cloud.domain
    key = _account_key(config, given)
    wanted = None if key else _wanted_key(config, given, cloud, ca_pem)
    variables = {_STORAGE_KEY: key} if key else {} if wanted else _identity(config, given)
    return AzureStorage(
        bucket=container,
        prefix=prefix,
        account=account,
        variables={**variables, **({_AUTHORITY: authority} if authority else {})},
        ca_pem=ca_pem,
        domain=domain,
        account_key=wanted,
    )


def _identity(config: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an identity that reads and writes blobs itself."""
    if unsupported := _unsupported(given):
        raise RepositoryError(
            f"{unsupported}: not supported by kopia, which needs the account's key, a client secret, "
            "a certificate without a password, or workload identity"
        )
    variables = {name: given[name] for name in _IDENTITY if given.get(name)}
    if certificate := given.get(f"{_CERTIFICATE}_PATH", ""):
        variables[_CERTIFICATE] = providers.read_credentials(certificate, f"{_CERTIFICATE}_PATH").text
    proof = variables.get(_SECRET) or variables.get(_CERTIFICATE) or given.get(_TOKEN_FILE)
    if given.get(_SAS_TOKEN) or (proof and given.get(_TENANT) and given.get(_CLIENT)):
        return variables
    if proof:
        missing = " and ".join(name for name in (_TENANT, _CLIENT) if not given.get(name))
        raise RepositoryError(f"not in the credentials: {missing}")
    if _uses_identity(config):
        raise RepositoryError(
            "config.useAAD: kopia cannot read and write blobs with the managed identity of a node: use workload "
            "identity, a client secret or a certificate, or let the data mover fetch the account's key (without useAAD)"
        )
    missing = " and ".join(name for name, value in _management(config, given).items() if not value)
    raise RepositoryError(
        f"no key in the credentials, and none can be fetched with the managed identity of the node: not set: {missing}"
    )


def _wanted_key(
    config: Mapping[str, str], given: Mapping[str, str], cloud: _Cloud, ca_pem: bytes
) -> providers.AzureAccountKey | None:
    """Return the key to fetch, as Velero does unless `useAAD` is set; None: kopia uses the identity itself."""
    group, subscription = _management(config, given).values()
    by_itself = _uses_identity(config) or given.get(_SAS_TOKEN)
    if by_itself or not group or not subscription or _has_certificate(given) or _unsupported(given):
        return None
    identity = providers.AzureIdentity(
        authority=config.get("activeDirectoryAuthorityURI", "")
        or cloud.authority
        or given.get(_AUTHORITY, "")
        or providers.AZURE_AUTHORITY,
        tenant=given.get(_TENANT, ""),
        client=given.get(_CLIENT, ""),
        secret=given.get(_SECRET, ""),
        token_file=given.get(_TOKEN_FILE, ""),
        metadata=given.get(_METADATA_HOST, "") or providers.AZURE_METADATA,
    )
    if (identity.secret or identity.token_file) and not (identity.tenant and identity.client):
        return None
    return providers.AzureAccountKey(
        account=config["storageAccount"],
        subscription=subscription,
        group=group,
        management=cloud.management,
        audience=cloud.audience,
        identity=identity,
        ca_pem=ca_pem,
    )


def _has_certificate(given: Mapping[str, str]) -> bool:
    """Return whether a certificate is used: a secret takes precedence."""
    named = given.get(_CERTIFICATE) or given.get(f"{_CERTIFICATE}_PATH")
    return bool(named) and not given.get(_SECRET)


def _unsupported(given: Mapping[str, str]) -> str | None:
    """Return the variable that Velero would use, and kopia cannot; None: there is none."""
    if given.get(_SECRET):
        return None
    names = _OF_CERTIFICATE if _has_certificate(given) else (_USER,)
    return next((name for name in names if given.get(name, "").lower() not in _FALSE), None)


def _management(config: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return resource group and subscription of the account, by the name of their config key."""
    return {
        "resourceGroup": config.get("resourceGroup", "") or given.get("AZURE_RESOURCE_GROUP", ""),
        "subscriptionId": config.get("subscriptionId", "") or given.get("AZURE_SUBSCRIPTION_ID", ""),
    }


def _uses_identity(config: Mapping[str, str]) -> bool:
    """Return whether the identity itself reads and writes blobs."""
    text = config.get("useAAD", "").lower()
    if text not in _TRUE | _FALSE:
        raise RepositoryError(f'config.useAAD: must be true or false: "{text}"')
    return text in _TRUE


def _account_key(config: Mapping[str, str], given: Mapping[str, str]) -> str | None:
    """Return the account's key; None to use an identity."""
    if named := config.get("storageAccountKeyEnvVar"):
        if not given.get(named):
            raise RepositoryError(f"config.storageAccountKeyEnvVar: not in the credentials: {named}")
        return given[named]
    return next((given[name] for name in _KEYS if given.get(name)), None)


def _domain(account: str, uri: str) -> str | None:
    """Return the domain that kopia appends to the account's name; None: the cloud's own."""
    if not uri:
        return None
    try:
        parts = urlsplit(uri)
    except ValueError as e:
        raise RepositoryError(f'config.storageAccountURI: invalid: "{uri}"') from e
    name, _, domain = parts.netloc.partition(".")
    if parts.scheme != "https" or name != account or not domain or parts.path.strip("/"):
        raise RepositoryError(f'config.storageAccountURI: must be https://{account}.<domain>: "{uri}"')
    return domain
