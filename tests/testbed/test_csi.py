"""The test bed's CSI driver against its own tests and the conformance tests of the specification, without Kubernetes.

Source: https://github.com/kubernetes-csi/csi-test/tree/v5.4.0/cmd/csi-sanity
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tools import go_command, tool
from tests.testbed import janitor
from tests.testbed.layout import ROOT, make_layout

pytestmark = [
    pytest.mark.processes,
    pytest.mark.thorough,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount volumes"),
]

_RUN = """
"$1" -name csi.example -node node-1 -base "$3" -socket "$3/socket" -kubelet "$3/kubelet" &
until [ -S "$3/socket" ]; do sleep 0.05; done
"$2" --csi.endpoint "unix://$3/socket" --csi.mountdir "$3/mount" --csi.stagingdir "$3/staging" \
    --csi.testvolumesize 16777216 --csi.testvolumeexpandsize 33554432 --csi.testvolumeaccesstype "$4"
"""
"""The driver mounts in a mount namespace of its own, which ends with it."""


@pytest.fixture
def base() -> Iterator[Path]:
    """The folder of a storage, removed with the loop devices over its files."""
    layout = make_layout()
    cleaner = janitor.start(layout.base, "no-bed", root=ROOT)
    yield layout.base
    assert cleaner.stdin is not None
    cleaner.stdin.close()
    assert cleaner.wait() == 0


def test_sources_pass() -> None:
    """They have what conformance tests do not try: groups of snapshots."""
    # As tools/build.sh compiles them, so that nothing is compiled twice.
    argv = [str(go_command()), "test", "-vet=off", "-trimpath", "-gcflags=all=-dwarf=false", "./driver"]
    done = subprocess.run(
        argv,
        cwd=ROOT / "tools" / "csi",
        env={**os.environ, "CGO_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("access", ["mount", "block"])
def test_driver_does_what_the_specification_says(base: Path, access: str) -> None:
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    programs = [str(tool("csi", "driver")), str(tool("csi", "csi-sanity"))]
    argv = [*namespaces, "sh", "-euc", _RUN, "sh", *programs, str(base), access]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
