"""The commands `nodeagent install`, from flags to objects that are printed or applied, and `nodeagent uninstall`.

Source of what may be combined: Velero v1.18, Validate in pkg/cmd/cli/install/install.go.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import click

from client.cli import options as cli
from client.cli.install_flags import InstallCommand, find_ignored, install_flags
from client.cli.output import HEADING, OutputFormat, Printer, Styled
from client.install.manifests import build_installation, read_definitions
from client.install.options import (
    DEFAULT_IMAGE,
    TYPOGRAPHIC_QUOTES,
    AgentOptions,
    ContainerResources,
    InstallOptions,
    LocationOptions,
    ProxyOptions,
    place_of,
)
from client.install.run import run_install
from client.install.uninstall import RemovalPlan, plan_removal, refuse_interruption, remove
from client.schedules.store import renew_schedules
from client.session import Session
from core.clock import SystemClock
from core.errors import AgentError, ConfigError
from core.kube.client import select_labels
from core.models.names import PART_OF_LABELS
from core.models.units import parse_quantity
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

_EXAMPLES: Final = """\
examples:
  nodeagent uninstall --namespace staging
        show what is removed and what stays, ask, and remove it
  nodeagent uninstall --yes
        without a question; it refuses while transfers have not ended
  nodeagent uninstall --force
        without a question, and interrupt transfers

Custom resource definitions, custom resources, Secrets, the namespace and all backups stay; the last lines
of the output have the commands that delete them, unless others would lose something.

exit codes:
  0  done, or there was nothing to remove, or the answer was no
  1  an error of the cluster, transfers that have not ended, or agents that do not end
  2  invalid command line, a missing permission, a release of Helm, or the cluster is not reachable
"""


@click.command("uninstall", cls=cli.UserCommand, epilog=_EXAMPLES)
@cli.yes_option
@click.option("--force", is_flag=True, help="do not ask, and interrupt transfers that have not ended")
@click.option("--wait", is_flag=True, hidden=True, help="of Velero: the command always waits")
@cli.cluster_options
async def uninstall(cluster: Connection, printer: Printer, *, yes: bool, force: bool, wait: bool) -> None:  # noqa: ARG001 - as velero uninstall
    """Remove the node agents; backups stay."""
    plan = await plan_removal(cluster.client, cluster.namespace)
    if not plan.removed:
        printer.note(f"there is no installation of ours in namespace {cluster.namespace}")
        return
    if not force:
        refuse_interruption(plan.unfinished)
    _show(printer, plan)
    if not (yes or force or cli.confirm("Remove the node agents?", "nothing was removed")):
        printer.note("nothing was removed")
        return
    await remove(cluster.client, SystemClock(), plan, lambda place: printer.line(f"{place}: deleted"), force=force)
    _show_rest(printer, plan)


def _show(printer: Printer, plan: RemovalPlan) -> None:
    for title, names in (("Removed:", map(place_of, plan.removed)), ("Kept:", plan.kept)):
        printer.line(Styled(title, HEADING))
        for name in names:
            printer.line(f"  {name}")


def _show_rest(printer: Printer, plan: RemovalPlan) -> None:
    """Show how the rest is deleted; no command that would delete what others use."""
    commands, labels = [], select_labels(PART_OF_LABELS)
    for what, command, lost in (
        (f"namespace {plan.namespace}", f"namespace {plan.namespace}", plan.dependents.namespace),
        ("custom resource definitions", f"crd -l {labels}", plan.dependents.definitions),
    ):
        if lost:
            printer.note(f"deleting the {what} would also delete {', '.join(lost)}")
        else:
            commands.append(f"  kubectl delete {command}")
    if commands:
        title = "To delete the rest, with all records of backups (their data stays in the bucket):"
        printer.line(Styled(title, HEADING))
        for line in commands:
            printer.line(line)
    if plan.unfinished:
        printer.note(f"{len(plan.unfinished)} transfers keep a finalizer: the namespace is not deleted before they are")


_Given = Mapping[str, Any]
"""The flags by the names of their parameters: what `client.cli.install_flags` has made of them."""

_PROVIDERS: Final = ("aws", "azure", "gcp", "fs")
_PREFIX: Final = "velero.io/"
_CERTIFICATE: Final = "-----BEGIN CERTIFICATE-----"


def build_options(given: _Given, namespace: str) -> InstallOptions:
    """Return the options.

    Raises:
        ConfigError: a flag is missing or excludes another, or a file does not have what it is for.
    """
    location = _build_location(given)
    return InstallOptions(
        namespace=namespace,
        image=given["image"] or DEFAULT_IMAGE,
        image_pull_policy=given["image_pull_policy"],
        pull_secrets=tuple(name for names in given["image_pull_secret"] for name in names),
        service_account=given["service_account_name"] or None,
        mover_service_account=_mover_account(given),
        service_account_annotations=_merge(given["sa_annotations"]),
        agent=_build_agent(given),
        proxy=_build_proxy(given),
        credentials=_read_credentials(given, location),
        location=location,
        configuration=given["node_agent_config"],
        openshift=given["openshift"],
        monitoring_namespace=given["monitoring_namespace"] or None,
        priority_classes=given["priority_classes"],
        volume_secrets=given["volume_secrets"],
        restore_tests=given["restore_tests"],
    )


def describe_defaults(given: _Given, options: InstallOptions) -> list[str]:
    """Return what a user of `velero install` would not expect, for the flags that were given."""
    notes = []
    if given["image"] is None:
        notes.append(f"--image is not given: nodes must have {options.image}, or a default registry that does")
    if given["service_account_name"] is not None and given["mover_service_account_name"] is None:
        detail = (
            "use --mover-service-account-name for an account with fewer permissions"
            if options.mover_service_account
            else "use --mover-service-account-name or --sa-annotations if they need a cloud identity"
        )
        notes.append(f"data movers run as ServiceAccount {options.mover_account}: {detail}")
    return notes


def _merge(found: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the pairs of a flag that may be repeated."""
    return {key: value for pairs in found for key, value in pairs.items()}


