"""An engine and a broker that follow a script: the signatures of the real ones, and faults on demand.

The scripted stream is a pure function of (prompt, seed, position), as the real one is.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.events import (
    Admitted,
    Burst,
    Captured,
    Event,
    Finished,
    FinishReason,
    HitDropped,
    Primed,
    PromptScored,
    SpecTelemetry,
    TokenLogprob,
)
from services.gpu_worker.engine.requests import GenerateRequest, Hit
from services.gpu_worker.engine.stats import EngineStats, Evicted, PoolCounts, Pressure
from shared.clock import Clock
from shared.errors import BurstlineError, EngineFault
from shared.protocol import codec
from shared.protocol.messages import (
    Abort,
    BrokerCall,
    Commit,
    Done,
    Failure,
    Freed,
    Lease,
    LeaseReply,
    Message,
    Release,
    Reserve,
    ReserveReply,
    Withdraw,
    WithdrawReply,
)
from shared.protocol.subjects import BROKER_QUEUE
from shared.transport.base import Received, Subscription, Transport
from tests.subjects import BROKER_CALLS

FINGERPRINT = "f" * 64
STATE_BYTES, ROW_BYTES = 1000, 10
POOL = 1000
PIECE = 30
"""Prompt tokens that are scored in a step."""

DIMS = ModelDims(
    vocab=50_000, hidden=8, intermediate=8, layer_types=("linear_attention", "full_attention"), heads=2, kv_heads=1,
    head_dim=4, rotary_dim=2, rope_theta=1e4, gdn_key_heads=1, gdn_value_heads=1, gdn_key_dim=4, gdn_value_dim=4,
    conv_kernel=4, eps=1e-6, tie_embeddings=True, max_positions=8192, has_mtp=True,
)  # fmt: skip


def token_at(prompt: Sequence[int], seed: int, position: int) -> int:
    """The one token that stands at a completion position."""
    text = f"{list(prompt)}|{seed}|{position}".encode()
    return 1000 + int.from_bytes(hashlib.sha256(text).digest()[:2], "little") % 40_000


def stream(prompt: Sequence[int], seed: int, count: int) -> tuple[int, ...]:
    """The undisturbed stream."""
    return tuple(token_at(prompt, seed, position) for position in range(count))


def worth(prompt: Sequence[int], place: int) -> TokenLogprob:
    """What the prompt's token at a place is worth."""
    return TokenLogprob(token=prompt[place], logprob=-place / 8, top=((place, -0.5),))


@dataclass
class _Run:
    request: GenerateRequest
    done: int
    cached: int = 0
    hit_key: bytes | None = None
    primed: bool = False
    scored: int = 0
    rounds: int = 0


