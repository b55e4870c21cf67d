"""`make images` with the variables of Velero's build: what it asks `docker buildx` for, and what it rejects."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.testbed.layout import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.processes

_DOCKER = """\
#!/bin/sh
echo "$@" >>"$0.log"
"""

_BUILD = "buildx build --builder mine --pull --output"
_NO_ATTESTATION = "--provenance=false --sbom=false"


def _run(folder: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script with a Docker that only records; return how it ended, and what Docker was asked for."""
    docker = folder / "docker"
    docker.write_text(_DOCKER)
    docker.chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    done = subprocess.run([ROOT / "tools" / "images.sh"], env=env, capture_output=True, text=True, check=False)
    log = folder / "docker.log"
    return done, log.read_text().splitlines() if log.exists() else []


def test_images_of_both_architectures_are_built_and_listed_in_the_registry(tmp_path: Path) -> None:
    done, asked = _run(
        tmp_path,
        BUILDX_INSTANCE="mine",
        BUILD_OUTPUT_TYPE="registry",
        BUILD_ARCH="amd64,arm64",
        REGISTRY="example.com/project",
        VERSION="v1",
        TAG_LATEST="true",
    )
    image, build = "example.com/project/node-agent", f"{_BUILD} type=registry --platform"
    names = ["linux-amd64", "linux-arm64"]
    expected = [
        f"{build} {name.replace('-', '/')} {_NO_ATTESTATION} --tag {image}:v1-{name} --tag {image}:latest-{name} "
        f"--file {ROOT}/Dockerfile {ROOT}"
        for name in names
    ]
    expected += [
        f"buildx imagetools create --builder mine --tag {image}:{tag} " + " ".join(f"{image}:{tag}-{n}" for n in names)
        for tag in ("v1", "latest")
    ]
    assert (done.returncode, done.stderr, asked) == (0, "", expected)
    tags = [f"{image}:{tag}-{name}" for name in names for tag in ("v1", "latest")]
    assert done.stdout.splitlines() == [*tags, f"{image}:v1", f"{image}:latest"]


def test_archives_are_written_to_the_output_directory(tmp_path: Path) -> None:
    done, asked = _run(tmp_path, BUILDX_INSTANCE="mine", BUILD_ARCH="amd64", VERSION="v1")
    archive = ROOT / "_output" / "node-agent-v1-linux-amd64.tar"
    assert (done.returncode, done.stdout.splitlines()) == (0, [str(archive)])
    (build,) = asked
    assert build.startswith(f"{_BUILD} type=docker,dest={archive} --platform linux/amd64 ")
    assert " --tag localhost/node-agent:v1-linux-amd64 " in build


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"BUILD_OUTPUT_TYPE": "oci"}, 'BUILD_OUTPUT_TYPE: must be tar, registry or docker: "oci"'),
        ({"BUILD_OS": "linux,windows"}, 'BUILD_OS: must be linux: "linux,windows"'),
        ({"BUILD_ARCH": "amd64,s390x"}, 'BUILD_ARCH: must be amd64, arm64 or both: "amd64,s390x"'),
    ],
)
def test_what_cannot_be_built_is_rejected(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    done, asked = _run(tmp_path, **variables)
    assert (done.returncode, done.stdout, done.stderr, asked) == (1, "", f"error: {message}\n", [])
