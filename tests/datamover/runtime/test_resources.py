import math
from pathlib import Path

import pytest

from datamover.data_path.restore import restore_workers
from datamover.kinds import UploaderSettings
from datamover.kopia.process import KopiaAnswer
from datamover.runtime.resources import ResourceLimits, ran_out_of_memory, read_limits

_MIB = 1 << 20


def _files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "268435456\n"}, 268435456),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        (
            {
                "proc/self/cgroup": "9:memory:/kubepods/pod1\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/kubepods/pod1/memory.limit_in_bytes": "1073741824\n",
            },
            1073741824,
        ),
        (
            {
                "proc/self/cgroup": "9:memory:/kubepods/pod1\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "536870912\n",
            },
            536870912,
        ),
        ({}, None),
    ],
    ids=["v2", "v2 without limit", "v1 on the host", "v1 in a container", "nothing to read"],
)
def test_the_memory_limit_is_read(tmp_path: Path, files: dict[str, str], memory: int | None) -> None:
    assert read_limits(_files(tmp_path, files)).memory_bytes == memory


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"},
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/x\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
        },
    ],
    ids=["v2", "v1"],
)
def test_cpus_are_limited_by_the_cgroup(tmp_path: Path, files: dict[str, str]) -> None:
    assert read_limits(_files(tmp_path, files)).cpus == 1


@pytest.mark.parametrize(
    ("limit_mib", "soft"),
    [(None, "200MiB"), (256, "120MiB"), (200, "64MiB"), (100, "48MiB"), (512, "200MiB"), (2048, "512MiB")],
)
def test_soft_limit_follows_the_memory_limit(limit_mib: int | None, soft: str) -> None:
    limits = ResourceLimits(4, limit_mib * _MIB if limit_mib else None)
    assert limits.go_settings({}) == {"GOGC": "50", "GOMEMLIMIT": soft}


@pytest.mark.parametrize(
    ("limit_mib", "workers", "soft"),
    [(None, 8, "300MiB"), (None, 2, "150MiB"), (256, 3, "120MiB"), (1024, 8, "300MiB"), (2048, 8, "512MiB")],
)
def test_the_memory_of_a_restore_is_bounded_by_its_workers(limit_mib: int | None, workers: int, soft: str) -> None:
    limits = ResourceLimits(4, limit_mib * _MIB if limit_mib else None)
    assert limits.go_settings({}, restore_workers=workers) == {"GOMEMLIMIT": soft}


@pytest.mark.parametrize(
    ("cpus", "limit_mib", "files", "seconds"),
    [
        (2, None, math.inf, math.inf),
        (2, 256, 83_000, math.inf),
        (2, 256, 84_000, 2.3),
        (2, 512, 290_000, math.inf),
        (2, 512, 291_000, 8.1),
        (4, 512, math.inf, 4.0),
        (2, 4096, math.inf, 138.6),
    ],
)
def test_an_index_is_written_before_tiny_files_take_the_memory(
    cpus: int, limit_mib: int | None, files: float, seconds: float
) -> None:
    limits = ResourceLimits(cpus, limit_mib * _MIB if limit_mib else None)
    assert limits.index_seconds(files) == pytest.approx(seconds, abs=0.1)


@pytest.mark.parametrize(("limit_mib", "entries"), [(None, None), (64, 50_000), (256, 293_601), (512, 890_124)])
def test_kopia_keeps_the_entries_of_a_restore(limit_mib: int | None, entries: int | None) -> None:
    assert ResourceLimits(4, limit_mib * _MIB if limit_mib else None).fitting_entries == entries


def test_settings_in_the_environment_are_kept() -> None:
    own = {"GOGC": "100", "GOMEMLIMIT": "1GiB"}
    assert ResourceLimits(4).go_settings(own) == {}
    assert ResourceLimits(4, 256 * _MIB).maintenance_settings(own) == {}


@pytest.mark.parametrize(
    ("limit_mib", "settings"),
    [(None, {"GOGC": "50"}), (256, {"GOGC": "50", "GOMEMLIMIT": "179MiB"})],
    ids=["no limit", "limit"],
)
def test_maintenance_uses_most_of_the_memory(limit_mib: int | None, settings: dict[str, str]) -> None:
    assert ResourceLimits(4, limit_mib * _MIB if limit_mib else None).maintenance_settings({}) == settings


@pytest.mark.parametrize(
    ("cpus", "limit_mib", "workers"), [(8, None, 8), (4, None, 8), (2, None, 4), (8, 256, 3), (8, 128, 1), (1, 4096, 2)]
)
def test_restore_workers_follow_cpus_and_memory(cpus: int, limit_mib: int | None, workers: int) -> None:
    assert ResourceLimits(cpus, limit_mib * _MIB if limit_mib else None).restore_workers == workers


def test_configured_workers_are_used_with_a_warning_when_memory_is_too_small(caplog: pytest.LogCaptureFixture) -> None:
    assert restore_workers(UploaderSettings(parallel_download=10), ResourceLimits(8, 256 * _MIB)) == 10
    assert "ParallelFilesDownload=10" in caplog.text


@pytest.mark.parametrize(
    ("files", "ran_out"),
    [
        pytest.param({"sys/fs/cgroup/memory.events": "low 0\noom 1\noom_kill 1\n"}, True, id="v2"),
        pytest.param({"sys/fs/cgroup/memory.events": "low 0\noom 3\noom_kill 0\n"}, False, id="v2, none"),
        pytest.param(
            {"sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"},
            True,
            id="v1",
        ),
        pytest.param(
            {"sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n"},
            False,
            id="v1, none",
        ),
        pytest.param({}, False, id="nothing is known"),
    ],
)
def test_a_kill_for_lack_of_memory_is_detected(tmp_path: Path, files: dict[str, str], ran_out: bool) -> None:
    assert ran_out_of_memory(_files(tmp_path, files)) is ran_out


def test_a_kopia_that_ran_out_of_memory_is_reported_so() -> None:
    answer = KopiaAnswer("upload", -9, b"", out_of_memory=True)
    assert str(answer.error()).startswith("upload: kopia was killed by the node's kernel: out of memory")
    assert "memory" not in str(KopiaAnswer("upload", -9, b"").error())
