"""The flags of `nodeagent install`: those of `velero install`, with its names, and those that are only ours.

The command gets what was typed (`client.cli.given_flags`); nothing is checked while the command line is parsed.
Source: Velero v1.18, pkg/cmd/cli/install/install.go.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import click

from client.cli.given_flags import GivenFlags, destination
from client.cli.options import UserCommand

__all__ = ["GROUPS", "SERVER_FLAGS", "InstallCommand", "given_in", "install_flags"]


class _Flag(NamedTuple):
    """One flag; one without `metavar` is a switch, and one with `many` may be repeated."""

    name: str
    metavar: str
    help: str
    many: bool = False


_PAIRS: Final = "K=V,..."
_FILE: Final = "PATH"
"""Of this machine: a shell completes it."""

GROUPS: Final[Mapping[str, tuple[_Flag, ...]]] = {
    "what is done": (
        _Flag("--apply", "", "apply the objects: this is the default, and creates or updates them"),
        _Flag("--dry-run", "", "print the objects, and access no cluster"),
        _Flag("--output", "yaml|json", "print the objects, also before they are applied (--dry-run: yaml)"),
        _Flag("--crds-only", "", "only the custom resource definitions; no other flag is checked"),
        _Flag("--force-conflicts", "", "take over fields that others have set (default: true); each is printed"),
        _Flag("--wait", "", "wait until the agents are ready and the location is reachable"),
        _Flag("--timeout", "DURATION", "of --wait (default: 5m)"),
    ),
    "object storage": (
        _Flag("--provider", "NAME", "aws (any S3), azure, gcp or fs, also with velero.io/ in front"),
        _Flag("--bucket", "NAME", "the bucket"),
        _Flag("--prefix", "DIRECTORY", "a directory in the bucket"),
        _Flag("--backup-location-config", _PAIRS, "config of the location, such as region=us-east-2", many=True),
        _Flag("--cacert", _FILE, "certificates of the storage's authority, in PEM"),
        _Flag("--secret-file", _FILE, "file with the credentials; becomes the Secret cloud-credentials"),
        _Flag("--no-secret", "", "there are no credentials in a file"),
        _Flag("--no-default-backup-location", "", "create no BackupStorageLocation"),
    ),
    "agents": (
        _Flag("--image", "IMAGE", "image of agents and data movers"),
        _Flag("--image-pull-policy", "POLICY", "Always, IfNotPresent (default) or Never"),
        _Flag("--image-pull-secret", "NAME,...", "Secrets with credentials of the image's registry", many=True),
        _Flag("--use-node-agent", "", "agents on all Linux nodes: only true is allowed, the default"),
        _Flag("--use-node-agent-windows", "", ""),
        _Flag("--uploader-type", "NAME", "kopia"),
        _Flag("--features", "NAMES", "feature flags of Velero; without effect on the agents"),
        _Flag("--agent-arg", "FLAG=VALUE", "one more flag of nodeagent serve", many=True),
        _Flag("--node-agent-disable-host-path", "", "no directories of pods: no transfers of pod volumes"),
        _Flag("--kubelet-root-dir", "DIRECTORY", "directory of kubelets on their nodes (default: /var/lib/kubelet)"),
        _Flag("--privileged-node-agent", "", "run the agents as root in privileged containers"),
        _Flag("--http-proxy", "URL", "HTTP_PROXY of agents and data movers"),
        _Flag("--https-proxy", "URL", "HTTPS_PROXY of agents and data movers"),
        _Flag("--no-proxy", "HOSTS", "NO_PROXY of agents and data movers"),
    ),
    "configuration": (
        _Flag("--node-agent-configmap", "NAME", "ConfigMap with the configuration; it must exist"),
        _Flag("--node-agent-config", _FILE, "file with the configuration; becomes that ConfigMap"),
        _Flag("--backup-repository-configmap", "NAME", "ConfigMap for new backup repositories; it must exist"),
        _Flag("--repo-maintenance-job-configmap", "NAME", "ConfigMap for maintenance Jobs; it must exist"),
        _Flag("--default-repo-maintain-frequency", "DURATION", "maintenance of repositories, without a Velero server"),
    ),
    "pods": (
        _Flag("--node-agent-pod-cpu-request", "QUANTITY", "CPU request of an agent (default: 50m); 0 is none"),
        _Flag("--node-agent-pod-mem-request", "QUANTITY", "memory request of an agent (default: 128Mi); 0 is none"),
        _Flag("--node-agent-pod-cpu-limit", "QUANTITY", "CPU limit of an agent (default: 0, none)"),
        _Flag("--node-agent-pod-mem-limit", "QUANTITY", "memory limit of an agent (default: 512Mi); 0 is none"),
        _Flag("--pod-labels", _PAIRS, "more labels of the agents' pods", many=True),
        _Flag("--pod-annotations", _PAIRS, "more annotations of the agents' pods", many=True),
        _Flag("--node-selector", _PAIRS, "labels of the nodes that get agents", many=True),
        _Flag(
            "--toleration",
            "TAINT,...",
            "taints that agents tolerate: key=value:EFFECT, key:EFFECT, key or *",
            many=True,
        ),
        _Flag("--node-agent-priority-class-name", "NAME", "priority class of the agents"),
        _Flag("--priority-classes", "", "create priority classes, and use that of the agents"),
    ),
    "accounts and permissions": (
        _Flag("--service-account-name", "NAME", "existing account of the agents; none is created"),
        _Flag("--mover-service-account-name", "NAME", "existing account of data movers; none is created"),
        _Flag("--sa-annotations", _PAIRS, "annotations of the accounts, such as a cloud identity", many=True),
        _Flag("--volume-secrets", "", "let agents copy Secrets and ConfigMaps that drivers of volumes need"),
        _Flag("--openshift", "", "create security context constraints of OpenShift"),
        _Flag("--monitoring-namespace", "NAME", "the only namespace that may read the agents' metrics"),
    ),
}

SERVER_FLAGS: Final = (
    "--concurrent-backups",
    "--csi-snapshot-early-frequent-polling",
    "--default-resource-modifier-configmap",
    "--default-snapshot-move-data",
    "--default-volumes-to-fs-backup",
    "--disable-informer-cache",
    "--garbage-collection-frequency",
    "--item-block-worker-count",
    "--keep-latest-maintenance-jobs",
    "--maintenance-job-cpu-limit",
    "--maintenance-job-cpu-request",
    "--maintenance-job-mem-limit",
    "--maintenance-job-mem-request",
    "--plugins",
    "--pod-volume-operation-timeout",
    "--restore-only",
    "--schedule-skip-immediately",
    "--server-priority-class-name",
    "--snapshot-location-config",
    "--use-volume-snapshots",
    "--velero-pod-cpu-limit",
    "--velero-pod-cpu-request",
    "--velero-pod-mem-limit",
    "--velero-pod-mem-request",
)
"""Flags of `velero install` that concern Velero's server: accepted without effect."""

