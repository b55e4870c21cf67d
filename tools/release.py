"""Checks a release and builds its parts, in `_output/`, with nothing but the package registries of the set-up.

    python -m tools.release check [TAG]     wheel, source archive and chart, each tried out, and their checksums
    python -m tools.release checksums       SHA256SUMS of everything in _output/
    python -m tools.release notes           what CHANGELOG.md says about this version

With TAG, such as v0.1.0, it must name the version, and CHANGELOG.md must have a section of it; without, an
"Unreleased" one will do.
"""

import argparse
import hashlib
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from core.version import VERSION
from tools.wheel import ReleaseError, check_installed, check_wheel, run

_ROOT: Final = Path(__file__).parents[1]
_OUTPUT: Final = _ROOT / "_output"
_CHART: Final = _ROOT / "deploy" / "chart"
_SUMS: Final = "SHA256SUMS"
_UNRELEASED: Final = "Unreleased"


def check_tag(tag: str) -> None:
    """Compare a tag with the version of the code.

    Raises:
        ReleaseError: It is not `v` and the version.
    """
    if tag != f"v{VERSION}":
        raise ReleaseError(f"tag {tag}: core/version.py has {VERSION}, so it must be v{VERSION}")


def read_notes(changelog: str, *, tagged: bool) -> str:
    """Return the section about this version, without its heading.

    Args:
        changelog: The text of CHANGELOG.md.
        tagged: Whether the section must be the version's own, with its date.

    Raises:
        ReleaseError: There is no such section, or it says nothing.
    """
    sections = re.findall(r"(?ms)^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?\n(.*?)(?=^## |\Z)", changelog)
    for name, date, text in sections:
        if (name == VERSION and date) or (name == _UNRELEASED and not tagged):
            if not text.strip():
                raise ReleaseError(f"CHANGELOG.md: the section [{name}] is empty")
            return str(text.strip())
    raise ReleaseError(f'CHANGELOG.md has no section "## [{VERSION}] - YYYY-MM-DD"')


def check_chart(chart: Path) -> None:
    """Compare the versions in a Helm chart with the version of the code.

    Raises:
        ReleaseError: They differ.
    """
    found = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))
    for key in ("version", "appVersion"):
        if str(found.get(key)) != VERSION:
            raise ReleaseError(f"{chart.name}/Chart.yaml: {key} is {found.get(key)}, but core/version.py has {VERSION}")


def write_checksums(folder: Path) -> Path:
    """Write the SHA-256 of each file of a directory, for `sha256sum --check`; return the path of what was written."""
    sums = folder / _SUMS
    files = sorted(path for path in folder.iterdir() if path.is_file() and path != sums)
    lines = (f"{_digest(path)}  {path.name}\n" for path in files)
    sums.write_text("".join(lines), encoding="utf-8")
    return sums


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build_packages(folder: Path) -> Path:
    """Build the source archive, and from that the wheel, into `_output/`; return the wheel.

    From a copy of the sources: what an earlier build left in a checkout would get into the wheel.
    """
    sources = folder / "sources"
    for name in run(_ROOT, "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if (path := _ROOT / name).is_file():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, sources / name)
    run(sources, sys.executable, "-m", "build", "--no-isolation", "--outdir", _OUTPUT)
    (wheel,) = _OUTPUT.glob("*.whl")
    return wheel


def _package_chart() -> None:
    check_chart(_CHART)
    helm = Path(run(_ROOT, _ROOT / "tools" / "build.sh", "helm", "helm").strip()) / "helm"
    run(_ROOT, helm, "lint", "--strict", _CHART)
    run(_ROOT, helm, "package", _CHART, "--destination", _OUTPUT)


def _check(tag: str) -> None:
    """Do everything that a release needs and no service does."""
    if tag:
        check_tag(tag)
    read_notes((_ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), tagged=bool(tag))
    _OUTPUT.mkdir(exist_ok=True)
    for old in (*_OUTPUT.glob("node_agent-*"), *_OUTPUT.glob("node-agent-*.tgz")):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        wheel = _build_packages(Path(folder))
        check_wheel(wheel, Path(folder) / "sources")
        check_installed(wheel, _ROOT / "requirements-dev.txt", Path(folder))
    if _CHART.is_dir():
        _package_chart()
    sums = write_checksums(_OUTPUT)
    print(sums.read_text(encoding="utf-8"), end="")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=(__doc__ or "").partition("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    check = actions.add_parser("check", help="build and try out all that needs no service")
    check.add_argument("tag", nargs="?", default="", help="the tag of the release, such as v0.1.0")
    actions.add_parser("checksums", help="write SHA256SUMS")
    actions.add_parser("notes", help="print what CHANGELOG.md says about this version")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit code."""
    parsed = _parse(arguments)
    try:
        match parsed.action:
            case "check":
                _check(parsed.tag)
            case "checksums":
                write_checksums(_OUTPUT)
            case _:
                print(read_notes((_ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), tagged=True))
    except (ReleaseError, OSError) as error:
        print(f"error: release {VERSION}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
