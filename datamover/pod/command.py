"""The command that the node agent started a pod for: a transfer, or something about a repository or a location."""

import os

from core.clock import SystemClock
from core.errors import ConfigError
from core.kube.client import KubeClient
from core.kube.transport import Retry
from core.redact import Redactor
from datamover.arguments import PodOptions, StorageCommand
from datamover.pod.api_transport import pod_transport
from datamover.pod.cluster import FORBIDDEN_SECONDS, PodContext
from datamover.pod.transfer import PodTransfer
from datamover.runtime.confinement import find_means, report_means
from datamover.runtime.resources import read_limits
from datamover.runtime.signals import StopSignal


async def run_in_pod(options: PodOptions | StorageCommand, stop: StopSignal, redactor: Redactor) -> int:
    """Run the command of this pod, and return the exit code; secrets that it learns are added to `redactor`."""
    clock = SystemClock()
    namespace, node = os.environ.get("VELERO_NAMESPACE", ""), os.environ.get("NODE_NAME", "")
    if not namespace:
        raise ConfigError("VELERO_NAMESPACE is not set: it names the namespace of the custom resources")
    transport = pod_transport(os.environ, clock)
    report_means(find_means())
    context = PodContext(
        client=KubeClient(transport, Retry(clock, forbidden_seconds=FORBIDDEN_SECONDS)),
        clock=clock,
        namespace=namespace,
        node=node,
        environment=os.environ,
        limits=read_limits(),
        stop=stop,
        termination_file=options.termination_file,
        redactor=redactor,
    )
    try:
        if isinstance(options, PodOptions):
            return await PodTransfer(options, context).run()
        from datamover.pod.storage_commands import run_storage_command  # noqa: PLC0415 - not needed for a transfer

        return await run_storage_command(options.spec, context)
    finally:
        await transport.close()
