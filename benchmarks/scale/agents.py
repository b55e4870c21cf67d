"""`python -m benchmarks.scale.agents`: several node agents in one process, each served by `nodeagent.app.serve`."""

import argparse
import asyncio
import sys
from datetime import timedelta
from typing import Final

from benchmarks.scale.process import build_parser, report_ready, run_process
from core.models.names import MOVER_SERVICE_ACCOUNT
from nodeagent.app import serve
from nodeagent.runtime.settings import ListenAddress, Settings
from tests.support.children import wait_until_ready
from tests.support.sockets import free_port

_HOST: Final = "127.0.0.1"


async def _run(arguments: argparse.Namespace) -> None:
    ports = [free_port() for _ in arguments.node]
    async with asyncio.TaskGroup() as group:
        for node, port in zip(arguments.node, ports, strict=True):
            settings = Settings(
                node_name=node,
                namespace=arguments.namespace,
                kubeconfig=str(arguments.kubeconfig),
                config_map_name=arguments.config_map,
                mover_service_account=MOVER_SERVICE_ACCOUNT,
                metrics_address=ListenAddress(_HOST, port),
                lease_duration=timedelta(seconds=arguments.lease_seconds),
            )
            group.create_task(serve(settings), name=f"agent of {node}")
        for port in ports:
            await wait_until_ready(port)
        report_ready()


def main() -> int:
    """Serve until killed."""
    parser = build_parser("agents")
    parser.add_argument("--config-map", required=True)
    parser.add_argument("--lease-seconds", type=float, default=15.0)
    return run_process(parser, _run)


if __name__ == "__main__":
    sys.exit(main())
