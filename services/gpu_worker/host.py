"""The engine's thread and the bridge to the event loop.

    event loop                                  engine thread (one, owns the engine)
    call(command) -> bounded queue  --------->  commands, between two steps
    on_events(events)  <- at most N batches --  engine.step()
    cancel, interrupt  ---------------------->  (the engine's two thread-safe methods)

The thread waits on a condition when there is nothing to do, and waits for the loop when that lags: neither side grows
without bound. After a step with a first token it lets the loop run before the next one. An exception of a command belongs
to its caller; one of `step` leaves the engine in an unknown state, so the thread ends and `failed` says why: the process
goes down and the requests are delivered again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from services.gpu_worker.api import EngineApi
from services.gpu_worker.engine.events import Burst, Event
from services.gpu_worker.engine.stats import EngineStats, Pressure
from shared.clock import SYSTEM, Clock
from shared.errors import EngineFault

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_COMMANDS: Final = 256
_MAX_BATCHES: Final = 64
_EMPTY_STEP_NS: Final = 1_000_000
_EMPTY_STEP_WAIT_S: Final = 0.01
_HAND_OVER_S: Final = 0.001
"""How long the next step waits, at most, for a loop that keeps up to take a first token. Without it that step has the
interpreter before the loop is awake to ask for it, and the token waits for a pause in the step's planning."""


_Answer = Callable[[object, BaseException | None], None]


class _Command:
    """A function for the engine thread, and the future that gets its result."""

    def __init__(self, run: Callable[[EngineApi], object], answer: _Answer) -> None:
        self.run = run
        self.answer = answer


