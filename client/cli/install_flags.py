"""The flags of `nodeagent install`: Velero's, with its names, and our own ones.

Source: Velero v1.18, pkg/cmd/cli/install/install.go.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import click

from client.cli import options as cli
from client.install import options
from core.errors import ConfigError, Translated
from core.models.base import JsonDict
from core.models.names import AGENT_LABELS, PART_OF_LABELS
from core.models.storage import parse_endpoint
from core.models.units import parse_positive_duration
from nodeagent.config.parse import document_in, parse_config, parse_object
from nodeagent.runtime.settings import parse_serve

_ARGUMENT: Final = re.compile("--[a-z-]+=")
_PROXY: Final = re.compile(r"(?:https?|socks5)://\S+")
_RESERVED_LABELS: Final = ("name", *AGENT_LABELS, *PART_OF_LABELS)


def _read_configuration(path: str) -> JsonDict | None:
    file = cli.read_file(path)
    if file is None:
        return None
    with Translated(ConfigError, ValueError, path):
        text = document_in(file.content)
        errors = parse_config(text).errors
    if errors:
        raise ValueError(f"{path}: {'; '.join(map(str, errors))} (see nodeagent check-config)")
    return parse_object(text, path)


def _parse_location_config(text: str) -> dict[str, str]:
    config = cli.parse_pairs(text)
    for key, value in config.items():
        pair = f"{key}={value}"
        if re.search(options.TYPOGRAPHIC_QUOTES, pair) or (key.strip(), value.strip()) != (key, value):
            raise cli.not_allowed(pair, "no typographic quotes, and no blanks around key or value")
        if key in options.OWN_LOCATION_KEYS:
            raise cli.not_allowed(pair, f"--{key}, since this key is ignored")
        if key in options.TRUTH_KEYS and value not in options.TRUTH_VALUES:
            raise cli.not_allowed(pair, "true or false")
    if config.get("s3Url"):
        with Translated(ConfigError, ValueError, "s3Url"):
            parse_endpoint(config["s3Url"])
    return config


def _parse_directory(text: str) -> str:
    if not text.strip("/") or not text.startswith("/") or ".." in text.split("/"):
        raise cli.not_allowed(text, f"an absolute path such as {options.AgentOptions.kubelet_root}")
    return text


def _parse_proxy(url: str) -> str:
    if url and not _PROXY.fullmatch(url):
        # It may contain a password, and is not repeated.
        raise ValueError("the value is not allowed: expected a URL such as http://proxy.example.com:3128")
    return url


def _parse_frequency(text: str) -> str:
    """Return the duration as it was typed: an argument of the agents."""
    parse_positive_duration(text)
    return text


def _parse_argument(argument: str) -> str:
    expected = "a flag of nodeagent serve and its value, such as --log-level=debug"
    if not _ARGUMENT.match(argument):
        raise cli.not_allowed(argument, expected)
    if argument.partition("=")[0] in options.FLAGS_OF_INSTALL:
        raise cli.not_allowed(argument, "a flag that install does not set")
    try:
        parse_serve([argument])
    except ConfigError as e:
        raise cli.not_allowed(argument, f"{expected}: {e}") from e
    return argument


def _parse_pod_labels(text: str) -> dict[str, str]:
    labels = cli.parse_labels(text)
    for key, value in labels.items():
        if key in _RESERVED_LABELS:
            other = f"other keys than {', '.join(_RESERVED_LABELS)}, which select the agents"
            raise cli.not_allowed(f"{key}={value}", other)
    return labels


class _Flag(NamedTuple):
    """One flag, by default of the type of its `metavar`; one with `many` may be repeated."""

    name: str
    metavar: str
    help: str
    many: bool = False
    type: click.ParamType[Any] | None = None
    default: object = None


_some_directory: Final = cli.matching(r"(?:[^/\s]+(?:/[^/\s]+)*)?", "a path such as clusters/east")
_IMAGE: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*(?:[:/@][A-Za-z0-9_][A-Za-z0-9._-]*)*"
_BUCKET: Final = cli.FlagType(cli.matching(r"[A-Za-z0-9][A-Za-z0-9._-]*", "a name such as backups"))
_PREFIX: Final = cli.FlagType(lambda text: _some_directory(text.strip("/")))
_LOCATION: Final = cli.FlagType(_parse_location_config)
_DOCUMENT: Final = cli.PathType(_read_configuration)
_FREQUENCY: Final = cli.FlagType(_parse_frequency)
_POD_LABELS: Final = cli.FlagType(_parse_pod_labels)
_LABELS: Final = cli.FlagType(cli.parse_labels)

_TYPES: Final[Mapping[str, click.ParamType[Any]]] = {
    "": cli.SWITCH,
    "DIRECTORY": cli.FlagType(_parse_directory),
    "DURATION": cli.DURATION,
    "FLAG=VALUE": cli.FlagType(_parse_argument),
    "IMAGE": cli.FlagType(cli.matching(_IMAGE, "such as registry.example.com/node-agent:1.0")),
    "KEY=VALUE,...": cli.FlagType(cli.parse_annotations),
    "NAME": cli.NAME,
    "NAME,...": cli.NAMES,
    "PATH": cli.FILE,
    "POLICY": cli.one_of("Always", "IfNotPresent", "Never"),
    "QUANTITY": cli.QUANTITY,
    "TAINT,...": cli.TAINTS,
    "URL": cli.FlagType(_parse_proxy),
    "yaml|json": cli.one_of("yaml", "json"),
}
"""Of a flag, by its metavar; any text for others."""

GROUPS: Final[Mapping[str, tuple[_Flag, ...]]] = {
    "what is done": (
        _Flag("--apply", "", "apply the objects: this is the default, and creates or updates them"),
        _Flag("--dry-run", "", "print the objects, and access no cluster"),
        _Flag("--output", "yaml|json", "print the objects, also before they are applied (--dry-run: yaml)"),
        _Flag("--crds-only", "", "only the custom resource definitions; no other flag is checked"),
        _Flag(
            "--force-conflicts",
            "",
            "take over fields that others have set (default: true); each is printed",
            default=True,
        ),
        _Flag("--wait", "", "wait until the agents are ready and the location is reachable"),
        _Flag("--timeout", "DURATION", "how long --wait may take (default: 5m)"),
    ),
    "object storage": (
        _Flag("--provider", "NAME", "aws (any S3), azure, gcp or fs, also with velero.io/ in front", type=click.STRING),
        _Flag("--bucket", "NAME", "the bucket", type=_BUCKET),
        _Flag("--prefix", "DIRECTORY", "a directory in the bucket", type=_PREFIX),
        _Flag(
            "--backup-location-config",
            "KEY=VALUE,...",
            "config of the location, such as region=us-east-2",
            many=True,
            type=_LOCATION,
        ),
        _Flag("--cacert", "PATH", "certificates of the storage's authority, in PEM"),
        _Flag("--secret-file", "PATH", "file with the credentials; becomes the Secret cloud-credentials"),
        _Flag("--no-secret", "", "there are no credentials in a file"),
        _Flag("--no-default-backup-location", "", "create no BackupStorageLocation"),
    ),
    "agents": (
        _Flag("--image", "IMAGE", "image of agents and data movers"),
        _Flag("--image-pull-policy", "POLICY", "Always, IfNotPresent (default) or Never", default="IfNotPresent"),
        _Flag("--image-pull-secret", "NAME,...", "Secrets with credentials of the image's registry", many=True),
        _Flag("--use-node-agent", "", "agents on all Linux nodes: only true is allowed, the default", default=True),
        _Flag("--use-node-agent-windows", "", ""),
        _Flag("--uploader-type", "NAME", "kopia", type=cli.one_of("kopia")),
        _Flag("--features", "NAMES", "feature flags of Velero; without effect on the agents"),
        _Flag("--agent-arg", "FLAG=VALUE", "one more flag of nodeagent serve", many=True),
        _Flag("--node-agent-disable-host-path", "", "no directories of pods: no transfers of pod volumes"),
        _Flag(
            "--kubelet-root-dir",
            "DIRECTORY",
            "directory of kubelets on their nodes (default: /var/lib/kubelet)",
            default=options.AgentOptions.kubelet_root,
        ),
        _Flag("--privileged-node-agent", "", "run the agents as root in privileged containers"),
        _Flag("--http-proxy", "URL", "HTTP_PROXY of agents and data movers"),
        _Flag("--https-proxy", "URL", "HTTPS_PROXY of agents and data movers"),
        _Flag("--no-proxy", "HOSTS", "NO_PROXY of agents and data movers"),
    ),
    "configuration": (
        _Flag("--node-agent-configmap", "NAME", "ConfigMap with the configuration; it must exist"),
        _Flag("--node-agent-config", "PATH", "file with the configuration; becomes that ConfigMap", type=_DOCUMENT),
        _Flag("--backup-repository-configmap", "NAME", "ConfigMap for new backup repositories; it must exist"),
        _Flag("--repo-maintenance-job-configmap", "NAME", "ConfigMap for maintenance Jobs; it must exist"),
        _Flag(
            "--default-repo-maintain-frequency",
            "DURATION",
            "maintenance of repositories, without a Velero server",
            type=_FREQUENCY,
        ),
    ),
    "pods": (
        _Flag("--node-agent-pod-cpu-request", "QUANTITY", "CPU request of an agent (default: 50m); 0 is none"),
        _Flag("--node-agent-pod-mem-request", "QUANTITY", "memory request of an agent (default: 128Mi); 0 is none"),
        _Flag("--node-agent-pod-cpu-limit", "QUANTITY", "CPU limit of an agent (default: 0, none)"),
        _Flag("--node-agent-pod-mem-limit", "QUANTITY", "memory limit of an agent (default: 512Mi); 0 is none"),
        _Flag("--pod-labels", "KEY=VALUE,...", "more labels of the agents' pods", many=True, type=_POD_LABELS),
        _Flag("--pod-annotations", "KEY=VALUE,...", "more annotations of the agents' pods", many=True),
        _Flag("--node-selector", "KEY=VALUE,...", "labels of the nodes that get agents", many=True, type=_LABELS),
        _Flag(
            "--toleration",
            "TAINT,...",
            "taints that agents tolerate: key=value:EFFECT, key:EFFECT, key or *",
            many=True,
        ),
        _Flag("--node-agent-priority-class-name", "NAME", "priority class of the agents"),
        _Flag("--priority-classes", "", "create priority classes, and use the agents' own"),
    ),
    "accounts and permissions": (
        _Flag("--service-account-name", "NAME", "existing account of the agents; none is created"),
        _Flag("--mover-service-account-name", "NAME", "existing account of data movers; none is created"),
        _Flag("--sa-annotations", "KEY=VALUE,...", "annotations of the accounts, such as a cloud identity", many=True),
        _Flag("--volume-secrets", "", "let agents copy Secrets and ConfigMaps that drivers of volumes need"),
        _Flag("--restore-tests", "", "create the account that restore tests of the leader need"),
        _Flag("--openshift", "", "create security context constraints of OpenShift"),
        _Flag(
            "--monitoring-namespace", "NAME", "the only namespace that may read the agents' metrics", type=cli.NAMESPACE
        ),
    ),
}

_SERVER_SWITCHES: Final = (
    "--csi-snapshot-early-frequent-polling",
    "--default-snapshot-move-data",
    "--default-volumes-to-fs-backup",
    "--disable-informer-cache",
    "--restore-only",
    "--schedule-skip-immediately",
    "--use-volume-snapshots",
)

SERVER_FLAGS: Final = (
    *_SERVER_SWITCHES,
    "--concurrent-backups",
    "--default-resource-modifier-configmap",
    "--garbage-collection-frequency",
    "--item-block-worker-count",
    "--keep-latest-maintenance-jobs",
    "--maintenance-job-cpu-limit",
    "--maintenance-job-cpu-request",
    "--maintenance-job-mem-limit",
    "--maintenance-job-mem-request",
    "--plugins",
    "--pod-volume-operation-timeout",
    "--server-priority-class-name",
    "--snapshot-location-config",
    "--velero-pod-cpu-limit",
    "--velero-pod-cpu-request",
    "--velero-pod-mem-limit",
    "--velero-pod-mem-request",
)
"""Flags of `velero install` that concern Velero's server: accepted without effect."""

