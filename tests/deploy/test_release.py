"""What `make release-check` rejects."""

import hashlib
import re
import zipfile
from pathlib import Path

import pytest

from core.version import VERSION
from tools.release import check_chart, check_tag, main, read_notes, write_checksums
from tools.wheel import ReleaseError, check_licenses, check_wheel

_METADATA = f"Metadata-Version: 2.4\nName: node-agent\nVersion: {VERSION}\nLicense-Expression: Apache-2.0\n"
_INFORMATION = f"node_agent-{VERSION}.dist-info"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The sources of a package with a module and a file of data."""
    folder = tmp_path / "sources"
    (folder / "core").mkdir(parents=True)
    (folder / "core" / "module.py").touch()
    (folder / "core" / "data.yaml").touch()
    (folder / "README.md").touch()
    return folder


def _write_wheel(folder: Path, *files: str, metadata: str = _METADATA) -> Path:
    wheel = folder / "node_agent.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{_INFORMATION}/METADATA", metadata)
        for name in files:
            archive.writestr(name, "")
    return wheel


_COMPLETE = ("core/module.py", "core/data.yaml", f"{_INFORMATION}/licenses/LICENSE")


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        (_COMPLETE[:1] + _COMPLETE[2:], "missing ['core/data.yaml'], unexpected []"),
        ((*_COMPLETE, "core/old.py"), "missing [], unexpected ['core/old.py']"),
        (_COMPLETE[:2], "LICENSE is missing"),
    ],
    ids=["without data", "with a module of before", "without license"],
)
def test_a_wheel_with_other_files_is_rejected(
    tmp_path: Path, sources: Path, files: tuple[str, ...], fault: str
) -> None:
    check_wheel(_write_wheel(tmp_path, *_COMPLETE), sources)
    with pytest.raises(ReleaseError, match=re.escape(fault)):
        check_wheel(_write_wheel(tmp_path, *files), sources)


@pytest.mark.parametrize("changed", [("Apache-2.0", "MIT"), (VERSION, "9.9.9")], ids=["license", "version"])
def test_a_wheel_with_other_metadata_is_rejected(tmp_path: Path, sources: Path, changed: tuple[str, str]) -> None:
    wheel = _write_wheel(tmp_path, *_COMPLETE, metadata=_METADATA.replace(*changed))
    with pytest.raises(ReleaseError, match=re.escape(changed[1])):
        check_wheel(wheel, sources)


def test_the_tag_must_be_that_of_the_version() -> None:
    check_tag(f"v{VERSION}")
    for tag in (VERSION, "v9.9.9", f"v{VERSION}-rc1"):
        with pytest.raises(ReleaseError, match=f"it must be v{re.escape(VERSION)}"):
            check_tag(tag)


_DATED = f"## [{VERSION}] - 2026-11-23\n\n### Added\n- One.\n\n"
_OPEN = "## [Unreleased]\n\n- Two.\n\n"
_OLDER = "## [0.0.1] - 2026-01-01\n- Zero.\n"


@pytest.mark.parametrize(
    ("changelog", "tagged", "notes"),
    [
        pytest.param(f"# Changelog\n\n{_DATED}{_OLDER}", True, "### Added\n- One.", id="released"),
        pytest.param(f"{_OPEN}{_OLDER}", False, "- Two.", id="before a release"),
        pytest.param(_DATED, False, "### Added\n- One.", id="the last section"),
        pytest.param(f"{_OPEN}{_OLDER}", True, None, id="not released"),
        pytest.param(f"## [{VERSION}]\n- One.\n", True, None, id="without date"),
        pytest.param(_OLDER, False, None, id="without section"),
        pytest.param(f"## [{VERSION}] - 2026-11-23\n\n{_OLDER}", True, None, id="empty"),
    ],
)
def test_the_notes_are_the_section_of_the_version(changelog: str, tagged: bool, notes: str | None) -> None:
    if notes:
        assert read_notes(changelog, tagged=tagged) == notes
    else:
        with pytest.raises(ReleaseError, match=r"CHANGELOG\.md"):
            read_notes(changelog, tagged=tagged)


@pytest.mark.parametrize("key", ["version", "appVersion"])
def test_a_chart_of_another_version_is_rejected(tmp_path: Path, key: str) -> None:
    text = f"version: {VERSION}\nappVersion: '{VERSION}'\n"
    (tmp_path / "Chart.yaml").write_text(text, encoding="utf-8")
    check_chart(tmp_path)
    (tmp_path / "Chart.yaml").write_text(re.sub(f"(?m)^{key}: .*", f"{key}: 9.9.9", text), encoding="utf-8")
    with pytest.raises(ReleaseError, match=rf"{key} is 9\.9\.9"):
        check_chart(tmp_path)


def test_checksums_are_of_all_files_and_can_be_written_again(tmp_path: Path) -> None:
    (tmp_path / "b.whl").write_bytes(b"2")
    (tmp_path / "a.tgz").write_bytes(b"1")
    (tmp_path / "folder").mkdir()
    expected = "".join(
        f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in (("a.tgz", b"1"), ("b.whl", b"2"))
    )
    for _ in range(2):
        assert write_checksums(tmp_path).read_text(encoding="utf-8") == expected


def test_a_license_that_is_not_known_is_rejected() -> None:
    known = {
        "a": ["MIT"],
        "b": ["License :: OSI Approved :: BSD License"],
        "c": ["Apache-2.0 AND MIT"],
        "d": ["PSF-2.0"],
    }
    check_licenses(known)
    with pytest.raises(ReleaseError, match=r"allowed: both, none, strong$"):
        check_licenses(known | {"strong": ["GPL-3.0-only"], "none": [], "both": ["MIT AND GPL-2.0-only"]})


def test_a_fault_is_one_line_and_the_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "v9.9.9"]) == 1
    assert capsys.readouterr().err == (
        f"error: release {VERSION}: tag v9.9.9: core/version.py has {VERSION}, so it must be v{VERSION}\n"
    )
