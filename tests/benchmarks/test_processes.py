"""What processes had at one time: neither a peak missed nor two added that were apart."""

import sys
from pathlib import Path

import pytest

from benchmarks.processes import BenchmarkError, Command, Measured, measure

_TAKEN_MIB = 64
_SLACK_MIB = 8

_TAKE = f"""
import mmap, re, subprocess, sys, time

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10

def take():
    memory = mmap.mmap(-1, {_TAKEN_MIB} << 20)
    for _ in range({_TAKEN_MIB}):
        memory.write(bytes(1 << 20))
    return memory

def give_back(memory):
    memory.close()
    # The peak begins anew once it has been read.
    give_up = time.monotonic() + 30
    while peak() >= {_TAKEN_MIB}:
        if time.monotonic() > give_up:
            sys.exit("nobody looked at the peak")
        time.sleep(0.001)
"""
_CHILD = 'subprocess.run([sys.executable, "-c", sys.argv[1] + "give_back(take())", ""], check=True)'


async def run(folder: Path, program: str) -> Measured:
    argv = [sys.executable, "-c", _TAKE + program, _TAKE]
    return await measure(Command(argv, {}, folder / "log"))


async def test_peaks_that_are_apart_are_not_added(tmp_path: Path) -> None:
    measured = await run(tmp_path, f"give_back(take()); {_CHILD}")
    assert measured.own_mib >= _TAKEN_MIB
    assert measured.children_mib >= _TAKEN_MIB
    assert measured.added_mib >= 2 * _TAKEN_MIB
    assert _TAKEN_MIB <= measured.together_mib <= measured.added_mib - _TAKEN_MIB + _SLACK_MIB


async def test_peaks_at_one_time_are_added(tmp_path: Path) -> None:
    measured = await run(tmp_path, f"memory = take(); {_CHILD}")
    assert 2 * _TAKEN_MIB <= measured.together_mib <= measured.added_mib


async def test_a_command_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"ended with 3: oh no\n"):
        await run(tmp_path, "print('oh no', flush=True); sys.exit(3)")
