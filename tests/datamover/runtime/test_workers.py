import pytest

from datamover.runtime.resources import ResourceLimits

_MIB = 1024 * 1024


def _limits(cpus: int, limit_mib: int | None) -> ResourceLimits:
    return ResourceLimits(cpus, limit_mib * _MIB if limit_mib else None)


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.0049])
@pytest.mark.parametrize("limit_mib", [None, 128, 256, 512, 4096])
@pytest.mark.parametrize("cpus", [1, 2, 4, 16])
def test_a_storage_that_is_near_changes_nothing(cpus: int, limit_mib: int | None, seconds: float) -> None:
    limits = _limits(cpus, limit_mib)
    assert limits.adapted_restore_workers(seconds, 10_000) == limits.restore_workers


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
def test_a_restore_has_as_many_workers_as_keep_the_cpus_busy(
    cpus: int, seconds: float, file_bytes: int, workers: int
) -> None:
    assert _limits(cpus, None).adapted_restore_workers(seconds, file_bytes) == workers


@pytest.mark.parametrize(
    ("limit_mib", "workers"), [(128, 1), (256, 3), (280, 4), (305, 6), (512, 22), (1024, 62), (2048, 64), (None, 64)]
)
def test_a_memory_limit_bounds_the_workers_of_a_restore(limit_mib: int | None, workers: int) -> None:
    assert _limits(2, limit_mib).adapted_restore_workers(0.042, 10_000) == workers


@pytest.mark.parametrize(
    ("cpus", "limit_mib", "workers"),
    [(1, None, 2), (2, None, 3), (16, None, 17), (2, 304, 2), (2, 305, 3)],
)
def test_a_backup_reads_one_more_file_while_packs_are_on_their_way(
    cpus: int, limit_mib: int | None, workers: int
) -> None:
    assert _limits(cpus, limit_mib).backup_workers == workers
