"""What a wheel of the project must have, and what must run when it is installed."""

import json
import re
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Final

from core.version import VERSION

_PACKAGES: Final = ("core", "exposer", "nodeagent", "client", "datamover")
_LICENSE: Final = "Apache-2.0"

_ALLOWED: Final = re.compile(
    r"(?i)\b(Apache|MIT|BSD|ISC|PSF|Python Software Foundation|MPL|Mozilla Public License|0BSD|Unlicense)"
)
"""Licenses under which a package may be distributed with ours: permissive, or with terms for its own files only."""

_REJECTED: Final = re.compile(r"(?i)GPL|General Public License|SSPL|BUSL|Business Source|Proprietary")
"""Words that none may have, also beside an allowed one."""

_READ_LICENSES: Final = """
import importlib.metadata, json
found = {}
for each in importlib.metadata.distributions():
    head = each.metadata
    texts = [head.get("License-Expression"), head.get("License"), *(head.get_all("Classifier") or [])]
    found[head["Name"]] = [text for text in texts if text and (not text.count("::") or text.startswith("License"))]
print(json.dumps(found))
"""

_READ_DATA: Final = """
from client.install.manifests import read_definitions
print(len(read_definitions()))
"""


class ReleaseError(Exception):
    """Something that a release must not go out with."""


def run(folder: Path, *argv: str | Path) -> str:
    """Run a program in a directory and return what it printed.

    Raises:
        ReleaseError: It failed; the message has the last lines of what it said.
    """
    words = list(map(str, argv))
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder)  # noqa: S603 - ours
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise ReleaseError(f"{' '.join(words)}: exit code {done.returncode}:\n{said}")
    return done.stdout


def check_wheel(wheel: Path, sources: Path) -> None:
    """Compare a wheel with the sources that it was built from.

    Args:
        wheel: The file.
        sources: A directory with all files of the project, and no others.

    Raises:
        ReleaseError: A file of our packages is missing, there is another, or the metadata is not ours.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        information = next(name.partition("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        head = HeaderParser().parsestr(archive.read(f"{information}/METADATA").decode())
    files = {path.relative_to(sources).as_posix() for name in _PACKAGES for path in (sources / name).rglob("*")}
    wanted = {name for name in files if (sources / name).is_file()}
    packed = {name for name in names if not name.startswith(f"{information}/")}
    if wanted != packed:
        raise ReleaseError(f"{wheel.name}: missing {sorted(wanted - packed)}, unexpected {sorted(packed - wanted)}")
    if f"{information}/licenses/LICENSE" not in names:
        raise ReleaseError(f"{wheel.name}: LICENSE is missing")
    if (head["Version"], head["License-Expression"]) != (VERSION, _LICENSE):
        raise ReleaseError(f"{wheel.name}: version {head['Version']}, license {head['License-Expression']}")


def check_licenses(licenses: dict[str, list[str]]) -> None:
    """Check what packages say about their licenses.

    Args:
        licenses: By package, its license expression, text or classifiers.

    Raises:
        ReleaseError: A package names none that is known to be allowed.
    """
    unknown = sorted(
        name
        for name, texts in licenses.items()
        if not any(map(_ALLOWED.search, texts)) or any(map(_REJECTED.search, texts))
    )
    if unknown:
        raise ReleaseError(f"no license that is known to be allowed: {', '.join(unknown)}")


def check_installed(wheel: Path, pins: Path, folder: Path) -> None:
    """Install a wheel into a new environment, with what it needs, and run its programs outside the checkout.

    Args:
        wheel: The file.
        pins: A requirements file with the versions of everything that it needs.
        folder: Where the environment is created.

    Raises:
        ReleaseError: The installation or a program failed, or a license is not allowed.
    """
    binaries, constraints = folder / "environment" / "bin", folder / "constraints.txt"
    # With hashes pip would also ask for a hash of the wheel.
    versions = re.findall(r"(?m)^([A-Za-z0-9._-]+==[^\s\\;]+(?: *;[^\\\n]+)?)", pins.read_text(encoding="utf-8"))
    constraints.write_text("\n".join(versions), encoding="utf-8")
    run(folder, sys.executable, "-m", "venv", binaries.parent)
    pip = ("install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:")
    run(folder, binaries / "pip", *pip, "--constraint", constraints, f"{wheel}[cli]")
    for program, name in (("nodeagent", "node-agent"), ("kubectl-nodeagent", "node-agent"), ("datamover", "datamover")):
        if (said := run(folder, binaries / program, "--version").strip()) != f"{name} {VERSION}":
            raise ReleaseError(f"{program} --version: {said}")
        if "usage" not in run(folder, binaries / program, "--help").lower():
            raise ReleaseError(f"{program} --help: no usage")
    if (said := run(folder, binaries / "kubectl_complete-nodeagent", "des")) != "describe\tShow everything...\n:4\n":
        raise ReleaseError(f"kubectl_complete-nodeagent: {said}")
    python = binaries / "python"
    if not int(run(folder, python, "-c", _READ_DATA)):
        raise ReleaseError("the custom resource definitions are missing")
    # What is in every environment is no part of the product.
    licenses = json.loads(run(folder, python, "-c", _READ_LICENSES))
    check_licenses({name: texts for name, texts in licenses.items() if name not in {"pip", "setuptools"}})
