"""The live workers, as their heartbeats tell: which model, which fingerprint, how busy. Silence means dead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shared.clock import Clock
from shared.errors import ProtocolError
from shared.protocol import codec, subjects
from shared.protocol.messages import Heartbeat
from shared.transport.base import Transport

_log = logging.getLogger(__name__)
_MOST_WORKERS: Final = 4096
_POLL_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Crew:
    """The live workers of one fingerprint of a model. Never empty."""

    fingerprint: str
    workers: tuple[Heartbeat, ...]

    @property
    def window(self) -> int:
        """Positions that every one of them can hold."""
        return min(worker.max_context for worker in self.workers)

    @property
    def vocabulary_size(self) -> int:
        """Token ids of their model: one fingerprint has one."""
        return self.leader.vocabulary_size

    @property
    def leader(self) -> Heartbeat:
        """The one whose defaults count: the same for every gateway that sees the same workers."""
        return min(self.workers, key=lambda worker: worker.worker_id)


class Fleet:
    """Keeps the newest heartbeat of every worker. `run` feeds it; the rest reads."""

    def __init__(self, transport: Transport, clock: Clock, *, silence_s: float) -> None:
        self._transport: Final = transport
        self._clock: Final = clock
        self._silence_ns: Final = int(silence_s * 1e9)
        self._seen: dict[str, tuple[Heartbeat, int]] = {}
        self._changed = asyncio.Event()

    async def run(self, listening: asyncio.Event | None = None) -> None:
        """Listen until cancelled. `listening` is set once the subscription stands."""
        subscription = await self._transport.subscribe(subjects.HEARTBEATS)
        if listening is not None:
            listening.set()
        try:
            while True:
                message = await subscription.next(_POLL_S)
                if message is not None:
                    self._take(message.data)
                self._forget()
        finally:
            await subscription.close()

    def _take(self, data: bytes) -> None:
        try:
            self.note(codec.decode_as(Heartbeat, data))
        except ProtocolError as error:
            _log.warning("a heartbeat cannot be read: %s", error.message)

    def note(self, heartbeat: Heartbeat) -> None:
        """A worker said that it lives."""
        if heartbeat.worker_id in self._seen or len(self._seen) < _MOST_WORKERS:
            self._seen[heartbeat.worker_id] = (heartbeat, self._clock.monotonic_ns())
            self._changed.set()

    def _forget(self) -> None:
        horizon = self._clock.monotonic_ns() - 10 * self._silence_ns
        for worker in [name for name, (_, seen) in self._seen.items() if seen < horizon]:
            del self._seen[worker]

    def live(self, model: str) -> list[Heartbeat]:
        """Workers of `model` that can take work now."""
        horizon = self._clock.monotonic_ns() - self._silence_ns
        return [
            beat
            for beat, seen in self._seen.values()
            if beat.model == model and beat.ready and not beat.draining and seen >= horizon
        ]

    def staffed(self, fingerprint: str) -> bool:
        """Whether a worker of a fingerprint was heard lately, ready or not."""
        horizon = self._clock.monotonic_ns() - self._silence_ns
        return any(beat.fingerprint == fingerprint and seen >= horizon for beat, seen in self._seen.values())

    def has_heirs(self, model: str, fingerprint: str) -> bool:
        """Whether live workers of the model can go on for those of a fingerprint: as far as is known, they read tokens alike."""
        known = {beat.vocabulary_size for beat, _ in self._seen.values() if beat.fingerprint == fingerprint}
        return any(not known or beat.vocabulary_size in known for beat in self.live(model))

    def crew(self, model: str) -> Crew | None:
        """The fingerprint of `model` with the most live workers (ties: the smallest), and its workers."""
        by_fingerprint: dict[str, list[Heartbeat]] = {}
        for worker in self.live(model):
            by_fingerprint.setdefault(worker.fingerprint, []).append(worker)
        if not by_fingerprint:
            return None
        fingerprint, workers = min(by_fingerprint.items(), key=lambda item: (-len(item[1]), item[0]))
        return Crew(fingerprint=fingerprint, workers=tuple(workers))

    async def wait_for_crew(self, model: str, *, grace_s: float) -> Crew | None:
        """Like `crew`, waiting up to `grace_s` for a first live worker."""
        deadline = self._clock.monotonic_ns() + int(grace_s * 1e9)
        while (found := self.crew(model)) is None:
            left = (deadline - self._clock.monotonic_ns()) / 1e9
            if left <= 0:
                return None
            self._changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                return None
        return found

    def why_not(self, vocabularies: Mapping[str, int]) -> list[str]:
        """A reason for every model (name -> vocabulary size here) that cannot be served now."""
        reasons = []
        for model, size in vocabularies.items():
            crew = self.crew(model)
            if crew is None:
                reasons.append(f"no live worker for model {model}")
            elif crew.vocabulary_size != size:
                reasons.append(other_vocabulary(model, crew, size))
        return reasons


def other_vocabulary(model: str, crew: Crew, size: int) -> str:
    """Why workers of another model folder than the gateway's cannot be used: their tokens would be read as other text."""
    return f"the workers of model {model} have a vocabulary of {crew.vocabulary_size} ids, this gateway one of {size}"