@dataclass
class ScriptedEngine:
    """`budget` = steps that may still run (None = no limit): a test holds the engine by 0 and lets it go by a call."""

    clock: Clock
    fingerprint: str = FINGERPRINT
    dims: ModelDims = DIMS
    burst: int = 4
    budget: int | None = None
    submit_error: BurstlineError | None = None
    step_error: Exception | None = None
    fault_at: int | None = None
    drop_hits: bool = False
    wanted: Pressure = field(default_factory=lambda: Pressure(blocks=0, snapshots=0))
    entries: dict[bytes, int] = field(default_factory=dict)
    pending: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    holds: dict[str, Hit] = field(default_factory=dict)
    pinned: set[bytes] = field(default_factory=set)
    submitted: list[GenerateRequest] = field(default_factory=list)
    asked: list[tuple[str, ...]] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)
    interrupts: int = 0
    runs: dict[tuple[str, int], _Run] = field(default_factory=dict)
    cancelled: dict[tuple[str, int], str] = field(default_factory=dict)
    stuck: threading.Event | None = None
    steps: int = 0
    captures: int = 0

    def lookup(
        self,
        request_id: str,
        root: bytes,
        tokens: Sequence[int],
        chain: Sequence[bytes],
        labels: Sequence[str] = (),
    ) -> Hit | None:
        self.asked.append(tuple(labels))
        usable = [
            Hit(key=key, position=64 * (index + 1))
            for index, key in enumerate(chain)
            if key in self.entries and 64 * (index + 1) < len(tokens)
        ]
        if not usable:
            return None
        self.holds[request_id] = usable[-1]
        return usable[-1]

    def drop_hit(self, request_id: str) -> None:
        self.holds.pop(request_id, None)

    def submit(self, request: GenerateRequest) -> None:
        if self.submit_error is not None:
            raise self.submit_error
        self.submitted.append(request)
        self.runs[request.key] = _Run(request=request, done=len(request.emitted))

    def cancel(self, request_id: str, reason: str, choice: int | None = None) -> None:
        for key in list(self.runs):
            if key[0] == request_id and choice in (None, key[1]):
                self.cancelled[key] = reason

    def interrupt(self) -> None:
        self.interrupts += 1

    def publish(self, capture_id: int) -> bool:
        key, position = self.pending.pop(capture_id)
        self.entries[key] = position
        return True

    def discard(self, capture_id: int) -> None:
        self.pending.pop(capture_id, None)
        self.discarded.append(capture_id)

    def pressure(self) -> Pressure:
        return self.wanted

    def eviction_candidates(self, blocks_wanted: int, snapshots_wanted: int) -> list[bytes]:
        return [key for key in self.entries if key not in self.pinned]

    def evict(self, keys: Sequence[bytes]) -> Evicted:
        gone = tuple(key for key in keys if key in self.entries and key not in self.pinned)
        for key in gone:
            del self.entries[key]
        if gone:
            self.wanted = Pressure(blocks=0, snapshots=0)
        return Evicted(gone=gone, stateless=(), blocks=len(gone), snapshots=len(gone))

    def has_work(self) -> bool:
        return bool(self.runs) and (self.budget is None or self.budget > 0 or bool(self.cancelled))

    def step(self) -> list[Event]:
        if self.step_error is not None:
            raise self.step_error
        if self.stuck is not None:
            self.stuck.wait(30)
        self.steps += 1
        allowed = self.budget is None or self.budget > 0
        if self.budget:
            self.budget -= 1
        events: list[Event] = []
        for run in list(self.runs.values()):
            events += self._advance(run, allowed)
        return events

    def _advance(self, run: _Run, allowed: bool) -> list[Event]:
        reason = self.cancelled.get(run.request.key)
        if reason is not None:
            return [self._finish(run, FinishReason.CANCELLED, detail=reason)]
        if not allowed:  # this step is for the cancelled alone
            return []
        if run.request.prompt_logprobs is not None and run.scored < len(run.request.tokens) - 1:
            return [self._score(run)]
        if not run.primed:
            return self._prime(run)
        return self._burst(run)

    def _score(self, run: _Run) -> PromptScored:
        request, start = run.request, run.scored
        run.scored = min(start + PIECE, len(request.tokens) - 1)
        return PromptScored(
            request_id=request.request_id, choice=request.choice, offset=start,
            entries=tuple(worth(request.tokens, place) for place in range(start + 1, run.scored + 1)),
            end_ns=self.clock.wall_ns(),
        )  # fmt: skip

    def _prime(self, run: _Run) -> list[Event]:
        request, now = run.request, self.clock.wall_ns()
        hold = self.holds.get(request.request_id) if request.use_cache else None
        run.primed = True
        dropped: list[Event] = []
        if hold is not None and self.drop_hits:
            del self.holds[request.request_id]
            dropped, hold = [HitDropped(request_id=request.request_id, key=hold.key)], None
        run.cached, run.hit_key = (hold.position, hold.key) if hold else (0, None)
        events: list[Event] = [
            Admitted(
                request_id=request.request_id, choice=request.choice, cached_tokens=run.cached,
                hit_key=run.hit_key, queue_ns=0, restore_ns=0, end_ns=now,
            ),
            Primed(
                request_id=request.request_id, choice=request.choice, tokens=len(request.tokens) - run.cached,
                chunks=1, start_ns=now, end_ns=now,
            ),
        ]  # fmt: skip
        return dropped + events + self._capture(run)

    def _capture(self, run: _Run) -> list[Event]:
        request = run.request
        blocks = min(request.ckpt_at or len(request.tokens), len(request.tokens)) // 64
        if not request.use_cache or not blocks or request.choice:
            return []
        key = request.chain[blocks - 1]
        if key in self.entries or any(key == known for known, _ in self.pending.values()):
            return []
        self.captures += 1
        self.pending[self.captures] = (key, 64 * blocks)
        return [
            Captured(
                capture_id=self.captures, request_id=request.request_id, key=key, parent_key=run.hit_key,
                splits_key=None, position=64 * blocks, state_bytes=STATE_BYTES,
                kv_bytes=ROW_BYTES * (64 * blocks - run.cached), end_ns=self.clock.wall_ns(),
            )
        ]  # fmt: skip

    def _burst(self, run: _Run) -> list[Event]:
        request = run.request
        if self.fault_at is not None and run.done >= self.fault_at:
            return [self._finish(run, FinishReason.ERROR, code="engine_fault", detail="NaN logits")]
        new: list[int] = []
        start, ending = run.done, None
        while len(new) < self.burst and run.done < request.max_tokens:
            token = token_at(request.tokens, request.sampling.seed, run.done)
            run.done += 1
            if token in request.stop_ids:
                ending = self._finish(run, FinishReason.STOP, stop_id=token)
                break
            new.append(token)
        run.rounds += 1
        if ending is None and run.done >= request.max_tokens:
            ending = self._finish(run, FinishReason.LENGTH)
        events: list[Event] = [self._told(run, start, new)] if new else []
        return events + ([ending] if ending else [])

    def _told(self, run: _Run, start: int, new: Sequence[int]) -> Burst:
        now = self.clock.wall_ns()
        logprobs = None
        if run.request.top_logprobs is not None:
            logprobs = tuple(TokenLogprob(token=token, logprob=-1.0, top=((token, -1.0),)) for token in new)
        return Burst(
            request_id=run.request.request_id, choice=run.request.choice, offset=start, tokens=tuple(new),
            logprobs=logprobs, rounds=1, drafted=3, accepted=len(new) - 1, start_ns=now, end_ns=now,
        )  # fmt: skip

    def _finish(
        self, run: _Run, reason: FinishReason, *, code: str | None = None, detail: str | None = None,
        stop_id: int | None = None,
    ) -> Finished:  # fmt: skip
        request = run.request
        del self.runs[request.key]
        self.cancelled.pop(request.key, None)
        if not any(key[0] == request.request_id for key in self.runs):
            self.holds.pop(request.request_id, None)
        return Finished(
            request_id=request.request_id, choice=request.choice, reason=reason, error_code=code, detail=detail,
            prompt_tokens=len(request.tokens), cached_tokens=run.cached, completion_tokens=run.done,
            stop_id=stop_id, telemetry=_spent(run.rounds),
            end_ns=self.clock.wall_ns(),
        )  # fmt: skip

    def stats(self) -> EngineStats:
        pool = PoolCounts(total=POOL, free=POOL - len(self.runs), owned=len(self.runs), cached=0)
        return EngineStats(
            blocks=pool, slots=pool, snapshots=pool, waiting=0, priming=0, decoding=len(self.runs),
            pending_captures=len(self.pending), entries=len(self.entries), rounds=self.steps, drafted=0, accepted=0,
            capture_failures=0, prefill_tokens=0, decode_tokens=0,
        )  # fmt: skip

    @property
    def at_baseline(self) -> bool:
        """Nothing is held but entries (C6)."""
        return not (self.runs or self.holds or self.pending or self.cancelled)


