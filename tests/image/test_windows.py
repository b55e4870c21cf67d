"""What can be tested of the image for Windows without Windows: its bases, its programs, and which packages it takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.testbed.layout import ROOT

if TYPE_CHECKING:
    from pathlib import Path

__all__: list[str] = []

_BASE = re.compile(r"docker\.io/library/python:3\.13-windowsservercore-(ltsc\d{4})(@sha256:[0-9a-f]{64})?")


def _arguments(dockerfile: str) -> dict[str, str]:
    lines = (ROOT / dockerfile).read_text(encoding="utf-8").splitlines()
    return dict(line[4:].split("=", 1) for line in lines if line.startswith("ARG ") and "=" in line)


def test_what_builds_the_image_is_pinned_as_for_linux() -> None:
    windows, linux = _arguments("Dockerfile.windows"), _arguments("Dockerfile")
    assert (windows["GO"], windows["PYTHON"]) == (linux["GO"], linux["BASE"])


def test_there_is_a_base_for_each_version_of_windows() -> None:
    """The registry alone knows their digests: `make lock-images` adds them."""
    arguments = _arguments("Dockerfile.windows")
    stages = re.findall(r"(?m)^FROM \$\{(\w+)\} AS (ltsc\d+)$", (ROOT / "Dockerfile.windows").read_text())
    for argument, stage in stages:
        found = _BASE.fullmatch(arguments[argument])
        assert found is not None
        assert found[1] == stage == argument.lower()
    assert arguments["OS_VERSION"] in {stage for _, stage in stages}


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("launchers")
    _write(output)
    return output


def _write(output: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools" / "windows_launchers.py", ROOT, output], check=True)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "options"),
    [("velero.exe", b""), ("velero-restore-helper.exe", b" -ISu")],
)
def test_a_launcher_starts_pythons_of_the_base_with_itself(launchers: Path, name: str, options: bytes) -> None:
    content = (launchers / name).read_bytes()
    launcher, found, archive = content.partition(b"#!C:\\Python\\python.exe" + options + b"\r\n")
    assert (launcher[:2], bool(found), archive[:2]) == (b"MZ", True, b"PK")
    # Source: the PE format, the machine behind its signature; 0x8664 is x86-64.
    header = int.from_bytes(launcher[0x3C:0x40], "little")
    assert launcher[header : header + 6] == b"PE\0\0\x64\x86"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "arguments", "code", "output"),
    [
        ("velero.exe", ("--version",), 0, "node-agent "),
        ("velero.exe", ("node-agent", "server", "--help"), 0, "usage: "),
        ("velero.exe", ("node-agent", "server", "--no-such-flag"), 2, "error: "),
        ("velero-restore-helper.exe", (), 1, "ERROR: exactly one argument"),
    ],
)
def test_the_program_in_a_launcher_runs(
    launchers: Path, name: str, arguments: tuple[str, ...], code: int, output: str
) -> None:
    """Python runs an archive at the end of a file on any system."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, str(launchers / name), *arguments]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)

    assert done.returncode == code
    assert output in done.stdout + done.stderr


@pytest.mark.processes
def test_the_same_sources_make_the_same_launchers(launchers: Path, tmp_path: Path) -> None:
    _write(tmp_path)

    for path in launchers.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_python_package_has_a_wheel_for_windows(tmp_path: Path) -> None:
    """As Dockerfile.windows installs them; with the hashes of requirements.txt."""
    tags = subprocess.run(
        [ROOT / "tools" / "wheel-tags.sh", "3.13", "windows-amd64"], capture_output=True, text=True, check=True
    )
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", "--only-binary", ":all:"]
    requirements = ROOT / "requirements.txt"
    subprocess.run([*argv, *tags.stdout.split(), "--requirement", requirements, "--dest", tmp_path], check=True)

    assert len(list(tmp_path.glob("*.whl"))) == len(re.findall(r"(?m)^[a-z0-9-]+==", requirements.read_text()))
    assert len(list(tmp_path.glob("*-win_amd64.whl"))) > 0
    assert list(tmp_path.glob("*linux*")) == []
