"""Life and death of a service process: signals, bounded ordered shutdown, and background tasks that may not die quietly.

run -> drain (first SIGTERM or SIGINT: take nothing new, finish) -> shutdown steps, last opened first, each bounded
             (a second signal: stop now)
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from shared.memory import in_huge_pages

_log = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
STEP_S: Final = 10.0
_YOUNG: Final = 10_000
"""Young objects before the collector looks at them; Python's own number is 700. What a look costs goes by their number, so
all looks together cost the same; but one request of thirty has a look in its midst, and not every other."""
_ASKED: Final = 5
"""Times that a task is asked to end before it is left."""


class Drain:
    """Set once: the process should finish what it has and end."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason = ""

    def begin(self, reason: str) -> None:
        """Ask for the end. Idempotent: the first reason stays."""
        if not self._event.is_set():
            self.reason = reason
            _log.info("draining: %s", reason)
            self._event.set()

    @property
    def begun(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        """Until draining begins."""
        await self._event.wait()


@asynccontextmanager
async def drain_on_signals() -> AsyncIterator[Drain]:
    """A `Drain` that SIGTERM and SIGINT begin. A second signal cancels the task that entered this block."""
    drain = Drain()
    loop = asyncio.get_running_loop()
    owner = asyncio.current_task()

    def received(number: signal.Signals) -> None:
        if drain.begun and owner is not None:
            _log.warning("%s again: stopping now", number.name)
            owner.cancel()
        drain.begin(number.name)

    for number in SIGNALS:
        loop.add_signal_handler(number, received, number)
    try:
        yield drain
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def run_to_end(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` of a process with `drain_on_signals`: one that the second signal stopped leaves with 1, without a stack.

    Raises:
        SystemExit: it was stopped so.
    """
    try:
        asyncio.run(main)
    except asyncio.CancelledError:
        raise SystemExit(1) from None


class Shutdown:
    """Steps that undo what was opened, run last first, each within its own limit, whatever the others did."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, float, Callable[[], Awaitable[object]]]] = []

    def push(self, name: str, step: Callable[[], Awaitable[object]], *, limit_s: float = STEP_S) -> None:
        """Add a step that runs before all that are here."""
        self._steps.append((name, limit_s, step))

    async def __aenter__(self) -> Shutdown:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Run every step, shielded: a cancelled process still gives back what it holds."""
        task = asyncio.create_task(self._run())
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                if task.done():
                    break
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _run(self) -> None:
        while self._steps:
            name, limit_s, step = self._steps.pop()
            try:
                async with asyncio.timeout(limit_s):
                    await step()
            except TimeoutError:
                _log.error("shutdown: %s took more than %g s and was left", name, limit_s)
            except Exception:  # noqa: BLE001 - a failing step must not keep the later ones from running
                _log.exception("shutdown: %s failed", name)


async def cancel_and_wait(tasks: Collection[asyncio.Task[Any]], *, patience_s: float = 2.0) -> None:
    """Cancel tasks and wait until they are over; what they return or raise is of no account.

    One cancellation may be lost: `asyncio.wait_for` before Python 3.12 gives its result instead when both come at once, and
    whoever loops goes on. So it is said again to those who have not ended within `patience_s`, `_ASKED` times in all; who
    goes on then is left, and named.
    """
    left = {task for task in tasks if not task.done()}
    for _ in range(_ASKED):
        if not left:
            break
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=patience_s)
    for task in left:
        _log.critical("the task %s does not end and is left", task.get_name())
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # seen


class TaskDied(Exception):
    """A task that should run as long as the process has ended."""


class Supervisor:
    """Background tasks of a service. One that ends or fails takes the whole block down with `TaskDied`, loudly.

    Leaving the block cancels the tasks and waits for them.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._owner: asyncio.Task[Any] | None = None
        self._fault: TaskDied | None = None
        self._interrupted = False  # we cancelled the owner, and it has not been told why yet

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` for as long as the process lives."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task not in self._tasks:
            return
        self._blame(task)
        if self._owner is not None and not self._interrupted:
            self._interrupted = True
            self._owner.cancel()

    def _blame(self, task: asyncio.Task[None]) -> None:
        """Say which task has ended; the first is the fault of the block."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        _log.critical("the task %s has ended", task.get_name(), exc_info=error)
        if self._fault is None:
            self._fault = TaskDied(f"the task {task.get_name()} has ended: {error!r}")
            self._fault.__cause__ = error

    async def __aenter__(self) -> Supervisor:
        self._owner = asyncio.current_task()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is asyncio.CancelledError:
            self._forgive()
        for task in [one for one in self._tasks if one.done()]:
            self._blame(task)
        tasks = list(self._tasks)
        self._tasks.clear()  # what ends from now on was asked to
        try:
            await cancel_and_wait(tasks)
            if self._interrupted:
                await asyncio.sleep(0)  # our cancellation is still on its way: let it arrive here
        except asyncio.CancelledError:
            if not self._forgive():
                raise
        if self._fault is not None:
            raise self._fault from self._fault.__cause__

    def _forgive(self) -> bool:
        """Take back our own cancellation of the owner. False when the cancellation was somebody else's."""
        ours, self._interrupted = self._interrupted, False
        if ours and self._owner is not None:
            self._owner.uncancel()
        return ours


def keep_what_is_loaded() -> None:
    """Let the garbage collector pass over what is in memory now, for good: modules, models, tables; and lay it in huge pages.
    Called once, when a process is ready to work; a full collection of it all would hold every request for tens of
    milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
    in_huge_pages()
