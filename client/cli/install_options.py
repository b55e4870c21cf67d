"""From the flags of `nodeagent install` to the options of an installation.

Source of what may be combined: Velero v1.18, Validate in pkg/cmd/cli/install/install.go.
"""

import re
from datetime import timedelta
from typing import Final

from client.cli.given_flags import GivenFlags
from client.install.options import (
    CONFIG_MAP,
    DEFAULT_IMAGE,
    FLAGS_OF_INSTALL,
    OWN_LOCATION_KEYS,
    TRUTH_KEYS,
    TRUTH_VALUES,
    TYPOGRAPHIC_QUOTES,
    AgentOptions,
    ContainerResources,
    InstallOptions,
    LocationOptions,
    ProxyOptions,
)
from core.endpoints import parse_endpoint
from core.errors import ConfigError
from core.models.base import JsonDict
from core.models.names import AGENT_LABELS, PART_OF_LABELS
from core.models.units import parse_quantity
from nodeagent.config.keys import load_json
from nodeagent.config.parse import parse_config
from nodeagent.config.source import document_in
from nodeagent.runtime.serve_flags import parse_serve

__all__ = ["build_options", "describe_defaults"]

_PROVIDERS: Final = ("aws", "azure", "gcp", "fs")
_PREFIX: Final = "velero.io/"

_IMAGE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:[:/@][A-Za-z0-9_][A-Za-z0-9._-]*)*")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DIRECTORY: Final = re.compile(r"(?:[^/\s]+(?:/[^/\s]+)*)?")
_ARGUMENT: Final = re.compile("--[a-z-]+=")
_PROXY: Final = re.compile(r"(?:https?|socks5)://\S+")
_COPIED: Final = re.compile(TYPOGRAPHIC_QUOTES)
_CERTIFICATE: Final = "-----BEGIN CERTIFICATE-----"
_RESERVED_LABELS: Final = ("name", *AGENT_LABELS, *PART_OF_LABELS)


def build_options(given: GivenFlags, namespace: str) -> InstallOptions:
    """Return the options; files that flags name are read.

    Raises:
        ConfigError: a value is not allowed, a flag is missing or excludes another, or a file cannot be read.
    """
    given.choice("--uploader-type", ("kopia",), "kopia")
    document = _read_configuration(given)
    config_map = given.name("--node-agent-configmap", CONFIG_MAP if document is not None else "")
    location = _build_location(given)
    return InstallOptions(
        namespace=namespace,
        image=_image(given),
        image_pull_policy=given.choice("--image-pull-policy", ("Always", "IfNotPresent", "Never"), "IfNotPresent"),
        pull_secrets=given.names("--image-pull-secret"),
        service_account=given.name("--service-account-name"),
        mover_service_account=_mover_account(given),
        service_account_annotations=given.annotations("--sa-annotations"),
        agent=_build_agent(given, config_map),
        proxy=_build_proxy(given),
        credentials=_read_credentials(given, location),
        location=location,
        configuration=document,
        openshift=given.switch("--openshift"),
        monitoring_namespace=given.namespace("--monitoring-namespace"),
        priority_classes=given.switch("--priority-classes"),
        volume_secrets=given.switch("--volume-secrets"),
    )


def describe_defaults(given: GivenFlags, options: InstallOptions) -> list[str]:
    """Return what a user of `velero install` would not expect, for the flags that were given."""
    notes = []
    if not given.has("--image"):
        notes.append(f"--image is not given: nodes must have {options.image}, or a default registry that does")
    if given.has("--service-account-name") and not given.has("--mover-service-account-name"):
        detail = (
            "use --mover-service-account-name for an account with fewer permissions"
            if options.mover_service_account
            else "use --mover-service-account-name or --sa-annotations if they need a cloud identity"
        )
        notes.append(f"data movers run as ServiceAccount {options.mover_account}: {detail}")
    return notes