def _spent(rounds: int) -> SpecTelemetry:
    """Every round drafts three tokens, and one of five has its second accepted."""
    return SpecTelemetry(
        rounds=rounds,
        drafted=3 * rounds,
        accepted=rounds,
        drafted_at=(rounds,) * 3,
        accepted_at=(rounds, 2 * rounds // 5, 0),
    )


@dataclass
class ScriptedBroker:
    """Answers as told, and keeps what it was asked. `reserve` is consumed call by call, then "granted"."""

    transport: Transport
    lease_reason: str = "granted"
    reserve: list[str] = field(default_factory=list)
    evict: tuple[bytes, ...] = ()
    refuse_withdraw: set[bytes] = field(default_factory=set)
    failing: set[type[Message]] = field(default_factory=set)
    holding: dict[type[Message], asyncio.Event] = field(default_factory=dict)
    """Calls that are answered once their event is set."""
    over: set[str] = field(default_factory=set)
    """Epochs that were declared over."""
    calls: list[BrokerCall] = field(default_factory=list)
    leases: set[str] = field(default_factory=set)
    headers: list[dict[str, str]] = field(default_factory=list)
    _service: Subscription | None = None

    async def start(self) -> None:
        self._service = await self.transport.serve(BROKER_CALLS, BROKER_QUEUE, self._answer, concurrency=4)

    async def stop(self) -> None:
        if self._service is not None:
            await self._service.close()
            self._service = None

    def asked(self, kind: type[Message]) -> list[BrokerCall]:
        return [call for call in self.calls if isinstance(call, kind)]

    async def _answer(self, received: Received) -> bytes:
        call = codec.decode(received.data)
        self.calls.append(call)  # type: ignore[arg-type]
        self.headers.append(dict(received.headers))
        if (event := self.holding.get(type(call))) is not None:
            await event.wait()
        if type(call) in self.failing:
            failure = Failure(code="broken", message="told to fail", status=500, retry_after_s=None)
            return codec.encode(Done(failure=failure))
        if isinstance(call, Reserve | Withdraw) and call.epoch in self.over:
            failure = Failure(code="epoch_gone", message="told so", status=409, retry_after_s=None)
            if isinstance(call, Withdraw):
                return codec.encode(WithdrawReply(failure=failure, withdrawn=(), refused=call.keys))
            refused = ReserveReply(failure=failure, decision="exists", reservation_id=None, evict=())
            return codec.encode(refused)
        return codec.encode(self._reply(call))

    def _reply(self, call: Message) -> Message:
        match call:
            case Lease():
                if self.lease_reason != "granted":
                    return LeaseReply(failure=None, lease_id=None, reason=self.lease_reason)  # type: ignore[arg-type]
                lease = f"lease-{len(self.calls)}"
                self.leases.add(lease)
                return LeaseReply(failure=None, lease_id=lease, reason="granted")
            case Release():
                self.leases.discard(call.lease_id)
                return Done(failure=None)
            case Reserve():
                decision = self.reserve.pop(0) if self.reserve else "granted"
                granted = decision == "granted"
                return ReserveReply(
                    failure=None,
                    decision=decision,  # type: ignore[arg-type]
                    reservation_id=f"r-{call.key.hex()[:8]}" if granted else None,
                    evict=self.evict if decision == "evict" else (),
                )
            case Withdraw():
                free = tuple(key for key in call.keys if key not in self.refuse_withdraw)
                refused = tuple(key for key in call.keys if key in self.refuse_withdraw)
                return WithdrawReply(failure=None, withdrawn=free, refused=refused)
            case Commit() | Abort() | Freed():
                return Done(failure=None)
            case _:
                raise EngineFault(f"no script for {type(call).__name__}")
