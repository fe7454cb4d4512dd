"""Does faults to a running stack, one after another, each as soon as the line can bear it, and undoes what lasts.

A worker is taken only while another is ready, so that takeovers are seen and not starts. Belongs to the main thread.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from services.chaos.front import Front
from services.chaos.scene import LoopThread
from services.chaos.schedule import Fault, Kind
from services.embedded.faults import EmbeddedFault
from services.embedded.stack import Stack
from shared.clock import SYSTEM
from shared.protocol.subjects import REQUESTS
from shared.transport.base import Transport

SIGNALS: Final = {
    Kind.WORKER_KILL: ("worker", signal.SIGKILL),
    Kind.WORKER_STOP: ("worker", signal.SIGSTOP),
    Kind.WORKER_DRAIN: ("worker", signal.SIGTERM),
    Kind.GATEWAY_KILL: ("gateway", signal.SIGKILL),
    Kind.GATEWAY_DRAIN: ("gateway", signal.SIGTERM),
    Kind.BROKER_KILL: ("broker", signal.SIGKILL),
    Kind.BROKER_DRAIN: ("broker", signal.SIGTERM),
}
SERVERS: Final = {
    Kind.NATS_RESTART: ("nats", signal.SIGTERM),
    Kind.POSTGRES_RESTART: ("postgres", signal.SIGINT),
}
SLOW_S: Final = 0.03
FULL_BYTES: Final = 1
LOOK_S: Final = 0.5
HEAL_S: Final = 300.0
API_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Record:
    """A fault that was done: to whom, and when by the wall clock."""

    kind: Kind
    name: str
    at_ns: int


class Injector:
    """`turn` is called a few times a second."""

    def __init__(
        self,
        stack: Stack,
        schedule: Iterator[Fault],
        *,
        front: Front,
        thread: LoopThread,
        transport: Transport,
    ) -> None:
        self.records: list[Record] = []
        self._stack = stack
        self._schedule = schedule
        self._front = front
        self._thread = thread
        self._transport = transport
        self._next = next(schedule)
        self._due_s = _now_s() + self._next.after_s
        self._look_s = 0.0
        self._held: tuple[Fault, int, float] | None = None

    def turn(self) -> Record | None:
        """Undo what is over, do what is due. The fault that was done, if one was.

        Raises:
            EmbeddedFault: the line has not healed for minutes.
        """
        now = _now_s()
        if self._held is not None:
            if now >= self._held[2]:
                self.release()
            return None
        if now < max(self._due_s, self._look_s):
            return None
        candidates = self._candidates(self._next.kind)
        if not candidates:
            if now - self._due_s > HEAL_S:
                raise EmbeddedFault(f"the line has not healed within {HEAL_S:g} s")
            self._look_s = now + LOOK_S
            return None
        record = self._do(self._next, candidates[self._next.target % len(candidates)])
        self.records.append(record)
        self._next = next(self._schedule)
        self._due_s = _now_s() + self._next.after_s
        return record

    def release(self) -> None:
        """Undo what lasts. Idempotent."""
        if self._held is None:
            return
        fault, pid, _ = self._held
        self._held = None
        if fault.kind is Kind.WORKER_STOP:
            os.kill(pid, signal.SIGCONT)
        elif fault.kind is Kind.NATS_SLOW:
            self._front.delay_s = 0.0
        elif fault.kind is Kind.QUEUE_FULL:
            self._limit_queue(REQUESTS.max_bytes)

    def _candidates(self, kind: Kind) -> tuple[str, ...]:
        """Whom it can be done to now; () = not yet."""
        stack = self._stack
        if kind in SIGNALS:
            service, _ = SIGNALS[kind]
            ready = tuple(name for name in stack.names(service) if stack.ready(name))
            return ready if len(ready) > 1 else ()
        services = [name for service in ("gateway", "broker", "worker") for name in stack.names(service)]
        if not all(map(stack.ready, services)):
            return ()
        return (SERVERS[kind][0],) if kind in SERVERS else ("nats",)

    def _do(self, fault: Fault, name: str) -> Record:
        at_ns, pid = SYSTEM.wall_ns(), self._stack.pids[name]
        if fault.kind in SIGNALS or fault.kind in SERVERS:
            os.kill(pid, (SIGNALS | SERVERS)[fault.kind][1])
        elif fault.kind is Kind.NATS_CUT:
            self._thread.call(self._front.cut)
        elif fault.kind is Kind.NATS_SLOW:
            self._front.delay_s = SLOW_S
        else:
            self._limit_queue(FULL_BYTES)
        if fault.hold_s:
            self._held = (fault, pid, _now_s() + fault.hold_s)
        return Record(kind=fault.kind, name=name, at_ns=at_ns)

    def _limit_queue(self, limit_bytes: int) -> None:
        """Give the request stream another limit. What it holds stays, as it refuses the new and not drops the old."""

        async def limit() -> None:
            told = await self._ask(f"$JS.API.STREAM.INFO.{REQUESTS.name}", {})
            config = told["config"] | {"max_bytes": limit_bytes}
            await self._ask(f"$JS.API.STREAM.UPDATE.{REQUESTS.name}", config)

        self._thread.run(limit())

    async def _ask(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(
            await self._transport.request(subject, json.dumps(body).encode(), timeout=API_S)
        )
        if "error" in answer:
            raise EmbeddedFault(f"NATS refused {subject}: {answer['error'].get('description')}")
        return answer


def _now_s() -> float:
    return SYSTEM.monotonic_ns() / 1e9
