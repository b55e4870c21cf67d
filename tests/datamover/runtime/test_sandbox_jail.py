import os
from functools import partial
from pathlib import Path

import pytest

from core.errors import DataPathError
from datamover.runtime.sandbox import below, build_jail, use_as_jail

_MS_RDONLY = 1
"""Source: mount(2)."""


def _tree(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_a_jail_with_mounts_has_the_paths_of_the_trees_and_is_removed(tmp_path: Path) -> None:
    home, tree, file = _tree(tmp_path / "home"), _tree(tmp_path / "x" / "volume"), tmp_path / "hosts"
    file.write_text("127.0.0.1 localhost")
    (tree / "data").touch()
    (_tree(tmp_path / "certificates") / "ca.pem").write_text("a certificate")
    with build_jail(home, [tree], [file, tmp_path / "certificates"]) as jail:
        assert below(jail.root, tmp_path / "certificates" / "ca.pem").read_text() == "a certificate"
        assert jail.root.parent == home
        assert list(below(jail.root, tree).iterdir()) == []
        assert below(jail.root, file).read_text() == "127.0.0.1 localhost"
        names = [name for name, _ in jail.steps()]
        assert names == ["unshare", "mount / as slave", f"mount {tree}", f"remount {tree}", "chroot", "chdir"]
    assert list(home.iterdir()) == []
    assert (tree / "data").exists()


def test_an_outer_tree_is_mounted_before_one_in_it(tmp_path: Path) -> None:
    outer = _tree(tmp_path / "outer")
    inner = _tree(outer / "a" / "inner")
    with build_jail(_tree(tmp_path / "home"), [inner, outer], []) as jail:
        mounts = [name for name, _ in jail.steps() if name.startswith("mount ") and "outer" in name]
    assert mounts == [f"mount {outer}", f"mount {inner}"]


def test_a_tree_that_is_mounted_read_only_stays_so_in_the_jail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = _tree(tmp_path / "volume")
    read_only = os.statvfs_result([*os.statvfs(tree)[:8], os.ST_RDONLY, 255])
    monkeypatch.setattr(os, "statvfs", lambda _: read_only)
    with build_jail(_tree(tmp_path / "home"), [tree], []) as jail:
        (remount,) = [step for name, step in jail.steps() if name.startswith("remount")]
    assert isinstance(remount, partial)
    assert remount.args[3].value & _MS_RDONLY


def test_content_in_the_place_of_a_mount_is_never_removed(tmp_path: Path) -> None:
    home, tree = _tree(tmp_path / "home"), _tree(tmp_path / "volume")
    with build_jail(home, [tree], []) as jail:
        kept = below(jail.root, tree) / "as if the mount were visible here"
        kept.write_text("data")
    assert kept.read_text() == "data"


def test_the_directory_of_the_volume_is_a_jail_with_valid_absolute_paths(tmp_path: Path) -> None:
    root = tmp_path / "scratch"
    volume, home = _tree(root / "volume"), _tree(root / "run")
    file = tmp_path / "hosts"
    file.write_text("hosts")
    with use_as_jail(root, [volume, home], [file]) as jail:
        assert jail.root == root
        assert [name for name, _ in jail.steps()] == ["chroot", "chdir"]
        assert below(root, root).readlink() == Path("/")
        assert below(root, file).read_text() == "hosts"
    assert sorted(path.name for path in root.iterdir()) == ["run", "volume"]


def _rejected(root: Path, *trees: Path) -> str:
    with pytest.raises(DataPathError) as raised, use_as_jail(root, trees, []):
        pass
    return str(raised.value)


def test_a_directory_that_holds_something_else_is_no_jail(tmp_path: Path) -> None:
    root = tmp_path / "scratch"
    volume = _tree(root / "volume")
    (root / "secret").touch()
    assert _rejected(root, volume).endswith('scratch would be its jail, and also holds "secret"')
    (root / "secret").unlink()
    elsewhere = _tree(tmp_path / "repository")
    assert _rejected(root, volume, elsewhere).endswith(f"{elsewhere} is not in {root}, which would be its jail")
    assert _rejected(Path("/"), volume).endswith("the volume is not mounted in a directory of its own")