def _build_agent(given: GivenFlags, config_map: str) -> AgentOptions:
    if not given.switch("--use-node-agent", default=True):
        raise ConfigError("--use-node-agent=false is not allowed: there would be no agents")
    if given.switch("--use-node-agent-windows"):
        raise ConfigError(
            "--use-node-agent-windows is not supported any more: there is no agent for Windows nodes, and volumes of "
            "Windows are left to Velero's (see docs/install.md#windows-nodes)"
        )
    priority_class = given.name("--node-agent-priority-class-name")
    if priority_class and given.switch("--priority-classes"):
        raise ConfigError("--node-agent-priority-class-name and --priority-classes exclude each other")
    return AgentOptions(
        config_map=config_map,
        repository_config_map=given.name("--backup-repository-configmap"),
        maintenance_config_map=given.name("--repo-maintenance-job-configmap"),
        priority_class=priority_class,
        kubelet_root=given.directory("--kubelet-root-dir", AgentOptions.kubelet_root),
        host_path=not given.switch("--node-agent-disable-host-path"),
        privileged=given.switch("--privileged-node-agent"),
        resources=_build_resources(given),
        pod_labels=given.labels("--pod-labels", reserved=_RESERVED_LABELS),
        pod_annotations=given.annotations("--pod-annotations"),
        node_selector=given.labels("--node-selector"),
        tolerations=given.tolerations("--toleration"),
        features=given.text("--features"),
        extra_args=_build_args(given),
    )


def _mover_account(given: GivenFlags) -> str:
    """Return the account of data movers; empty: one is created.

    Without credentials in a file, an account that is named has them, by a cloud identity, and as in Velero
    it is the movers', too.
    """
    account = given.name("--mover-service-account-name")
    return account or (given.name("--service-account-name") if given.switch("--no-secret") else "")


def _build_resources(given: GivenFlags) -> ContainerResources:
    standard = ContainerResources()
    cpu_request, cpu_limit = _requested(given, "cpu", standard.cpu_request, standard.cpu_limit)
    memory_request, memory_limit = _requested(given, "mem", standard.memory_request, standard.memory_limit)
    return ContainerResources(
        cpu_request=cpu_request, cpu_limit=cpu_limit, memory_request=memory_request, memory_limit=memory_limit
    )


def _requested(given: GivenFlags, what: str, standard_request: str, standard_limit: str) -> tuple[str, str]:
    """Return request and limit; a default gives way to what was typed."""
    flags = request_flag, limit_flag = f"--node-agent-pod-{what}-request", f"--node-agent-pod-{what}-limit"
    request, limit = given.quantity(request_flag, standard_request), given.quantity(limit_flag, standard_limit)
    if limit == "0" or parse_quantity(request) <= parse_quantity(limit):
        return request, limit
    if all(given.has(flag) for flag in flags):
        raise ConfigError(
            f'{request_flag}: "{request}" is not allowed: expected at most {limit_flag}, which is {limit}'
        )
    typed = request if given.has(request_flag) else limit
    return typed, typed


def _build_args(given: GivenFlags) -> tuple[str, ...]:
    frequency = "--default-repo-maintain-frequency"
    if given.has(frequency):
        given.duration(frequency, timedelta())
    own = (f"{frequency}={given.text(frequency)}",) if given.has(frequency) else ()
    arguments = given.texts("--agent-arg")
    for argument in arguments:
        allowed = "expected a flag of nodeagent serve and its value, such as --log-level=debug"
        if not _ARGUMENT.match(argument):
            raise ConfigError(f'--agent-arg: "{argument}" is not allowed: {allowed}')
        if argument.partition("=")[0] in FLAGS_OF_INSTALL:
            raise ConfigError(f'--agent-arg: "{argument}" is not allowed: expected a flag that install does not set')
        try:
            parse_serve([argument])
        except ConfigError as e:
            raise ConfigError(f'--agent-arg: "{argument}" is not allowed: {allowed}: {e}') from e
    return (*own, *arguments)


def _image(given: GivenFlags) -> str:
    image = given.text("--image") or DEFAULT_IMAGE
    if not _IMAGE.fullmatch(image):
        raise ConfigError(f'--image: "{image}" is not allowed: expected such as registry.example.com/node-agent:1.0')
    return image


def _build_proxy(given: GivenFlags) -> ProxyOptions:
    proxy = ProxyOptions(
        http=_proxy(given, "--http-proxy"),
        https=_proxy(given, "--https-proxy"),
        no_proxy=given.text("--no-proxy"),
    )
    if proxy.no_proxy and not (proxy.http or proxy.https):
        raise ConfigError("--no-proxy needs --http-proxy or --https-proxy: otherwise there is no proxy")
    return proxy


def _proxy(given: GivenFlags, flag: str) -> str:
    url = given.text(flag)
    if url and not _PROXY.fullmatch(url):
        # It may contain a password, and is not repeated.
        raise ConfigError(f"{flag}: the value is not allowed: expected a URL such as http://proxy.example.com:3128")
    return url


