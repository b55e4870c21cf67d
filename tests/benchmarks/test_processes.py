"""What processes and their group had at most: no peak is missed."""

import sys
from pathlib import Path

import pytest

from benchmarks.groups import MemoryGroup, memory_group
from benchmarks.processes import BenchmarkError, Command, Measured, _Peaks, measure

pytestmark = pytest.mark.processes

_TAKEN_MIB = 64

_TAKE = f"""
import mmap, pathlib, subprocess, sys, time

def samples():
    return pathlib.Path(sys.argv[-1]).stat().st_size

def take():
    memory = mmap.mmap(-1, {_TAKEN_MIB} << 20)
    for _ in range({_TAKEN_MIB}):
        memory.write(bytes(1 << 20))
    # Held until a sample is complete that began later.
    before, give_up = samples(), time.monotonic() + 30
    while samples() < before + 2:
        if time.monotonic() > give_up:
            sys.exit("no sample was taken")
        time.sleep(0.001)
    return memory
"""
_CHILD = 'subprocess.run([sys.executable, "-c", sys.argv[1] + "take()", sys.argv[-1]], check=True)'


@pytest.fixture
def samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that has one byte more after each sample."""
    path, sample = tmp_path / "samples", _Peaks.sample
    path.touch()

    def count(peaks: _Peaks, pid: int, group: MemoryGroup | None) -> None:
        sample(peaks, pid, group)
        with path.open("ab") as file:
            file.write(b".")

    monkeypatch.setattr(_Peaks, "sample", count)
    return path


async def run(samples: Path, program: str, group: MemoryGroup | None = None) -> Measured:
    argv = [sys.executable, "-c", _TAKE + program, _TAKE, str(samples)]
    return await measure(Command(argv, {}, samples.with_name("log"), group))


async def test_the_peak_is_the_programs_own(samples: Path) -> None:
    assert (await run(samples, _CHILD)).own_mib < _TAKEN_MIB
    assert (await run(samples, f"take().close(); {_CHILD}")).own_mib >= _TAKEN_MIB


@pytest.mark.cluster
@pytest.mark.lane(name="waiting")
async def test_the_group_has_what_all_use_but_not_the_files_that_are_written(tmp_path: Path, samples: Path) -> None:
    """Needs root, for the group."""
    write = f"open({str(tmp_path / 'file')!r}, 'wb').write(bytes({2 * _TAKEN_MIB} << 20))"
    with memory_group() as group:
        measured = await run(samples, f"{write}; memory = take(); {_CHILD}", group)
    assert measured.working_set_mib is not None
    assert 2 * _TAKEN_MIB <= measured.working_set_mib <= 3 * _TAKEN_MIB
    assert (await run(samples, "take()")).working_set_mib is None


async def test_a_command_that_fails_is_reported_with_its_last_output(samples: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"ended with 3: oh no\n"):
        await run(samples, "print('oh no', flush=True); sys.exit(3)")