class EngineHost:
    """Owns the engine thread. All public methods belong to the event loop that called `start`."""

    def __init__(
        self,
        build: Callable[[], EngineApi],
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._build = build
        self._on_events: Callable[[list[Event]], None] = _nobody
        self._clock = clock
        self._condition = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._room = asyncio.Semaphore(_MAX_COMMANDS)
        self._credit = threading.Semaphore(_MAX_BATCHES)
        self._told = self._took = 0  # batches of events: the thread counts, and the loop
        self._taken = threading.Event()  # the loop has all of them
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._engine: EngineApi | None = None
        self._stats: EngineStats | None = None
        self._pressure = Pressure(blocks=0, snapshots=0)
        self._progress_ns = clock.monotonic_ns()
        self._busy = False

    # ---- the loop's side -------------------------------------------------------------------------------------------

    def deliver_to(self, on_events: Callable[[list[Event]], None]) -> None:
        """Who gets the events; to be named before anything is submitted."""
        self._on_events = on_events

    async def start(self) -> None:
        """Start the thread and return when the engine is built. Raises what building raised."""
        self._loop = asyncio.get_running_loop()
        self._built: asyncio.Future[None] = self._loop.create_future()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await asyncio.shield(self._built)

    async def failed(self) -> None:
        """Wait until the thread ends: returns after `stop`, raises EngineFault when it died."""
        await asyncio.shield(self._failed)

    async def stop(self, *, limit_s: float) -> bool:
        """End the thread after its current step. False when it did not end within `limit_s` (it is a daemon)."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._credit.release()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, limit_s)
        return not self._thread.is_alive()

    @property
    def loaded(self) -> bool:
        """Whether the engine is built and its thread lives."""
        return self._engine is not None and not self._failed.done()

    @property
    def engine(self) -> EngineApi:
        """For constants (fingerprint, dims) alone. Raises EngineFault before it is built."""
        if self._engine is None:
            raise EngineFault("the engine is not built yet")
        return self._engine

    @property
    def stats(self) -> EngineStats | None:
        """The newest picture of the engine; None before it is built."""
        return self._stats

    @property
    def pressure(self) -> Pressure:
        """What the engine wanted to be evicted after its last step."""
        return self._pressure

    def quiet_s(self) -> float:
        """Seconds without forward progress while there is work; 0 when idle."""
        return (self._clock.monotonic_ns() - self._progress_ns) / 1e9 if self._busy else 0.0

    async def call(self, command: Callable[[EngineApi], T], *, urgent: bool = False) -> T:
        """Run `command` on the engine thread between two steps; `urgent` ends the current burst first.

        Raises what the command raised, and EngineFault when the thread is gone. When the caller is cancelled, the
        command still runs.
        """
        await self._room.acquire()
        future: asyncio.Future[T] = self._loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            self._room.release()
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        with self._condition:
            if self._stopping or self._failed.done():
                self._room.release()
                raise EngineFault("the engine has stopped")
            self._commands.append(_Command(command, settle))
            self._condition.notify()
        if urgent:
            self.engine.interrupt()
        return await future

    def cancel(self, request_id: str, reason: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, at the next chunk or round. Harmless for unknown ids."""
        if self._engine is not None:
            self._engine.cancel(request_id, reason, choice)
            with self._condition:
                self._condition.notify()

    # ---- the thread's side -----------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            engine = self._build()
        except Exception as error:  # noqa: BLE001 - handed to `start`, whatever it is
            self._tell(self._end, error)
            return
        self._engine = engine
        self._observe(engine)
        self._tell(self._announce)
        try:
            self._serve(engine)
        except Exception as error:  # the thread's end is the process's: told, never swallowed
            log.exception("the engine thread died")
            self._tell(self._end, error)
        else:
            self._tell(self._end, None)

    def _serve(self, engine: EngineApi) -> None:
        while True:
            self._wait(engine)
            commands = self._take()
            if self._stopping:
                self._refuse(commands)
                return
            answers = [self._run(command, engine) for command in commands]
            if commands:
                self._observe(engine)  # whoever has the answer finds the picture after it
            for answer in answers:
                self._tell(*answer)
            if engine.has_work():
                self._step(engine, worked=bool(commands))
            self._observe(engine)

    def _wait(self, engine: EngineApi) -> None:
        with self._condition:
            while not (self._commands or self._stopping or engine.has_work()):
                self._busy = False
                self._condition.wait()
            if not self._busy:
                self._progress_ns = self._clock.monotonic_ns()
                self._busy = True

    def _take(self) -> list[_Command]:
        with self._condition:
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def _run(self, command: _Command, engine: EngineApi) -> tuple[_Answer, object, BaseException | None]:
        try:
            return command.answer, command.run(engine), None
        except Exception as error:  # noqa: BLE001 - belongs to the caller, who awaits it
            return command.answer, None, error

    def _step(self, engine: EngineApi, *, worked: bool) -> None:
        start = self._clock.monotonic_ns()
        events = engine.step()
        if events:
            self._credit.acquire()
            self._told += 1
            self._taken.clear()
            self._tell(self._deliver, events)
            keeps_up = self._told - self._took <= 1
            if keeps_up and any(isinstance(event, Burst) and event.offset == 0 for event in events):
                self._taken.wait(_HAND_OVER_S)
        elif not worked and self._clock.monotonic_ns() - start < _EMPTY_STEP_NS:
            # Nothing could run (everything waits for a broker's answer): sleep until a command or a moment passes.
            with self._condition:
                if not self._commands and not self._stopping:
                    self._condition.wait(_EMPTY_STEP_WAIT_S)

    def _observe(self, engine: EngineApi) -> None:
        before, now = self._stats, engine.stats()
        if before is None or _work(before) != _work(now) or not engine.has_work():
            self._progress_ns = self._clock.monotonic_ns()
        self._stats, self._pressure = now, engine.pressure()

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            log.debug("the event loop is gone")

    # ---- called on the loop by the thread --------------------------------------------------------------------------

    def _announce(self) -> None:
        if not self._built.done():
            self._built.set_result(None)

    def _deliver(self, events: list[Event]) -> None:
        self._took += 1
        if self._took == self._told:
            self._taken.set()  # the loop has the interpreter, and gives it away when the tokens are sent
        try:
            self._on_events(events)
        finally:
            self._credit.release()

    def _refuse(self, commands: Sequence[_Command]) -> None:
        for command in commands:
            self._tell(command.answer, None, EngineFault("the engine has stopped"))

    def _end(self, error: BaseException | None) -> None:
        """The thread is over: nobody may wait for it any more."""
        with self._condition:
            self._stopping = True
            left = list(self._commands)
            self._commands.clear()
        for command in left:
            command.answer(None, EngineFault("the engine has stopped"))
        if error is None:
            if not self._failed.done():
                self._failed.set_result(None)
            return
        if not self._built.done():
            self._built.set_exception(error)
            self._failed.cancel()
            return
        if not self._failed.done():
            fault = EngineFault(f"the engine thread died of {type(error).__name__}")
            fault.__cause__ = error
            self._failed.set_exception(fault)
            self._failed.exception()  # retrieved: `failed` may have no waiter yet


def _nobody(events: list[Event]) -> None:
    raise EngineFault(f"{len(events)} events came before anybody was there for them")


def _work(stats: EngineStats) -> tuple[int, ...]:
    """What changes whenever the engine gets on with something."""
    said = stats.prefill_tokens, stats.decode_tokens
    return (stats.rounds, stats.replayed, *said, stats.waiting, stats.decoding)
