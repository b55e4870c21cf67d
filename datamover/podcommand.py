"""The commands that the node agent starts in a pod.

Knows what a pod's environment and service account give. Does not know flags.
"""

import argparse
import os

from core.clock import SystemClock
from core.contract import MoverVerb
from core.errors import ConfigError
from core.kube.client import KubeClient
from core.kube.retry import Retry
from datamover.arguments import pod_load
from datamover.init import run_init
from datamover.limits import read_limits
from datamover.pod import PodLoad
from datamover.signals import StopSignal
from datamover.surroundings import FORBIDDEN_SECONDS, Surroundings
from datamover.transport import pod_transport

__all__ = ["run_in_pod"]


async def run_in_pod(arguments: argparse.Namespace, stop: StopSignal) -> int:
    """Carry out what the node agent started this pod for."""
    clock = SystemClock()
    load = None if arguments.command == MoverVerb.INIT_REPOSITORY else pod_load(arguments)
    namespace, node = os.environ.get("VELERO_NAMESPACE", ""), os.environ.get("NODE_NAME", "")
    if not namespace:
        raise ConfigError("VELERO_NAMESPACE is not set: it tells where the custom resources are")
    transport = pod_transport(os.environ, clock)
    around = Surroundings(
        client=KubeClient(transport, Retry(clock, forbidden_seconds=FORBIDDEN_SECONDS)),
        clock=clock,
        namespace=namespace,
        node=node,
        environment=os.environ,
        limits=read_limits(),
        stop=stop,
        termination_file=arguments.termination_message_path,
    )
    try:
        if load is None:
            return await run_init(arguments.backup_repository, around)
        return await PodLoad(load, around).run()
    finally:
        await transport.close()