_OF_DEFINITIONS: Final = frozenset({"--apply", "--dry-run", "--output", "--crds-only", "--force-conflicts", "--wait"})
"""What also applies with `--crds-only`."""


def _parameter(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


class InstallCommand(cli.UserCommand):
    """A command whose help has its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each group, then all others."""
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        for title, flags in GROUPS.items():
            with formatter.section(title.capitalize()):
                formatter.write_dl([record for flag in flags if (record := records.pop(_parameter(flag.name)))])
        with formatter.section("Cluster"):
            formatter.write_dl([record for record in records.values() if record])


class _Option(click.Option):
    """A flag that is not checked beside `--crds-only`, as in Velero."""

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        return None if ctx.params.get("crds_only") else super().type_cast_value(ctx, value)


def install_flags(function: Callable[..., object]) -> Callable[..., object]:
    """Add all flags; the command gets them by the names of their parameters."""
    flags = [flag for group in GROUPS.values() for flag in group]
    flags += [_Flag(name, "" if name in _SERVER_SWITCHES else "VALUE", "", type=click.STRING) for name in SERVER_FLAGS]
    for flag in reversed(flags):
        kind = flag.type or _TYPES.get(flag.metavar, click.STRING)
        # As pflag has it: --wait, --wait=true and --wait=false.
        more: dict[str, Any] = {} if flag.metavar else {"is_flag": False, "flag_value": "true"}
        function = click.option(
            *([flag.name, "-o"] if flag.name == "--output" else [flag.name]),
            cls=click.Option if flag.name in _OF_DEFINITIONS or kind is click.STRING else _Option,
            type=kind,
            default=False if kind is cli.SWITCH and flag.default is None else flag.default,
            multiple=flag.many,
            is_eager=flag.name == "--crds-only",
            metavar=flag.metavar or "[BOOL]",
            help=flag.help,
            hidden=not flag.help,
            **more,
        )(function)
    return function


def find_ignored(given: Mapping[str, Any]) -> list[str]:
    """Return the flags that were given and have no effect."""
    return sorted(flag for flag in SERVER_FLAGS if given[_parameter(flag)] is not None)
