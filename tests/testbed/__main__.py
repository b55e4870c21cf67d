"""`python -m tests.testbed run|shell|demo`: a command, a shell or the demonstration in a new cluster."""

import argparse
import sys

from tests.testbed.isolation import build_parts, check_machine, run_isolated
from tests.testbed.processes import BedError


def main() -> int:
    arguments = _parser().parse_args()
    command = list(getattr(arguments, "command", []))
    if command[:1] == ["--"]:
        command = command[1:]
    if arguments.action == "run" and not command:
        print("error: run needs a command, as in: run -- kubectl get nodes", file=sys.stderr)
        return 2
    try:
        check_machine()
        image = build_parts()
    except (BedError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return run_isolated([arguments.action, *command], nodes=arguments.nodes, image=image)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.testbed", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2), help="default: 1")
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="run a command; its exit code is this one's")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    actions.add_parser("shell", help="open a shell in which kubectl reaches the cluster")
    actions.add_parser("demo", help="move a volume out and back, and show how")
    return parser


if __name__ == "__main__":
    sys.exit(main())
