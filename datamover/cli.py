"""The mover's command line, in a pod and by hand: what is run, what is printed, which exit code.

Does not know how data is moved.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from core.clock import SystemClock
from core.contract import BackupResult, MoverVerb, RestoreResult
from core.errors import AgentError, ConfigError
from core.kube.client import KubeClient
from core.kube.retry import Retry
from core.logs import set_up_logging
from datamover.arguments import LIST, hand_repository, parse_arguments, pod_load
from datamover.bar import Bar, format_bytes
from datamover.byhand import ByHand
from datamover.init import run_init
from datamover.limits import read_limits
from datamover.pod import PodLoad
from datamover.signals import StopSignal
from datamover.snapshot import Snapshot
from datamover.surroundings import Surroundings
from datamover.transport import pod_transport

__all__ = ["run"]


def run(argv: Sequence[str], stop: StopSignal) -> int:
    """Run one command and return its exit code."""
    try:
        arguments = parse_arguments(argv)
        by_hand = bool(getattr(arguments, "repository", ""))
        set_up_logging(arguments.log_level or ("warning" if by_hand else "info"), arguments.log_format)
        if by_hand:
            return asyncio.run(_run_by_hand(arguments, stop))
        return asyncio.run(_run_in_pod(arguments, stop))
    except AgentError as e:
        sys.stderr.write(f"datamover: {e}\n")
        return e.exit_code


async def _run_in_pod(arguments: argparse.Namespace, stop: StopSignal) -> int:
    """Carry out what the node agent started this pod for."""
    clock = SystemClock()
    load = None if arguments.command == MoverVerb.INIT_REPOSITORY else pod_load(arguments)
    namespace, node = os.environ.get("VELERO_NAMESPACE", ""), os.environ.get("NODE_NAME", "")
    if not namespace:
        raise ConfigError("VELERO_NAMESPACE is not set: it tells where the custom resources are")
    transport = pod_transport(os.environ)
    around = Surroundings(
        client=KubeClient(transport, Retry(clock)),
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


async def _run_by_hand(arguments: argparse.Namespace, stop: StopSignal) -> int:
    clock = SystemClock()
    repository = hand_repository(arguments, os.environ)
    hand = ByHand(repository, os.environ, limits=read_limits(), clock=clock, stop=stop)
    bar = None if arguments.json else Bar(sys.stderr, clock)
    if arguments.command == LIST:
        _print_list(await hand.list(), as_json=arguments.json)
    elif arguments.command == MoverVerb.BACKUP:
        if arguments.source is None:
            raise ConfigError("--source is needed: the folder or block device to back up")
        _print_backup(await hand.back_up(arguments.source, arguments.name, bar), as_json=arguments.json)
    else:
        if arguments.target is None or not arguments.snapshot:
            raise ConfigError("--snapshot and --target are needed: which snapshot, and where it goes")
        _print_restore(await hand.restore(arguments.snapshot, arguments.target, bar), as_json=arguments.json)
    return 0


def _print_backup(result: BackupResult, *, as_json: bool) -> None:
    if as_json:
        _print(result.model_dump_json(by_alias=True))
        return
    changed = (
        "" if result.incremental_bytes == result.total_bytes else f", {format_bytes(result.incremental_bytes)} changed"
    )
    _print(f"snapshot {result.snapshot_id} of {result.source.by_path}: {format_bytes(result.total_bytes)}{changed}")


def _print_restore(result: RestoreResult, *, as_json: bool) -> None:
    if as_json:
        _print(result.model_dump_json(by_alias=True))
        return
    _print(f"restored {format_bytes(result.total_bytes)} to {result.target.by_path}")


def _print_list(snapshots: list[Snapshot], *, as_json: bool) -> None:
    if as_json:
        _print(json.dumps([asdict(snapshot) for snapshot in snapshots]))
        return
    for one in snapshots:
        _print(f"{one.snapshot_id}  {one.started[:19]}Z  {format_bytes(one.size_bytes):>10}  {one.source}")
    if not snapshots:
        _print("the repository holds no snapshot")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
