"""An engine that computes nothing: its bursts are there at once, and tell in their tokens when they were made.

A burst is `DIGITS` tokens, each a hexadecimal digit of the monotonic clock in microseconds, which all processes of a
machine share; so whoever reads a burst knows how long it was on its way. Everything before and behind the engine is
real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.events import (
    Admitted,
    Burst,
    Event,
    Finished,
    FinishReason,
    Primed,
    SpecTelemetry,
)
from services.gpu_worker.engine.requests import GenerateRequest, Hit
from services.gpu_worker.engine.stats import EngineStats, Evicted, PoolCounts, Pressure
from shared.clock import SYSTEM

DIGITS: Final = 10
FINGERPRINT: Final = "e" * 64
_POOL: Final = PoolCounts(total=1024, free=1024, owned=0, cached=0)


def dims(vocab: int) -> ModelDims:
    """The sizes that a worker tells of its model."""
    return ModelDims(
        vocab=vocab, hidden=8, intermediate=8, layer_types=("linear_attention", "full_attention"), heads=2, kv_heads=1,
        head_dim=4, rotary_dim=2, rope_theta=1e4, gdn_key_heads=1, gdn_value_heads=1, gdn_key_dim=4, gdn_value_dim=4,
        conv_kernel=4, eps=1e-6, tie_embeddings=True, max_positions=4096, has_mtp=False,
    )  # fmt: skip


def stamp_us(digits: Sequence[int]) -> int:
    """The time that the values of a burst's digits tell."""
    value = 0
    for digit in digits:
        value = value * 16 + digit
    return value


def digits_of(now_us: int) -> tuple[int, ...]:
    """The lowest `DIGITS` digits of a time, highest first (they come round after twelve days)."""
    return tuple((now_us >> (4 * place)) & 15 for place in reversed(range(DIGITS)))


@dataclass
class InstantEngine:
    """`alphabet[d]` is the token id of digit d. Belongs to the engine's thread but for `cancel`."""

    alphabet: tuple[int, ...]
    dims: ModelDims
    fingerprint: str = FINGERPRINT
    _running: dict[tuple[str, int], tuple[GenerateRequest, int]] = field(default_factory=dict)
    _cancelled: dict[str, str] = field(default_factory=dict)
    _rounds: int = 0

    def lookup(
        self,
        request_id: str,
        root: bytes,
        tokens: Sequence[int],
        chain: Sequence[bytes],
        labels: Sequence[str] = (),
    ) -> Hit | None:
        return None

    def drop_hit(self, request_id: str) -> None:
        """There are no hits."""

    def submit(self, request: GenerateRequest) -> None:
        self._running[request.key] = (request, -1)

    def cancel(self, request_id: str, reason: str, choice: int | None = None) -> None:
        self._cancelled[request_id] = reason

    def interrupt(self) -> None:
        """A step takes no time."""

    def publish(self, capture_id: int) -> bool:
        return False

    def discard(self, capture_id: int) -> None:
        """There are no captures."""

    def pressure(self) -> Pressure:
        return Pressure(blocks=0, snapshots=0)

    def eviction_candidates(self, blocks_wanted: int, snapshots_wanted: int) -> list[bytes]:
        return []

    def evict(self, keys: Sequence[bytes]) -> Evicted:
        return Evicted(gone=(), stateless=(), blocks=0, snapshots=0)

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> list[Event]:
        """One burst of every stream; the first step of a stream also admits it."""
        events: list[Event] = []
        for request, done in list(self._running.values()):
            events += self._advance(request, done)
        self._cancelled.clear()
        self._rounds += 1
        return events

    def stats(self) -> EngineStats:
        return EngineStats(
            blocks=_POOL, slots=_POOL, snapshots=_POOL, waiting=0, priming=0, decoding=len(self._running),
            pending_captures=0, entries=0, rounds=self._rounds, drafted=0, accepted=0, capture_failures=0,
            prefill_tokens=0, decode_tokens=self._rounds,
        )  # fmt: skip

    def _advance(self, request: GenerateRequest, done: int) -> list[Event]:
        events: list[Event] = []
        if done < 0:
            done, events = len(request.emitted), _begin(request)
        reason = self._cancelled.get(request.request_id)
        tokens = tuple(self.alphabet[digit] for digit in digits_of(SYSTEM.monotonic_ns() // 1000))
        tokens = () if reason else tokens[: request.max_tokens - done]
        if tokens:
            events.append(_burst(request, done, tokens))
        done += len(tokens)
        self._running[request.key] = (request, done)
        if reason or done >= request.max_tokens:
            del self._running[request.key]
            events.append(_end(request, done, reason))
        return events


def _begin(request: GenerateRequest) -> list[Event]:
    now = SYSTEM.wall_ns()
    return [
        Admitted(
            request_id=request.request_id, choice=request.choice, cached_tokens=0, hit_key=None, queue_ns=0,
            restore_ns=0, end_ns=now,
        ),
        Primed(
            request_id=request.request_id, choice=request.choice, tokens=len(request.tokens), chunks=1, start_ns=now,
            end_ns=now,
        ),
    ]  # fmt: skip


def _burst(request: GenerateRequest, offset: int, tokens: tuple[int, ...]) -> Burst:
    now = SYSTEM.wall_ns()
    return Burst(
        request_id=request.request_id, choice=request.choice, offset=offset, tokens=tokens, logprobs=None, rounds=1,
        drafted=0, accepted=0, start_ns=now, end_ns=now,
    )  # fmt: skip


def _end(request: GenerateRequest, done: int, cancelled: str | None) -> Finished:
    return Finished(
        request_id=request.request_id, choice=request.choice,
        reason=FinishReason.CANCELLED if cancelled else FinishReason.LENGTH, error_code=None, detail=cancelled,
        prompt_tokens=len(request.tokens), cached_tokens=0, completion_tokens=done, stop_id=None,
        telemetry=SpecTelemetry(rounds=1), end_ns=SYSTEM.wall_ns(),
    )  # fmt: skip
