"""The jail, the rules by what a real kernel enforces and a fake one gets, and flushes that are left out."""

import ctypes
import os
from functools import partial
from pathlib import Path

import pytest

from core.errors import DataPathError
from core.landlock import SYS_CREATE_RULESET, landlock_abi
from datamover.runtime import sandbox
from datamover.runtime.confinement import _no_new_privs
from datamover.runtime.sandbox import (
    TO_READ,
    TO_WRITE,
    Rights,
    Step,
    below,
    build_jail,
    no_flushes,
    open_ruleset,
    use_as_jail,
)
from tests.datamover.support.confining import try_in_child
from tests.support.seccomp import deny

_MS_RDONLY = 1
"""Source: mount(2)."""


def _tree(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_a_jail_with_mounts_has_the_paths_of_the_trees_and_is_removed(tmp_path: Path) -> None:
    """An outer tree is mounted before one in it."""
    home, outer, file = _tree(tmp_path / "home"), _tree(tmp_path / "x" / "volume"), tmp_path / "hosts"
    inner = _tree(outer / "a" / "inner")
    file.write_text("127.0.0.1 localhost")
    (_tree(tmp_path / "certificates") / "ca.pem").write_text("a certificate")
    with build_jail(home, [inner, outer], [file, tmp_path / "certificates"]) as jail:
        assert below(jail.root, tmp_path / "certificates" / "ca.pem").read_text() == "a certificate"
        assert jail.root.parent == home
        assert list(below(jail.root, inner).iterdir()) == []
        assert below(jail.root, file).read_text() == "127.0.0.1 localhost"
        names = [name for name, _ in jail.steps()]
    mounts = [f"{verb} {tree}" for tree in (outer, inner) for verb in ("mount", "remount")]
    assert names == ["unshare", "mount / as slave", *mounts, "chroot", "chdir"]
    assert list(home.iterdir()) == []
    assert inner.exists()


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


def test_an_error_of_a_run_in_a_jail_is_no_error_of_the_jail(tmp_path: Path) -> None:
    home = _tree(tmp_path / "home")
    with pytest.raises(TimeoutError), build_jail(home, [], []):
        raise TimeoutError
    with pytest.raises(OSError, match="of the run"), use_as_jail(home, [], []):
        raise OSError(5, "of the run")
    with pytest.raises(DataPathError, match=r"build its jail: .*missing"), build_jail(tmp_path / "missing", [], []):
        pass


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


@pytest.mark.parametrize(
    ("abi", "newest"),
    [(1, "MAKE_SYM"), (2, "REFER"), (3, "TRUNCATE"), (4, "TRUNCATE"), (5, "IOCTL_DEV"), (9, "IOCTL_DEV")],
)
def test_each_abi_governs_all_rights_up_to_its_newest(abi: int, newest: str) -> None:
    assert Rights.of_abi(abi) == sum(right for right in Rights if right <= Rights[newest])


def test_nothing_is_executed_and_no_device_is_made_in_a_tree() -> None:
    for rights in (TO_READ, TO_WRITE):
        assert not rights & (Rights.EXECUTE | Rights.MAKE_CHAR | Rights.MAKE_BLOCK | Rights.IOCTL_DEV)


class _Kernel:
    """Records the system calls of Landlock; a call named in `failing` fails."""

    def __init__(self, failing: int = 0) -> None:
        self.handled = 0
        self.rules: dict[str, Rights] = {}
        self._failing = failing

    def syscall(self, *arguments: "ctypes.c_long") -> int:
        number, *values = (one.value for one in arguments)
        if number == self._failing:
            ctypes.set_errno(22)
            return -1
        if number == SYS_CREATE_RULESET:
            self.handled = ctypes.c_uint64.from_address(values[0]).value
            return os.open("/", os.O_RDONLY)
        rule = sandbox._PathBeneath.from_address(values[2])
        path = str(Path(f"/proc/self/fd/{rule.parent_fd}").readlink())
        self.rules[path] = Rights(rule.allowed_access)
        return 0


def test_the_rules_have_only_rights_that_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _Kernel()
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: kernel)
    file = tmp_path / "file"
    file.touch()
    missing = tmp_path / "missing"
    with open_ruleset(1, [(tmp_path, TO_WRITE), (file, TO_READ), (missing, TO_READ)]):
        pass
    assert kernel.handled == Rights.of_abi(1)
    assert kernel.rules == {str(tmp_path): TO_WRITE & Rights.of_abi(1), str(file): Rights.READ_FILE}


@pytest.mark.parametrize("failing", [444, 445])
def test_a_rule_that_is_rejected_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: _Kernel(failing))
    error = "cannot confine kopia: Landlock: Invalid argument"
    with pytest.raises(DataPathError, match=error), open_ruleset(3, [(tmp_path, TO_READ)]):
        pass


def test_a_real_kernel_takes_the_rules(tmp_path: Path) -> None:
    try:
        abi = landlock_abi()
    except OSError as e:
        pytest.skip(f"NOT TESTED: this kernel has no Landlock ({e.strerror})")
    for version in range(1, abi + 1):
        with open_ruleset(version, [(tmp_path, TO_WRITE), (Path("/etc/hosts"), TO_READ)]) as fd:
            assert not os.get_inheritable(fd)


_FLUSHED = ["EINVAL", "EINVAL"]
"""What the kernel answers: a pipe cannot be flushed."""


def _flush_in_child(*steps: Step) -> list[str]:
    """Flush a pipe by each system call in a child."""
    reading, writing = os.pipe()
    try:
        return try_in_child(steps, [lambda: os.fsync(writing), lambda: os.fdatasync(writing)])
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.processes
def test_both_system_calls_succeed_without_an_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _flush_in_child() == _FLUSHED
    assert _flush_in_child(_no_new_privs(), *no_flushes()) == ["", ""]
    monkeypatch.setattr("platform.machine", lambda: "an architecture with unknown numbers")
    assert no_flushes() == []


@pytest.mark.processes
def test_a_child_flushes_as_before_where_the_kernel_refuses_the_filter() -> None:
    def refuse() -> int:
        deny((sandbox._ARCHITECTURES[os.uname().machine].seccomp,))()
        return 0

    assert _flush_in_child(("deny", refuse), _no_new_privs(), *no_flushes()) == _FLUSHED
