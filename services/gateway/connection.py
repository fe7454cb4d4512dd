"""A caller's connection: notice that it is gone while work is under way, streaming or not (FR-69, FR-70, FR-76)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


class CallerGone(Exception):
    """The caller closed the connection; there is nobody to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it as soon as the caller is gone: in the running task, as `asyncio.timeout` does, for
    a task of its own would be two turns of the loop before anything of a request is done.

    The request's body must have been read. Cancelled or not, `work` has ended when this returns.

    Raises:
        CallerGone: the caller left first.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a caller is watched from a task")
    before, gone, over = task.cancelling(), False, False

    def left(watcher: asyncio.Task[None]) -> None:
        nonlocal gone
        if not over:  # a call that is on its way when the work ends cannot be taken back
            gone = True
            task.cancel()

    watcher = asyncio.create_task(_gone(receive))
    watcher.add_done_callback(left)
    try:
        await work
    except BaseException:
        # Raised on: a fault of the work's own, and a cancellation by somebody else beside ours.
        if not gone or task.uncancel() > before:
            raise
    else:
        if not gone:
            return
        task.uncancel()
    finally:
        over = True
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    raise CallerGone


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
