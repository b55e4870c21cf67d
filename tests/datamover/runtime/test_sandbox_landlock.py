"""The rules, by what a real kernel enforces, and by what a fake one is asked for."""

import ctypes
import os
from pathlib import Path

import pytest

from core.errors import DataPathError
from core.landlock import SYS_CREATE_RULESET, landlock_abi
from datamover.runtime import sandbox
from datamover.runtime.sandbox import Rights, open_ruleset


@pytest.mark.parametrize(
    ("abi", "newest"),
    [
        (1, Rights.MAKE_SYM),
        (2, Rights.REFER),
        (3, Rights.TRUNCATE),
        (4, Rights.TRUNCATE),
        (5, Rights.IOCTL_DEV),
        (9, Rights.IOCTL_DEV),
    ],
)
def test_each_abi_governs_all_rights_up_to_its_newest(abi: int, newest: Rights) -> None:
    assert Rights.of_abi(abi) == sum(right for right in Rights if right <= newest)


def test_nothing_is_executed_and_no_device_is_made_in_a_tree() -> None:
    for rights in (Rights.to_read(), Rights.to_write()):
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


def _use(kernel: _Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: kernel)


def test_the_rules_have_only_rights_that_the_abi_and_the_file_type_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = _Kernel()
    _use(kernel, monkeypatch)
    file = tmp_path / "file"
    file.touch()
    missing = tmp_path / "missing"
    with open_ruleset(1, [(tmp_path, Rights.to_write()), (file, Rights.to_read()), (missing, Rights.to_read())]):
        pass
    assert kernel.handled == Rights.of_abi(1)
    assert kernel.rules == {str(tmp_path): Rights.to_write() & Rights.of_abi(1), str(file): Rights.READ_FILE}


@pytest.mark.parametrize("failing", [444, 445])
def test_a_rule_that_the_kernel_rejects_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    _use(_Kernel(failing), monkeypatch)
    with (
        pytest.raises(DataPathError, match="cannot confine kopia: Landlock: Invalid argument"),
        open_ruleset(3, [(tmp_path, Rights.to_read())]),
    ):
        pass


def test_a_real_kernel_takes_the_rules(tmp_path: Path) -> None:
    try:
        abi = landlock_abi()
    except OSError as e:
        pytest.skip(f"NOT TESTED: this kernel has no Landlock ({e.strerror})")
    for version in range(1, abi + 1):
        with open_ruleset(version, [(tmp_path, Rights.to_write()), (Path("/etc/hosts"), Rights.to_read())]) as fd:
            assert not os.get_inheritable(fd)
