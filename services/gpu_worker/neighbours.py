"""Whose workers are gone: fingerprints of which no worker was heard for so long that their requests may be taken over.

A request is bound to the fingerprint of its first attempt (C1.7). When no worker of it is left, one with other numerics goes
on after what was delivered, and says that the answer is not exact. One that comes back within the grace keeps its own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from shared.clock import Clock
from shared.errors import ProtocolError
from shared.protocol import codec, subjects
from shared.protocol.messages import Heartbeat
from shared.transport.base import Subscription

_log = logging.getLogger(__name__)
_MOST: Final = 1024
_POLL_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class _Heard:
    at_ns: int
    model: str
    vocabulary_size: int


class Neighbours:
    """What one worker hears of the others. `run` feeds it."""

    def __init__(
        self, clock: Clock, *, model: str, fingerprint: str, vocabulary_size: int, grace_s: float
    ) -> None:
        """`grace_s`: silence after which a fingerprint counts as gone, from when this worker began to listen."""
        self._clock: Final = clock
        self._model: Final = model
        self._own: Final = subjects.short(fingerprint)
        self._vocabulary_size: Final = vocabulary_size
        self._grace_ns: Final = int(grace_s * 1e9)
        self._heard: dict[str, _Heard] = {}
        self._since_ns = clock.monotonic_ns()
        self._dropped = 0

    async def run(self, beats: Subscription) -> None:
        """Listen until the subscription ends, which is a fault."""
        while True:
            message = await beats.next(_POLL_S)
            if beats.dropped > self._dropped:  # the connection was away: silence meant nothing
                self._dropped, self._since_ns = beats.dropped, self._clock.monotonic_ns()
            if message is not None:
                try:
                    self.note(codec.decode_as(Heartbeat, message.data))
                except ProtocolError as error:
                    _log.debug("a heartbeat cannot be read: %s", error.message)

    def note(self, beat: Heartbeat) -> None:
        """A worker lives."""
        short = beat.fingerprint[:16]
        if short in self._heard or len(self._heard) < _MOST:
            self._heard[short] = _Heard(
                at_ns=self._clock.monotonic_ns(), model=beat.model, vocabulary_size=beat.vocabulary_size
            )

    def gone(self, short: str) -> bool:
        """Whether requests of a fingerprint (its first 16 digits) may be taken over: nobody has it, and as far as is known
        it was of our model and reads tokens as we do."""
        if short == self._own:
            return False
        known = self._heard.get(short)
        if known is not None and (known.model, known.vocabulary_size) != (self._model, self._vocabulary_size):
            return False
        last_ns = self._since_ns if known is None else max(known.at_ns, self._since_ns)
        return self._clock.monotonic_ns() - last_ns >= self._grace_ns