_SERVER_SWITCHES: Final = frozenset(
    {
        "--csi-snapshot-early-frequent-polling",
        "--default-snapshot-move-data",
        "--default-volumes-to-fs-backup",
        "--disable-informer-cache",
        "--restore-only",
        "--schedule-skip-immediately",
        "--use-volume-snapshots",
    }
)


class InstallCommand(UserCommand):
    """A command whose help has its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each group, then all others."""
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        for title, flags in GROUPS.items():
            with formatter.section(title.capitalize()):
                formatter.write_dl([record for flag in flags if (record := records.pop(destination(flag.name)))])
        with formatter.section("Cluster"):
            formatter.write_dl([record for record in records.values() if record])


def install_flags(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add all flags; the command gets them by the names of their parameters, for `given_in`."""
    flags = [flag for group in GROUPS.values() for flag in group]
    flags += [_Flag(name, "" if name in _SERVER_SWITCHES else "VALUE", "") for name in SERVER_FLAGS]
    for flag in reversed(flags):
        more: dict[str, Any] = {"multiple": True} if flag.many else {}
        more |= {"type": click.Path()} if flag.metavar == _FILE else {}
        if not flag.metavar:
            # As pflag has it: --wait, --wait=true and --wait=false.
            more |= {"is_flag": False, "flag_value": "true"}
        spelled = [flag.name, "-o"] if flag.name == "--output" else [flag.name]
        hidden, metavar = not flag.help, flag.metavar or "[BOOL]"
        function = click.option(*spelled, metavar=metavar, help=flag.help, hidden=hidden, **more)(function)
    return function


def given_in(values: Mapping[str, Any]) -> tuple[GivenFlags, list[str]]:
    """Return the flags that were typed, and those of them that have no effect."""
    given = GivenFlags(values)
    return given, [flag for flag in SERVER_FLAGS if given.has(flag)]
