"""What holds for every test."""

import asyncio

__all__: list[str] = []


def pytest_configure() -> None:
    """Let nobody get an event loop by merely asking for one.

    looptime asks before every test; outside a test's own loop asyncio would then make one that
    nobody closes, and the warning about it would fail whichever test runs when it is collected.
    """
    asyncio.set_event_loop(None)
