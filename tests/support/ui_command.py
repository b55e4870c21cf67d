"""The command `nodeagent ui` as a process of its own."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_START_SECONDS = 300.0


@asynccontextmanager
async def running_ui(*words: str) -> AsyncIterator[tuple[int, str]]:
    """Run the command with these words, and without a browser; yield its process ID and the address that it prints."""
    argv = [sys.executable, "-m", "nodeagent", "ui", "--no-browser", *words]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    if process.stdout is None:
        raise RuntimeError("its output is a pipe")
    try:
        async with asyncio.timeout(_START_SECONDS):
            url = (await process.stdout.readline()).decode().strip()
        if not url:
            raise RuntimeError(f"{' '.join(argv)} printed no address")
        yield process.pid, url
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
