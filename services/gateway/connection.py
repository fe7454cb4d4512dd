"""A caller's connection: notice that it is gone while work is under way, streaming or not (FR-69, FR-70, FR-76)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


class CallerGone(Exception):
    """The caller closed the connection; there is nobody to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it as soon as the caller is gone.

    The request's body must have been read. Cancelled or not, `work` has ended when this returns.

    Raises:
        CallerGone: the caller left first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CallerGone
        await task
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
