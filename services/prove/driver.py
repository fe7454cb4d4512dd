"""Plays the worker on an engine: looks up, submits, steps, grants captures, makes room, collects streams.

The one place of `prove` and `bench` that drives an engine.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from services.gpu_worker.engine.cache.tree import Node
from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import (
    Admitted,
    Burst,
    Captured,
    DrafterOff,
    Event,
    Finished,
    FinishReason,
    Parked,
    TokenLogprob,
)
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sessions.base import Session
from services.gpu_worker.engine.sessions.handoff import hand_off
from services.gpu_worker.engine.sessions.mtp import SpecSession
from services.gpu_worker.engine.streams import Stream
from shared.errors import EngineFault

Key = tuple[str, int]

WHOLE: Final = (FinishReason.STOP, FinishReason.LENGTH)
"""How a stream ends that said all it had to say."""
IDLE_STEPS: Final = 200
"""Steps without any event after which an engine that says it has work counts as stuck."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheBytes:
    """What the cache held of a sequence when its stream ended, states folded to the committed length."""

    committed: tuple[int, ...]
    """Tokens of the rows, up to the public length."""
    rows: Tensor
    """[2, planes, kv_heads, committed, head_dim]: trunk keys and values."""
    draft: Tensor | None
    """[2, kv_heads, prompt, head_dim]: the prefill-made part of the draft plane; null without one."""
    state: Tensor | None
    """Recurrent states of all layers; null, as `window`, where rows past the stream's end are in them."""
    window: Tensor | None
    """Inputs of the convolutions."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """float32 bytes that only some models keep, by the name that a difference tells."""


@dataclass(kw_only=True, slots=True)
class Record:
    """What one stream gave."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    finished: Finished | None = None
    cache: CacheBytes | None = None

    @property
    def end(self) -> Finished:
        """The terminal event. Raises EngineFault while there is none."""
        if self.finished is None:
            raise EngineFault("the stream has no end")
        return self.finished


class WatchedEngine(Engine):
    """An engine that copies the cache bytes of a stream before its memory is given back, and that is held to R-S1 after
    every step."""

    watching = True

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.kept: dict[Key, CacheBytes] = {}

    def path(self, key: bytes) -> list[Node]:
        """The prefix tree's nodes from the root to the one at `key`."""
        return self._cache.tree.path(key)

    def forget_turns(self) -> None:
        """Drop what waits for the next turns of those who opted in (`reuse = "decode"`)."""
        for decoded in self._cache.decoded.parked:
            self._cache.decoded.drop(decoded)

    def _retire(self) -> None:
        for stream in self._active:
            if not self.watching:
                break
            self._agrees(stream.session)
            ending = stream.session.ending
            if ending is not None and ending.reason in WHOLE:
                self._is_over(stream)
                self.kept[stream.request.key] = self._copy(stream.session)
        super()._retire()

    def _agrees(self, session: Session) -> None:
        """R-S1: as many rows in the cache as tokens committed. Raises EngineFault when not."""
        if session.ending is not None and session.ending.reason not in WHOLE:
            return
        slot = session.sequence.ssm_slot_idx()
        rows = self.states.position(slot) + self.states.fold(slot)
        if rows != session.committed_len:
            raise EngineFault(f"{rows} rows in the cache, {session.committed_len} tokens committed")

    def _is_over(self, stream: Stream) -> None:
        """R-S16: a session with rows that the stream does not have is not handed over, though its next token be decided.
        Raises EngineFault when it is."""
        session = stream.session
        if session.tainted and isinstance(session, SpecSession):
            session.next_pred = session.committed[-1]
            handed = hand_off(session, stream.fed)
            session.next_pred = None
            if handed is not None:
                raise EngineFault("a session was handed over with rows that its stream does not have")

    def _copy(self, session: Session) -> CacheBytes:
        sequence, trunk = session.sequence, self.dims.attention_layers
        prompt = len(session.request.tokens)
        public = prompt + session.completion_tokens - 1
        both = self.kv.read_rows(sequence.block_table, 0, min(sequence.seq_len, public))
        states = None if session.tainted else self._states(sequence.ssm_slot_idx())
        last = min(sequence.seq_len, public)
        tail = self.ring.tail(sequence.ssm_slot_idx(), last)[:, max(0, self.ring.tail_rows - last) :]
        return CacheBytes(
            committed=tuple(session.committed[:public]),
            rows=both[:, :trunk].clone(),
            draft=both[:, trunk, :, :prompt].clone() if self.dims.has_mtp else None,
            state=states[0] if states else None,
            window=states[1] if states else None,
            parts={"window tail": tail} if self.ring.planes else {},
        )

    def _states(self, slot: int) -> tuple[Tensor, Tensor]:
        """Recurrent and conv states with the fold applied."""
        self.runner.flush(slot)
        # A padded fold step may turn a negative zero into a zero; nothing downstream can tell, so both count as zero.
        return self.states.state[:, slot] + 0.0, self.states.windows[:, slot, : self.states.taps] + 0.0


