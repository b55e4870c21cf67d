"""What runs inside the namespaces: the first process, and under it the cluster and the command."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from tests.testbed.cluster import Cluster
from tests.testbed.firstprocess import run_as_first_process
from tests.testbed.layout import ROOT, Layout
from tests.testbed.processes import BedError

_GREETING = """
A cluster of your own. KUBECONFIG is set; the S3 bucket is {BED_S3_URL} {BED_S3_BUCKET}.
  kubectl get nodes,storageclasses
  less README.md                    what to try, with the manifests that are here
  kubectl apply -f {root}/deploy/crds && kubectl apply -k {root}/deploy
  nodeagent --help                  the commands of this checkout
  tail -f $BED_DIR/logs/*.log       the logs of the components
It ends, with everything in it, when you leave this shell.
"""


def main() -> int:
    """Be the first process; returns the exit code of the command."""
    return run_as_first_process(lambda: _work(*sys.argv[1:5], arguments=sys.argv[5:]))


def _work(base: str, bed: str, nodes: str, image: str, *, arguments: Sequence[str]) -> int:
    """Bring the cluster up and run what was asked for in it."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        cluster = Cluster(Layout(Path(base)), bed, int(nodes), Path(image))
        cluster.start()
        return _run(arguments[0], arguments[1:], {**os.environ, **cluster.environment()})
    except BedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(action: str, command: Sequence[str], env: Mapping[str, str]) -> int:
    folder = Path.cwd()
    if action == "demo":
        command = [sys.executable, "-m", "tests.testbed.demo"]
    elif action == "shell":
        command = [os.environ.get("SHELL", "/bin/bash")]
        folder = ROOT / "examples"
        print(_GREETING.format(root=ROOT, **env), file=sys.stderr)
    try:
        done = subprocess.run(list(command), env=dict(env), cwd=folder, check=False)
    except OSError as error:
        raise BedError(f"could not run {command[0]}: {error.strerror}") from error
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


if __name__ == "__main__":
    sys.exit(main())