def _build_agent(given: _Given) -> AgentOptions:
    if not given["use_node_agent"]:
        raise ConfigError("--use-node-agent=false is not allowed: there would be no agents")
    if given["use_node_agent_windows"]:
        raise ConfigError(
            "--use-node-agent-windows is not supported any more: there is no agent for Windows nodes, and volumes of "
            "Windows are left to Velero's (see docs/install.md#windows-nodes)"
        )
    priority_class = given["node_agent_priority_class_name"] or None
    if priority_class and given["priority_classes"]:
        raise ConfigError("--node-agent-priority-class-name and --priority-classes exclude each other")
    return AgentOptions(
        config_map=given["node_agent_configmap"] or None,
        repository_config_map=given["backup_repository_configmap"] or None,
        maintenance_config_map=given["repo_maintenance_job_configmap"] or None,
        priority_class=priority_class,
        kubelet_root=given["kubelet_root_dir"],
        host_path=not given["node_agent_disable_host_path"],
        privileged=given["privileged_node_agent"],
        resources=_build_resources(given),
        pod_labels=_merge(given["pod_labels"]),
        pod_annotations=_merge(given["pod_annotations"]),
        node_selector=_merge(given["node_selector"]),
        tolerations=tuple(one for several in given["toleration"] for one in several),
        features=given["features"] or None,
        extra_args=_build_args(given),
    )


def _mover_account(given: _Given) -> str | None:
    """Return the account of data movers; None: one is created.

    Without credentials in a file, an account that is named has them, by a cloud identity, and as in Velero
    it is the movers', too.
    """
    account = given["mover_service_account_name"] or (given["no_secret"] and given["service_account_name"])
    return account or None


def _build_resources(given: _Given) -> ContainerResources:
    standard = ContainerResources()
    cpu_request, cpu_limit = _requested(given, "cpu", standard.cpu_request, standard.cpu_limit)
    memory_request, memory_limit = _requested(given, "mem", standard.memory_request, standard.memory_limit)
    return ContainerResources(
        cpu_request=cpu_request, cpu_limit=cpu_limit, memory_request=memory_request, memory_limit=memory_limit
    )


def _requested(given: _Given, what: str, standard_request: str, standard_limit: str) -> tuple[str, str]:
    """Return request and limit; a default gives way to what was typed."""
    typed: tuple[str | None, str | None] = (
        given[f"node_agent_pod_{what}_request"],
        given[f"node_agent_pod_{what}_limit"],
    )
    request, limit = typed[0] or standard_request, typed[1] or standard_limit
    if limit == "0" or parse_quantity(request) <= parse_quantity(limit):
        return request, limit
    if None not in typed:
        flag = f"--node-agent-pod-{what}"
        raise ConfigError(
            f'{flag}-request: "{request}" is not allowed: expected at most {flag}-limit, which is {limit}'
        )
    chosen = typed[0] or limit
    return chosen, chosen


def _build_args(given: _Given) -> tuple[str, ...]:
    frequency = given["default_repo_maintain_frequency"]
    own = (f"--default-repo-maintain-frequency={frequency}",) if frequency is not None else ()
    return (*own, *given["agent_arg"])


def _build_proxy(given: _Given) -> ProxyOptions:
    proxy = ProxyOptions(
        http=given["http_proxy"] or None, https=given["https_proxy"] or None, no_proxy=given["no_proxy"] or None
    )
    if proxy.no_proxy and not (proxy.http or proxy.https):
        raise ConfigError("--no-proxy needs --http-proxy or --https-proxy: otherwise there is no proxy")
    return proxy