class Driver:
    """One engine and the streams that were asked of it."""

    def __init__(self, engine: WatchedEngine) -> None:
        self.engine = engine
        self.records: dict[Key, Record] = {}
        self.happened: Counter[str] = Counter()  #: events by their names
        self.steps = 0
        self._published: dict[bytes, int] = {}
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, step: int, action: Callable[[], None]) -> None:
        """Do something before the given step of the driver (a step that has passed means the next one)."""
        heapq.heappush(self._due, (step, next(self._order), action))

    def submit(self, request: GenerateRequest) -> None:
        """Look up and queue, as a worker does."""
        if request.use_cache:
            self.engine.lookup(request.request_id, request.root, request.tokens, request.chain)
        self.engine.submit(request)
        self.records[request.key] = Record(logprobs=[] if request.top_logprobs is not None else None)

    def step(self) -> list[Event]:
        """One step of the engine, its events answered and noted."""
        self.steps += 1
        while self._due and self._due[0][0] <= self.steps:
            heapq.heappop(self._due)[2]()
        events = self.engine.step()
        for event in events:
            self.happened.update(_names(event))
            self._note(event)
        pressure = self.engine.pressure()
        if pressure:
            self.engine.evict(self.engine.eviction_candidates(pressure.blocks, pressure.snapshots))
        return events

    def run(self, requests: Iterable[GenerateRequest] = ()) -> None:
        """Submit, then step until nothing is due and nothing runs. Raises EngineFault when the engine is stuck."""
        for request in requests:
            self.submit(request)
        quiet = 0
        while self.engine.has_work() or self._due:
            if not self.engine.has_work():
                self.steps = max(self.steps, self._due[0][0] - 1)
            quiet = 0 if self.step() or self._due else quiet + 1
            if quiet > IDLE_STEPS:
                raise EngineFault(
                    f"{IDLE_STEPS} steps without an event, and the engine says that it has work"
                )

    def clear(self) -> None:
        """Evict every entry, so that the pools are whole again. Raises EngineFault when they are not (C6)."""
        deepest_first = sorted(self._published, key=lambda key: -self._published[key])
        self.engine.evict(deepest_first)
        self._published.clear()
        self.engine.check()
        stats = self.engine.stats()
        if stats.entries or stats.host_bytes:
            raise EngineFault(
                f"{stats.entries} entries and {stats.host_bytes} host bytes outlive their eviction"
            )
        for name in ("blocks", "slots", "snapshots"):
            counts = getattr(stats, name)
            if counts.free != counts.total:
                raise EngineFault(f"{counts.total - counts.free} {name} were not given back")

    def _note(self, event: Event) -> None:
        match event:
            case Admitted():
                self._of(event).cached_tokens = event.cached_tokens
            case Burst():
                record = self._of(event)
                record.tokens.extend(event.tokens)
                if record.logprobs is not None:
                    record.logprobs.extend(event.logprobs or ())
            case Captured():
                if self.engine.publish(event.capture_id):
                    self._published[event.key] = event.position
            case Finished():
                record = self._of(event)
                record.finished = event
                record.cache = self.engine.kept.pop((event.request_id, event.choice), None)
                self.happened["Overshot"] += record.cache is not None and record.cache.state is None
            case _:
                pass

    def _of(self, event: Admitted | Burst | Finished) -> Record:
        return self.records[event.request_id, event.choice]


def _names(event: Event) -> list[str]:
    """What an event counts as: its kind, and what of it a bar asks for."""
    names = [type(event).__name__]
    if isinstance(event, DrafterOff):
        names.append(f"DrafterOff, {event.reason}")
    if isinstance(event, Parked) and event.preempted:
        names.append("Parked, preempted")
    return names


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one floating-point type hold the same bits."""
    return one.shape == other.shape and torch.equal(bits(one), bits(other))


def bits(values: Tensor) -> Tensor:
    """The bits of float32 or bfloat16 values, as integers."""
    return values.view(torch.int32 if values.element_size() == 4 else torch.int16)
