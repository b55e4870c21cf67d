"""How `tools/build.sh` builds the binaries of a tool: with a `go` that writes its arguments into what it builds."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.tools import go_command

pytestmark = pytest.mark.processes

_CONFIGURATION = """\
# binary  package  tags of its own
server example.org/cmd/server
client example.org/cmd/client
renamed example.org/cmd/other
testing example.org/cmd/server testing
tags small
ldflags -X version=1
"""
# FAIL is the last part of the package that does not compile.
_GO = """\
#!/bin/bash
echo "GOGC=$GOGC $*" >>"$LOG"
while [ "$1" != -o ]; do shift; done
out="$2"; shift 2
for package in "$@"; do
    if [ "${package##*/}" = "${FAIL:--}" ]; then exit 1; fi
    case "$out" in */) mkdir -p "$out"; file="$out${package##*/}" ;; *) file="$out" ;; esac
    printf '#!/bin/sh\\n' >"$file"; chmod +x "$file"
done
"""


@dataclass(frozen=True)
class Checkout:
    """A checkout with one tool, whose `go` is a script."""

    folder: Path

    def build(self, *binaries: str, fail: str = "") -> subprocess.CompletedProcess[str]:
        env = {
            "NODE_AGENT_CACHE": str(self.folder / "cache"),
            "PATH": os.environ["PATH"],
            "LOG": str(self.folder / "log"),
            "FAIL": fail,
        }
        argv = [str(self.folder / "tools" / "build.sh"), "tool", *binaries]
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)

    @property
    def calls(self) -> list[str]:
        """What `go` was called for: tags, and everything after them."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.partition(" -tags ")[2].replace(str(self.binaries), "") for line in lines]

    @property
    def binaries(self) -> Path:
        return next((self.folder / "cache" / "tools").glob("tool-*/bin"))

    @property
    def built(self) -> set[str]:
        """The names of all files, hidden ones included."""
        return {path.name for path in self.binaries.rglob("*")}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    source = tmp_path / "tools" / "tool"
    source.mkdir(parents=True)
    for name in ("build.sh", "common.sh"):
        shutil.copy(go_command().parent / name, tmp_path / "tools" / name)
    (source / "build.conf").write_text(_CONFIGURATION)
    (source / "go.mod").write_text("module tool\n")
    (source / "go.sum").write_text("")
    go = tmp_path / "tools" / "go.sh"
    go.write_text(_GO)
    go.chmod(0o755)
    return Checkout(tmp_path)


def test_binaries_that_are_named_as_their_packages_are_built_in_one_go(checkout: Checkout) -> None:
    done = checkout.build()
    assert done.stdout == f"{checkout.binaries}\n", done.stderr
    assert checkout.calls == [
        "small -o /.parts/ example.org/cmd/server example.org/cmd/client",
        "small  -o /.renamed.part example.org/cmd/other",
    ]
    assert checkout.built == {"server", "client", "renamed"}
    # The compiler collects no garbage.
    assert (checkout.folder / "log").read_text().startswith("GOGC=off build -mod=readonly")


def test_only_what_is_named_and_missing_is_built(checkout: Checkout) -> None:
    for _ in range(2):
        assert checkout.build("client").returncode == 0
    assert checkout.build("client", "server", "testing").returncode == 0
    assert checkout.calls == [
        "small  -o /.client.part example.org/cmd/client",
        "small testing -o /.testing.part example.org/cmd/server",
        "small  -o /.server.part example.org/cmd/server",
    ]


@pytest.mark.parametrize(("failing", "kept"), [("client", set()), ("other", {"server", "client"})])
def test_failed_build_leaves_complete_binaries_only_and_goes_on(
    checkout: Checkout, failing: str, kept: set[str]
) -> None:
    done = checkout.build(fail=failing)
    assert (done.returncode, done.stdout) == (1, "")
    assert "failed" in done.stderr
    assert {path.name for path in checkout.binaries.glob("[!.]*")} == kept
    assert checkout.build().returncode == 0
    assert checkout.built == {"server", "client", "renamed"}


def test_unknown_binary_is_an_error(checkout: Checkout) -> None:
    done = checkout.build("unknown")
    assert done.returncode == 1
    assert done.stderr == "error: tools/tool has no binary 'unknown'\n"
    assert checkout.calls == []
