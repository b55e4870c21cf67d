"""`nodeagent support-bundle`: the archive that it writes, what it lists, its errors."""

import json
import os
import re
import tarfile
from pathlib import Path

import pytest

from tests.client.support.commands import Shell


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_archive_has_the_name_of_namespace_and_time_and_is_for_its_owner(shell: Shell) -> None:
    done = shell.run("support-bundle")
    path = Path("node-agent-support-velero-20261121-120000.tar.gz")
    assert done.code == 0
    assert re.fullmatch(rf"{path}: \d+ files, [\d.]+ KiB\n", done.out)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in Path().iterdir()] == [path.name]
    with tarfile.open(path) as archive:
        assert f"{path.name.removesuffix('.tar.gz')}/manifest.json" in archive.getnames()


def test_a_list_writes_nothing_and_a_file_is_never_replaced(shell: Shell) -> None:
    assert shell.run("support-bundle", "--list").code == 0
    assert list(Path().iterdir()) == []
    found = json.loads(shell.run("support-bundle", "--output", "b.tar.gz", "-o", "json").out)
    assert found["file"] == "b.tar.gz"
    assert {one["name"] for one in found["files"]} >= {"objects/datauploads.json", "manifest.json"}
    before = Path("b.tar.gz").read_bytes()
    # As in Velero, the short flag takes a path, too.
    done = shell.run("support-bundle", "-o", "b.tar.gz")
    assert (done.code, done.err) == (2, "error: b.tar.gz exists already: name another file\n")
    assert Path("b.tar.gz").read_bytes() == before
    done = shell.run("support-bundle", "--output", "no/b.tar.gz")
    assert done.code == 2
    assert done.err.endswith("error: no/b.tar.gz cannot be written: No such file or directory\n")


def test_an_interrupted_run_leaves_no_file(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fdopen", interrupt)
    assert shell.run("support-bundle", "--output", "b.tar.gz").code == 130
    assert list(Path().iterdir()) == []