def _build_location(given: _Given) -> LocationOptions | None:
    if given["no_default_backup_location"]:
        for flag in ("bucket", "prefix", "backup_location_config"):
            if given[flag] not in {None, ()}:
                name = flag.replace("_", "-")
                raise ConfigError(f"--{name} and --no-default-backup-location exclude each other")
        return None
    for flag in ("provider", "bucket"):
        if not given[flag]:
            raise ConfigError(f"--{flag} is required: use --no-default-backup-location if there is to be no location")
    provider, config = given["provider"], _merge(given["backup_location_config"])
    if provider.removeprefix(_PREFIX) not in _PROVIDERS and not config.get("s3Url"):
        raise ConfigError(
            f'--provider: "{provider}" is not allowed: expected one of {", ".join(_PROVIDERS)}, '
            "or any with --backup-location-config s3Url=URL"
        )
    certificates: cli.TextFile | None = given["cacert"]
    if certificates is not None and _CERTIFICATE not in certificates.content:
        raise ConfigError(f"--cacert: {certificates.path} has no certificate in PEM")
    return LocationOptions(
        provider=provider,
        bucket=given["bucket"],
        prefix=given["prefix"] or None,
        config=config,
        ca_certificate=certificates.content if certificates is not None else None,
    )


def _read_credentials(given: _Given, location: LocationOptions | None) -> str | None:
    file: cli.TextFile | None = given["secret_file"]
    if file is None:
        if not given["no_secret"]:
            raise ConfigError("one of --secret-file and --no-secret is required")
        return None
    if given["no_secret"]:
        raise ConfigError("--secret-file and --no-secret exclude each other")
    _check_credentials(file, location)
    return file.content


def _check_credentials(file: cli.TextFile, location: LocationOptions | None) -> None:
    """Check that a program can read the credentials; they are not quoted."""
    path, content = file
    if re.search(TYPOGRAPHIC_QUOTES, content):
        raise ConfigError(f"--secret-file: {path} has typographic quotes: write it again with plain ones, or without")
    if location is None or location.provider.removeprefix(_PREFIX) != _PROVIDERS[0]:
        return
    profile = location.config.get("profile") or "default"
    if not re.search(rf"^\s*\[(?:profile )?\s*{re.escape(profile)}\s*\]", content.removeprefix("\ufeff"), re.MULTILINE):
        raise ConfigError(f"--secret-file: {path} has no section [{profile}], in which the keys must be")


_TIMEOUT: Final = timedelta(minutes=5)

_INSTALL_EXAMPLES: Final = """\
examples:
  nodeagent install --provider aws --bucket backups --backup-location-config region=us-east-2
                    --secret-file ./credentials --image registry.example.com/node-agent:0.1.0 --wait
        agents on every Linux node, with a location; the same command again updates them
  nodeagent install --no-default-backup-location --no-secret --dry-run -o yaml
        the objects of agents that use locations and credentials which exist already
  nodeagent install --crds-only
        only the custom resource definitions, to update them

Flags of velero install have the same meaning here; flags of Velero's server are accepted and named in a note.
docs/install.md has more, and the permissions that the command needs.

exit codes:
  0  done
  1  an error of the cluster, or agents that do not come up
  2  invalid command line or configuration, a missing permission, or the cluster is not reachable
"""


@click.command("install", cls=InstallCommand, epilog=_INSTALL_EXAMPLES)
@install_flags
@cli.cluster_options
def install(access: ClusterAccess, **given: Any) -> None:
    """Install the node agents, or update them."""
    printer, namespace, options, form = Printer(), access.namespace, None, None
    if not given["crds_only"]:
        namespace = cli.NAMESPACE.read("--namespace", access.namespace)
        options = build_options(given, namespace)
        printer.notes(describe_defaults(given, options))
    if ignored := find_ignored(given):
        printer.note(f"flags of Velero's server have no effect here: {', '.join(ignored)}")
    if given["dry_run"] or given["output"]:
        form = OutputFormat(given["output"] or OutputFormat.YAML)
        objects = [*read_definitions(), *(build_installation(options) if options is not None else ())]
        printer.document({"apiVersion": "v1", "kind": "List", "items": objects}, form)
    if not given["dry_run"]:
        asyncio.run(_apply(printer, replace(access, namespace=namespace), options, given, printed=form is not None))


async def _apply(
    printer: Printer, access: ClusterAccess, options: InstallOptions | None, given: _Given, *, printed: bool
) -> None:
    timeout = given["timeout"] or _TIMEOUT if given["wait"] else None
    async with connect(access) as cluster:
        with printer.progress("checking permissions") as show:
            # Programs that read the objects find nothing else on standard output.
            say = show if printed else printer.line
            await run_install(
                Session.of(cluster, printer.note, show),
                options,
                lambda place, result: say(f"{place}: {result}"),
                force=given["force_conflicts"],
                timeout=timeout,
            )
            if timeout is not None and options is not None:
                say("the agents are ready" + (", and the location is reachable" if options.location else ""))
        if options is not None and not printed:
            await _renew_schedules(printer, access, cluster)


async def _renew_schedules(printer: Printer, access: ClusterAccess, cluster: Connection) -> None:
    """Give schedules the image of the agents; the agents are installed also where that fails."""
    try:
        failures = await renew_schedules(Session.of(cluster, printer.note), (), printer.line)
    except AgentError as e:
        failures = [f"schedules were not renewed: {e}"]
    printer.notes(f"{failure}: run {cli.command_for(access, 'nodeagent schedule renew')}" for failure in failures)
