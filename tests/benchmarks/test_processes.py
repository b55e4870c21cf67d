"""What processes had at one time: no peak is missed, and peaks at different times are not added."""

import sys
from pathlib import Path

import pytest

from benchmarks.groups import MemoryGroup, memory_group
from benchmarks.processes import BenchmarkError, Command, Measured, measure

pytestmark = pytest.mark.processes

_TAKEN_MIB = 64
_NUDGE_MIB = 8
_SLACK_MIB = 8

_TAKE = f"""
import mmap, re, subprocess, sys, time

def given_back_mib():
    # The peak beyond what is there; it is reset once it has been read.
    status = open("/proc/self/status").read()
    peak, now = (int(re.search(name + r":\\s+(\\d+)", status)[1]) for name in ("VmHWM", "VmRSS"))
    return (peak - now) >> 10

def map(size_mib):
    memory = mmap.mmap(-1, size_mib << 20)
    for _ in range(size_mib):
        memory.write(bytes(1 << 20))
    return memory

def wait_for_sample():
    give_up = time.monotonic() + 30
    while given_back_mib() >= {_NUDGE_MIB // 2}:
        if time.monotonic() > give_up:
            sys.exit("the peak was not sampled")
        time.sleep(0.001)

def take():
    memory = map({_TAKEN_MIB})
    # Held until a sample is complete: an earlier one would miss what is taken and freed during it.
    map({_NUDGE_MIB}).close()
    wait_for_sample()
    return memory

def give_back(memory):
    memory.close()
    wait_for_sample()
"""
_CHILD = 'subprocess.run([sys.executable, "-c", sys.argv[1] + "give_back(take())", ""], check=True)'


async def run(folder: Path, program: str, group: MemoryGroup | None = None) -> Measured:
    argv = [sys.executable, "-c", _TAKE + program, _TAKE]
    return await measure(Command(argv, {}, folder / "log", group))


async def test_peaks_that_are_apart_are_not_added(tmp_path: Path) -> None:
    measured = await run(tmp_path, f"give_back(take()); {_CHILD}")
    assert measured.own_mib >= _TAKEN_MIB
    assert measured.children_mib >= _TAKEN_MIB
    added_mib = measured.own_mib + measured.children_mib
    assert _TAKEN_MIB <= measured.together_mib <= added_mib - _TAKEN_MIB + _SLACK_MIB


async def test_peaks_at_one_time_are_added(tmp_path: Path) -> None:
    measured = await run(tmp_path, f"memory = take(); {_CHILD}")
    assert 2 * _TAKEN_MIB <= measured.together_mib <= measured.own_mib + measured.children_mib


@pytest.mark.cluster
@pytest.mark.lane(name="waiting")
async def test_the_group_has_what_all_use_but_not_the_files_that_are_written(tmp_path: Path) -> None:
    """Needs root, for the group."""
    write = f"open({str(tmp_path / 'file')!r}, 'wb').write(bytes({2 * _TAKEN_MIB} << 20))"
    with memory_group() as group:
        measured = await run(tmp_path, f"{write}; memory = take(); {_CHILD}", group)
    assert measured.working_set_mib is not None
    assert 2 * _TAKEN_MIB <= measured.working_set_mib <= 3 * _TAKEN_MIB
    assert (await run(tmp_path, "take()")).working_set_mib is None


async def test_a_command_that_fails_is_reported_with_its_last_output(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"ended with 3: oh no\n"):
        await run(tmp_path, "print('oh no', flush=True); sys.exit(3)")
