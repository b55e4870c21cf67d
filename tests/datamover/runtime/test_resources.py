import math
import os
from pathlib import Path

import pytest

from datamover.data_path.restore import restore_workers
from datamover.kinds import UploaderSettings
from datamover.runtime.resources import ResourceLimits, ran_out_of_memory, read_limits

_MIB = 1 << 20


def _limits(cpus: int, limit_mib: int | None) -> ResourceLimits:
    return ResourceLimits(cpus, limit_mib * _MIB if limit_mib else None)


def _files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "memory", "cpus"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "268435456\n"}, 268435456, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None, None),
        (
            {
                "proc/self/cgroup": "9:memory:/kubepods/pod1\n3:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/kubepods/pod1/memory.limit_in_bytes": "1073741824\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            1073741824,
            1,
        ),
        ({"proc/self/cgroup": "9:memory:/x\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "5\n"}, 5, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, None, 1),
        ({}, None, None),
    ],
    ids=["v2", "v2 without limit", "v1 on the host", "v1 in a container", "CPUs", "nothing to read"],
)
def test_limits_are_read(tmp_path: Path, files: dict[str, str], memory: int | None, cpus: int | None) -> None:
    found = read_limits(_files(tmp_path, files))
    assert (found.memory_bytes, found.cpus) == (memory, cpus or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("limit_mib", "soft"),
    [(None, "200MiB"), (256, "120MiB"), (200, "64MiB"), (100, "48MiB"), (512, "200MiB"), (2048, "512MiB")],
)
def test_soft_limit_follows_the_memory_limit(limit_mib: int | None, soft: str) -> None:
    assert _limits(4, limit_mib).go_settings({}) == {"GOGC": "50", "GOMEMLIMIT": soft}
    assert _limits(4, limit_mib).go_settings({"GOGC": "100", "GOMEMLIMIT": "1GiB"}) == {}


@pytest.mark.parametrize(
    ("limit_mib", "workers", "soft"),
    [(None, 8, "300MiB"), (None, 2, "150MiB"), (256, 3, "120MiB"), (1024, 8, "300MiB"), (2048, 8, "512MiB")],
)
def test_the_memory_of_a_restore_is_bounded_by_its_workers(limit_mib: int | None, workers: int, soft: str) -> None:
    limits = _limits(4, limit_mib)
    assert limits.go_settings({}, restore_workers=workers) == {"GOMEMLIMIT": soft}
    assert bool(limits.entry_bytes({})) == (limit_mib is None)
    assert limits.entry_bytes({"GOMEMLIMIT": "1GiB"}) == 0


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
def test_an_index_is_written_before_memory_ends(cpus: int, limit_mib: int | None, files: float, seconds: float) -> None:
    assert _limits(cpus, limit_mib).index_seconds(files) == pytest.approx(seconds, abs=0.1)


@pytest.mark.parametrize(("limit_mib", "entries"), [(None, None), (64, 50_000), (256, 293_601), (512, 890_124)])
def test_kopia_keeps_the_entries_of_a_restore(limit_mib: int | None, entries: int | None) -> None:
    assert _limits(4, limit_mib).fitting_entries == entries


@pytest.mark.parametrize(("limit_mib", "soft"), [(None, {}), (256, {"GOMEMLIMIT": "179MiB"})])
def test_maintenance_uses_most_of_the_memory(limit_mib: int | None, soft: dict[str, str]) -> None:
    assert _limits(4, limit_mib).maintenance_settings({}) == {"GOGC": "50", **soft}
    assert _limits(4, limit_mib).maintenance_settings({"GOGC": "100", "GOMEMLIMIT": "1GiB"}) == {}


@pytest.mark.parametrize(
    ("cpus", "limit_mib", "workers"), [(8, None, 8), (4, None, 8), (2, None, 4), (8, 256, 3), (8, 128, 1), (1, 4096, 2)]
)
def test_restore_workers_follow_cpus_and_memory(cpus: int, limit_mib: int | None, workers: int) -> None:
    assert _limits(cpus, limit_mib).restore_workers == workers


def test_configured_workers_are_used_with_a_warning_when_memory_is_too_small(caplog: pytest.LogCaptureFixture) -> None:
    assert restore_workers(UploaderSettings(parallel_download=10), _limits(8, 256)) == 10
    assert "ParallelFilesDownload=10" in caplog.text


@pytest.mark.parametrize(
    ("file", "text", "ran_out"),
    [
        ("memory.events", "low 0\noom 1\noom_kill 1\n", True),
        ("memory.events", "low 0\noom 3\noom_kill 0\n", False),
        ("memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", True),
        ("another", "", False),
    ],
    ids=["v2", "v2, none", "v1", "nothing is known"],
)
def test_a_kill_for_lack_of_memory_is_detected(tmp_path: Path, file: str, text: str, ran_out: bool) -> None:
    assert ran_out_of_memory(_files(tmp_path, {f"sys/fs/cgroup/{file}": text})) is ran_out


@pytest.mark.parametrize("limits", [_limits(1, 128), _limits(2, None), _limits(16, 4096)], ids=str)
def test_a_storage_that_is_near_changes_nothing(limits: ResourceLimits) -> None:
    assert limits.adapted_restore_workers(0.0049, 10_000) == limits.restore_workers


@pytest.mark.parametrize(
    ("cpus", "seconds", "file_bytes", "workers"),
    [
        pytest.param(2, 0.042, 10_000, 64, id="20 ms there and back, small files"),
        pytest.param(2, 0.010, 10_000, 26, id="5 ms there and back"),
        pytest.param(1, 0.010, 10_000, 13, id="half of the CPUs, half of the workers"),
        pytest.param(2, 0.042, 0, 64, id="no bytes"),
        pytest.param(2, 0.042, 1_000_000, 18, id="larger files"),
        pytest.param(2, 0.042, 4_000_000, 7, id="files of one piece"),
        pytest.param(2, 0.042, 10**12, 7, id="pieces of a large file are of the same size"),
        pytest.param(8, 0.006, 10**12, 11, id="the CPUs are busy anyway"),
        pytest.param(2, 0.006, 10**12, 4, id="never less than with a storage that is near"),
        pytest.param(2, 30.0, 10_000, 64, id="never more"),
    ],
)
def test_as_many_workers_as_keep_the_cpus_busy(cpus: int, seconds: float, file_bytes: int, workers: int) -> None:
    assert _limits(cpus, None).adapted_restore_workers(seconds, file_bytes) == workers


@pytest.mark.parametrize(
    ("cpus", "limit_mib", "packs", "without", "workers"),
    [
        (1, None, 1, 51, 51),
        (2, None, 2, 64, 64),
        (16, None, 4, 64, 64),
        (2, 100, 0, 1, 1),
        (2, 280, 0, 4, 4),
        (2, 305, 0, 6, 6),
        (2, 330, 1, 8, 4),
        (2, 512, 2, 22, 14),
        (2, 1024, 2, 62, 54),
    ],
)
def test_a_memory_limit_bounds_the_workers(
    cpus: int, limit_mib: int | None, packs: int, without: int, workers: int
) -> None:
    limits = _limits(cpus, limit_mib)
    found = [limits.adapted_restore_workers(0.042, 10_000, fetched) for fetched in (0, packs)]
    assert (limits.restore_packs, found) == (packs, [without, workers])


@pytest.mark.parametrize(
    ("cpus", "limit_mib", "workers"), [(1, None, 2), (2, None, 3), (16, None, 17), (2, 304, 2), (2, 305, 3)]
)
def test_a_backup_reads_one_more_file_while_packs_are_sent(cpus: int, limit_mib: int | None, workers: int) -> None:
    assert _limits(cpus, limit_mib).backup_workers == workers
