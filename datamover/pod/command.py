"""The commands that the node agent starts in a pod.

Knows what a pod's environment and service account give. Does not know flags.

The pod that makes a backup repository usable: connects to it, or creates it first.

Knows which BackupRepository, and that nothing is created in a read-only location. Does not
know who waits for the result.
"""

import logging
import os

from core.clock import SystemClock
from core.contract import InitResult
from core.errors import AgentError, ConfigError, RepositoryError
from core.kube.client import KubeClient
from core.kube.retry import Retry
from datamover.arguments import InitOptions, PodOptions
from datamover.kopia.repository import NotInitializedError, Repository
from datamover.pod.api_transport import pod_transport
from datamover.pod.cluster import FORBIDDEN_SECONDS, Surroundings, open_location
from datamover.pod.reporting import Ending, build_ending, build_failure, leave_message
from datamover.pod.transfer import PodTransfer
from datamover.runtime.cancellation import Canceller, run_unless_canceled
from datamover.runtime.redact import Redactor
from datamover.runtime.resources import read_limits
from datamover.runtime.signals import StopSignal
from datamover.runtime.work_dir import open_work_folder

__all__ = ["run_in_pod", "run_init"]


_logger = logging.getLogger(__name__)


async def run_init(name: str, around: Surroundings) -> int:
    """Make the BackupRepository's kopia repository usable; return the exit code.

    The termination message is the InitResult, or why there is none.
    """
    redactor = Redactor()
    canceller = Canceller()
    canceller.heed(around.stop)
    try:
        ending = await run_unless_canceled(lambda: _initialize(name, around, redactor), canceller)
    except Exception as e:
        ending = build_failure(e, redactor)
        _logger.log(logging.DEBUG if isinstance(e, AgentError) else logging.ERROR, "where it ended", exc_info=True)
    leave_message(ending, around.termination_file)
    return ending.exit_code


async def _initialize(name: str, around: Surroundings, redactor: Redactor) -> Ending:
    reader = around.reader
    wanted = await reader.repository(name)
    location = await reader.location(wanted.spec.backup_storage_location)
    with open_work_folder(around.environment) as folder:
        repository = await open_location(around.tuned(), location, wanted, folder=folder, redactor=redactor)
        if location.read_only:
            await _connect_read_only(repository)
            unique_id = await repository.unique_id()
        else:
            unique_id = await repository.ensure()
    return build_ending(InitResult(unique_id=unique_id).to_json())


async def _connect_read_only(repository: Repository) -> None:
    try:
        await repository.connect(read_only=True)
    except NotInitializedError as e:
        raise RepositoryError(f"{e}, and its BackupStorageLocation is read-only: none is created") from e


async def run_in_pod(options: PodOptions | InitOptions, stop: StopSignal) -> int:
    """Carry out what the node agent started this pod for."""
    clock = SystemClock()
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
        termination_file=options.termination_file,
    )
    try:
        if isinstance(options, InitOptions):
            return await run_init(options.name, around)
        return await PodTransfer(options, around).run()
    finally:
        await transport.close()
