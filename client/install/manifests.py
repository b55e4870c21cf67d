"""All objects of an installation, in the order in which they are applied.

`deploy/` is generated from these (`tools/manifests.py`), and the Helm chart is compared with them.
"""

from functools import cache
from importlib.resources import files

import yaml

from client.install.accounts import (
    build_agent_roles,
    build_mover_roles,
    build_service_accounts,
    build_volume_secrets_roles,
)
from client.install.daemonset import build_daemonset
from client.install.options import CONFIG_MAP, AgentOptions, InstallOptions, LocationOptions
from client.install.surroundings import (
    build_config_map,
    build_credentials,
    build_location,
    build_namespace,
    build_network_policy,
    build_priority_classes,
    build_security_constraints,
)
from core.kube.types import Manifest

__all__ = ["build_everything", "build_installation", "read_definitions"]


def build_installation(options: InstallOptions) -> list[Manifest]:
    """Return every object but the custom resource definitions; the DaemonSet is the last."""
    objects = [build_namespace(options)]
    if options.priority_classes:
        objects += build_priority_classes(options)
    objects += build_service_accounts(options)
    if options.openshift:
        objects += build_security_constraints(options)
    objects += [*build_agent_roles(options), *build_mover_roles(options)]
    if options.volume_secrets:
        objects += build_volume_secrets_roles(options)
    if options.credentials is not None:
        objects.append(build_credentials(options, options.credentials))
    if options.location is not None:
        objects.append(build_location(options, options.location))
    if options.configuration is not None:
        objects.append(build_config_map(options, options.configuration))
    if options.monitoring_namespace:
        objects.append(build_network_policy(options))
    return [*objects, build_daemonset(options)]


def build_everything(namespace: str) -> list[Manifest]:
    """Return every object that an installation in the namespace can have, whatever was chosen."""
    return build_installation(
        InstallOptions(
            namespace=namespace,
            agent=AgentOptions(config_map=CONFIG_MAP),
            credentials="",
            location=LocationOptions(provider="aws", bucket="any"),
            configuration={},
            openshift=True,
            monitoring_namespace=namespace,
            priority_classes=True,
            volume_secrets=True,
        )
    )


@cache
def read_definitions() -> tuple[Manifest, ...]:
    """Return our custom resource definitions, as apiextensions.k8s.io/v1 JSON dicts that must not be changed."""
    folder = files("client.install") / "crds"
    texts = (entry.read_text(encoding="utf-8") for entry in sorted(folder.iterdir(), key=lambda entry: entry.name))
    return tuple(yaml.safe_load(text) for text in texts)
