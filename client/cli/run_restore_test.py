"""The command `nodeagent run-restore-test` of the leader's Jobs: it needs no Python package but the agent's.

What it finds out is on the transfer, as of `backup verify --restore`, and in its output, which the leader reads. What
it creates belongs to its Job: with that, Kubernetes deletes what a command has left that was killed.
"""

import argparse
import asyncio
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from client.collections.collection import Backups
from client.collections.models import BackupOrigin, BackupVolume, build_backup
from client.session import Session, interrupted_by_signals
from client.text import print_line
from client.verifications.report import VerificationError, VerifiedVolume, VolumeOutcome
from client.verifications.verify import VerificationRequest, verify_volumes
from core.contract import shorten_message
from core.errors import AgentError, ConfigError, Translated
from core.kube.client import Selection
from core.kube.resources import JOBS
from core.kube.types import OwnerRef
from core.models.job_output import JobOutput
from core.models.names import RESTORE_TEST_COMMAND
from core.models.units import parse_positive_duration
from core.models.verification import (
    VERIFIED_LINE,
    WHOLE_PERCENT,
    SnapshotVerification,
    VerificationOutcome,
    VerifiedSnapshot,
)
from core.text import one_line
from exposer.pods import JOB_VARIABLE
from nodeagent.maintenance.restore_tests import RestoreTestRequest
from nodeagent.runtime.connection import ClusterAccess, connect
from nodeagent.runtime.settings import CommandParser, add_kubeconfig

_ABOUT: Final = """\
Restores the volume of one backup into a scratch PVC, compares it with its snapshot, and removes the
PVC again. Jobs of the leader run it (nodeagent.io.verification.restoreTest)."""

_MESSAGE: Final = Path("/dev/termination-log")
"""Source: Kubernetes v1.34, the default of a container's terminationMessagePath."""

_MODELS: Final = {resource.kind: (resource, model) for resource, model in Backups.models.items()}


def run_words(words: Sequence[str]) -> int:
    """Run the command with the words after its name, and return the exit code.

    Raises:
        AgentError: it could not be found out whether the volume comes back; the termination message says why.
    """
    request, access = _parse(words)
    try:
        with interrupted_by_signals():
            message = asyncio.run(_run(request, access))
    except AgentError as e:
        _write_message(one_line(str(e)))
        raise
    _write_message(message)
    return 0


def _parse(words: Sequence[str]) -> tuple[RestoreTestRequest, ClusterAccess]:
    parser = CommandParser(
        prog=f"nodeagent {RESTORE_TEST_COMMAND}",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("kind", metavar="KIND", choices=sorted(_MODELS), help="DataUpload or PodVolumeBackup")
    parser.add_argument("name", metavar="NAME", help="name of the transfer")
    parser.add_argument("--storage-class", metavar="NAME", default="", help="class of the scratch PVC")
    parser.add_argument("--timeout", metavar="DURATION", default="6h", help="how long it may take (default: 6h)")
    parser.add_argument("--agent-namespace", metavar="NAME", required=True, help="namespace of the agents")
    add_kubeconfig(parser.add_argument_group("cluster"))
    given = parser.parse_args(list(words))
    with Translated(ValueError, ConfigError, "--timeout"):
        timeout = parse_positive_duration(given.timeout)
    request = RestoreTestRequest(given.kind, given.name, given.agent_namespace, timeout, given.storage_class or None)
    return request, ClusterAccess(given.kubeconfig or None, given.kubecontext, given.agent_namespace)


async def _run(request: RestoreTestRequest, access: ClusterAccess) -> str:
    async with connect(access) as cluster:
        tools = await _own(Session.of(cluster, print_line, print_line), os.environ.get(JOB_VARIABLE, ""))
        return await prove_restore(tools, request, JobOutput())


async def prove_restore(tools: Session, request: RestoreTestRequest, output: JobOutput) -> str:
    """Test the restore, write what was found out to `output`, and return the termination message.

    Raises:
        VerificationError: there is no such copy any more.
    """
    volume = await _find(tools, request)
    how = VerificationRequest(WHOLE_PERCENT, restore=True, timeout=request.timeout, storage_class=request.storage_class)
    for found in await verify_volumes(tools, [volume], how):
        print_line(f"PVC {found.namespace}/{found.claim} {found.outcome}: {found.message}".removesuffix(": "))
        output.write(VERIFIED_LINE, _to_line(found))
    return output.seal(SnapshotVerification(snapshots=1))


def _to_line(found: VerifiedVolume) -> VerifiedSnapshot:
    faults = [found.message] if found.message else []
    return VerifiedSnapshot(
        id=found.snapshot_id,
        outcome=None if found.outcome is VolumeOutcome.UNVERIFIED else VerificationOutcome(found.outcome),
        files=found.files,
        bytes=found.bytes,
        faults=faults,
        fault_count=len(faults),
    )


async def _find(tools: Session, request: RestoreTestRequest) -> BackupVolume:
    resource, model = _MODELS[request.kind]
    selection = Selection(resource, tools.namespace, field_selector=f"metadata.name={request.name}")
    transfers = [model.parse(raw) for raw in await tools.client.list(selection)]
    volumes = build_backup(BackupOrigin.NODEAGENT, request.name, transfers).volumes if transfers else []
    for volume in volumes:
        if volume.snapshot_id:
            return volume
    raise VerificationError(f"{request.kind} {tools.namespace}/{request.name} is gone, or has no snapshot")


async def _own(tools: Session, name: str) -> Session:
    """Return the tools so that the Job of that name, if this is a pod of one, owns what is created."""
    if not name:
        return tools
    meta = (await tools.client.get(JOBS, tools.namespace, name))["metadata"]
    owner: OwnerRef = {"apiVersion": JOBS.api_version, "kind": JOBS.kind, "name": name, "uid": meta["uid"]}
    return dataclasses.replace(tools, owners=[owner])


def _write_message(text: str) -> None:
    if os.environ.get(JOB_VARIABLE):
        _MESSAGE.write_text(shorten_message(text), encoding="utf-8")
