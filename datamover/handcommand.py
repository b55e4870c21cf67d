"""The commands that a person gives, and what is printed.

Does not know flags, or how data is moved.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict

from core.clock import SystemClock
from core.contract import BackupResult, MoverVerb, RestoreResult
from core.errors import ConfigError
from datamover.arguments import LIST, hand_repository
from datamover.bar import Bar, format_bytes
from datamover.byhand import ByHand
from datamover.limits import read_limits
from datamover.signals import StopSignal
from datamover.snapshot import Snapshot

__all__ = ["run_by_hand"]


async def run_by_hand(arguments: argparse.Namespace, stop: StopSignal) -> int:
    """Carry out the command, print its result, and return the exit code."""
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
        _print(result.to_json())
        return
    changed = (
        "" if result.incremental_bytes == result.total_bytes else f", {format_bytes(result.incremental_bytes)} changed"
    )
    _print(f"snapshot {result.snapshot_id} of {result.source.by_path}: {format_bytes(result.total_bytes)}{changed}")


def _print_restore(result: RestoreResult, *, as_json: bool) -> None:
    if as_json:
        _print(result.to_json())
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
