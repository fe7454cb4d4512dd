"""The one way in which a test waits for what has no event: another process, another thread, a row in a database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

LIMIT_S = 30.0


async def until(
    condition: Callable[[], bool | Awaitable[bool]], *, within_s: float = LIMIT_S, every_s: float = 0.005
) -> None:
    """Poll until the condition holds. Raises TimeoutError after `within_s` seconds."""
    async with asyncio.timeout(within_s):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(every_s)