def _build_location(given: GivenFlags) -> LocationOptions | None:
    """Return the default location; None: there is to be none."""
    bucket = given.text("--bucket")
    if given.switch("--no-default-backup-location"):
        for flag in ("--bucket", "--prefix", "--backup-location-config"):
            if given.has(flag):
                raise ConfigError(f"{flag} and --no-default-backup-location exclude each other")
        return None
    for flag in ("--provider", "--bucket"):
        if not given.text(flag):
            raise ConfigError(f"{flag} is required: use --no-default-backup-location if there is to be no location")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f'--bucket: "{bucket}" is not allowed: expected a name such as backups')
    prefix = given.text("--prefix").strip("/")
    if not _DIRECTORY.fullmatch(prefix):
        raise ConfigError(f'--prefix: "{prefix}" is not allowed: expected a path such as clusters/east')
    config = _read_location_config(given)
    provider = given.text("--provider")
    if provider.removeprefix(_PREFIX) not in _PROVIDERS and not config.get("s3Url"):
        raise ConfigError(
            f'--provider: "{provider}" is not allowed: expected one of {", ".join(_PROVIDERS)}, '
            "or any with --backup-location-config s3Url=URL"
        )
    return LocationOptions(
        provider=provider,
        bucket=bucket,
        prefix=prefix,
        config=config,
        ca_certificate=_read_certificates(given),
    )


def _read_location_config(given: GivenFlags) -> dict[str, str]:
    flag = "--backup-location-config"
    config = given.pairs(flag)
    for key, value in config.items():
        wrong = f'{flag}: "{key}={value}" is not allowed: expected'
        if _COPIED.search(key + value) or (key.strip(), value.strip()) != (key, value):
            raise ConfigError(f"{wrong} no typographic quotes, and no blanks around key or value")
        if key in OWN_LOCATION_KEYS:
            raise ConfigError(f"{wrong} --{key}, since this key is ignored")
        if key in TRUTH_KEYS and value not in TRUTH_VALUES:
            raise ConfigError(f"{wrong} true or false")
    if config.get("s3Url"):
        try:
            parse_endpoint(config["s3Url"])
        except ConfigError as e:
            raise ConfigError(f"{flag}: s3Url: {e}") from None
    return config


def _read_certificates(given: GivenFlags) -> str:
    if not given.text("--cacert"):
        return ""
    content = given.file("--cacert")
    if _CERTIFICATE not in content:
        raise ConfigError(f"--cacert: {given.text('--cacert')} has no certificate in PEM")
    return content


def _read_credentials(given: GivenFlags, location: LocationOptions | None) -> str | None:
    without = given.switch("--no-secret")
    if given.text("--secret-file"):
        if without:
            raise ConfigError("--secret-file and --no-secret exclude each other")
        content = given.file("--secret-file")
        _check_credentials(given.text("--secret-file"), content, location)
        return content
    if not without:
        raise ConfigError("one of --secret-file and --no-secret is required")
    return None


def _check_credentials(path: str, content: str, location: LocationOptions | None) -> None:
    """Check that a program can read the credentials; they are not quoted.

    Raises:
        ConfigError: none can.
    """
    if _COPIED.search(content):
        raise ConfigError(f"--secret-file: {path} has typographic quotes: write it again with plain ones, or without")
    if location is None or location.provider.removeprefix(_PREFIX) != _PROVIDERS[0]:
        return
    profile = location.config.get("profile") or "default"
    if not re.search(rf"^\s*\[(?:profile )?\s*{re.escape(profile)}\s*\]", content.removeprefix("\ufeff"), re.MULTILINE):
        raise ConfigError(f"--secret-file: {path} has no section [{profile}], in which the keys must be")


def _read_configuration(given: GivenFlags) -> JsonDict | None:
    """Return the document of `--node-agent-config`; None: there is none."""
    if not given.text("--node-agent-config"):
        return None
    path, content = given.text("--node-agent-config"), given.file("--node-agent-config")
    try:
        text = document_in(content)
        errors = parse_config(text).errors
    except ConfigError as e:
        raise ConfigError(f"--node-agent-config: {path}: {e}") from e
    if errors:
        raise ConfigError(f"--node-agent-config: {path}: {'; '.join(map(str, errors))} (see nodeagent check-config)")
    document = load_json(text)
    return document if isinstance(document, dict) else {}
