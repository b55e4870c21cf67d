"""What holds for every test: it leaves no task, no child process and no open HTTP client behind."""

import asyncio
import inspect
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from fnmatch import fnmatchcase as fnmatch

import pytest
from hypothesis import HealthCheck, settings

from tests.support import tiers
from tests.support.leaks import (
    child_processes,
    children_left,
    end_connections,
    open_sessions,
    tasks_left,
    watch_sessions,
)

_TASKS_FIXTURE = "_no_task_is_left"

_STARTS = frozenset({"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty"})
"""Audit events of a process that starts. Source: Python 3.11, library/audit_events."""

_TOOLS = {"benchmarks", "testbed"}
"""Folders with tests of what only developers run."""

_MAY_START = ("processes", "integration", "cluster", "slow")


def _may_start(item: pytest.Item) -> bool:
    """Whether a test may start processes."""
    return any(item.get_closest_marker(name) for name in _MAY_START)


def pytest_configure(config: pytest.Config) -> None:
    """Let no test get an event loop by merely asking for one.

    looptime asks before every test; outside a test's own loop asyncio would then make one that
    no test closes, and the warning about it would fail whichever test runs when it is collected.
    """
    asyncio.set_event_loop(None)
    watch_sessions()
    tiers.register(config)
    # How fast a busy machine makes an example is no property of the code under test.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")


def _is_thorough(item: pytest.Item) -> bool:
    """Whether a test is of a tool, or a row of a matrix that its marker `sample` does not name."""
    if _TOOLS & set(item.path.relative_to(item.config.rootpath).parts):
        return True
    sample, row = item.get_closest_marker("sample"), getattr(item, "callspec", None)
    return sample is not None and row is not None and not any(fnmatch(row.id, one) for one in sample.args)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Count the tests of each tier, and hold tests with a loop to leaving no task; the others need no loop for it.

    In virtual time nothing but a real process can wake a loop from outside (looptime waits for threads by itself).
    The others therefore do not poll 42 times before time moves.
    """
    for item in items:
        if _is_thorough(item):
            item.add_marker(pytest.mark.thorough)
        if item.get_closest_marker("looptime") and not _may_start(item):
            item.add_marker(pytest.mark.looptime(noop_cycles=0))
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(inspect.unwrap(item.function)):
            item.fixturenames.insert(0, _TASKS_FIXTURE)
    config.stash[tiers.COUNTS] = Counter(map(tiers.tier_of, items))


@pytest.fixture(name=_TASKS_FIXTURE)
async def no_task_is_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    left = await tasks_left(before)
    await end_connections()
    if left:
        pytest.fail(f"the test left tasks behind: {', '.join(left)}", pytrace=False)


class _ProcessGuard:
    """Fails what starts a process in a test that is not marked `processes`: `make check` must stay quick."""

    def __init__(self) -> None:
        self.allowed = True
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, _: tuple[object, ...]) -> None:
        if event in _STARTS and not self.allowed:
            raise RuntimeError("this test starts a process: mark it with pytest.mark.processes")


_guard = _ProcessGuard()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let marked tests and their fixtures start processes."""
    _guard.allowed = _may_start(item)
    try:
        return (yield)
    finally:
        _guard.allowed = True


@pytest.fixture(autouse=True)
def _no_child_and_no_client_is_left() -> Iterator[None]:
    # Servers of a wider scope were started before and stay.
    children, sessions = child_processes(), open_sessions()
    yield
    if left := children_left(children):
        pytest.fail(f"the test left child processes behind: {left}", pytrace=False)
    if open_sessions() - sessions:
        pytest.fail("the test left an HTTP client open", pytrace=False)
