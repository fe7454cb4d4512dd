"""Helpers for tests of the engine: a tiny random model, requests, and a worker's loop without a queue or a broker."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import Admitted, Burst, Captured, Event, Finished, TokenLogprob
from services.gpu_worker.engine.faults import Faults
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.models.loader import LoadedModel, load_model
from services.gpu_worker.engine.models.random import write_random_model
from services.gpu_worker.engine.models.random_dense import dense_hf_config, write_random_dense
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from shared.clock import ManualClock
from shared.protocol.chain import chain

ROOT = b"\x07" * 32
GREEDY = SamplingParams(seed=0, temperature=0.0)
WARM = SamplingParams(seed=1234, temperature=0.9)
"""Sampled, with enough noise that two seeds differ."""


@cache
def tiny_model(with_mtp: bool = True, seed: int = 0) -> LoadedModel:
    """A random model that runs a forward in about a millisecond; loaded once a process."""
    with tempfile.TemporaryDirectory() as folder:
        return load_model(write_random_model(Path(folder) / "model", seed=seed, with_mtp=with_mtp))


@cache
def window_model() -> LoadedModel:
    """The same with three sliding layers and a full one; a window is a block and a half."""
    with tempfile.TemporaryDirectory() as folder:
        return load_model(write_random_dense(Path(folder), dense_hf_config("gemma3_text"), seed=7))


def build(
    *,
    limits: EngineLimits | None = None,
    model: LoadedModel | None = None,
    faults: Faults | None = None,
    **sizes: int,
) -> Engine:
    """An engine with small pools."""
    config: dict[str, int] = {
        "num_blocks": 64,
        "num_slots": 8,
        "num_snapshots": 8,
        "prefill_chunk": 128,
        "max_context": 1024,
    }
    sized = EngineConfig(**(config | sizes))
    return Engine(sized, model or tiny_model(), limits=limits, clock=ManualClock(), faults=faults)


def prompt(length: int, seed: int = 0, vocab: int = 500) -> tuple[int, ...]:
    """Reproducible ids above the special ones."""
    draw = random.Random(seed)
    return tuple(draw.randrange(3, vocab) for _ in range(length))


def request(
    tokens: Sequence[int], name: str = "r", *, root: bytes = ROOT, max_tokens: int = 12, **fields: Any
) -> GenerateRequest:
    """A request with its chain keys; greedy unless told otherwise."""
    fields.setdefault("sampling", GREEDY)
    return GenerateRequest(
        request_id=name,
        root=root,
        tokens=tuple(tokens),
        chain=chain(root, tokens),
        max_tokens=max_tokens,
        **fields,
    )


@dataclass
class Outcome:
    """What one stream gave."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    bursts: list[Burst] = field(default_factory=list)
    captured: list[Captured] = field(default_factory=list)
    cached_tokens: int = 0
    finished: Finished | None = None

    @property
    def end(self) -> Finished:
        assert self.finished is not None, "the stream has no end"
        return self.finished


class Driver:
    """Plays the worker: looks up, submits, steps, answers captures and makes room."""

    def __init__(self, engine: Engine, grant: Callable[[Captured], bool] = lambda _: True) -> None:
        self.engine = engine
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self.events: list[Event] = []
        self._grant = grant

    def submit(self, item: GenerateRequest) -> None:
        if item.use_cache:
            self.engine.lookup(item.request_id, item.root, item.tokens, item.chain, item.labels)
        self.engine.submit(item)
        self.outcomes[item.key] = Outcome()

    def step(self) -> list[Event]:
        events = self.engine.step()
        for event in events:
            self._note(event)
        self.events.extend(events)
        pressure = self.engine.pressure()
        if pressure:
            self.engine.evict(self.engine.eviction_candidates(pressure.blocks, pressure.snapshots))
        return events

    def run(
        self, items: Iterable[GenerateRequest] = (), *, most: int = 2000
    ) -> dict[tuple[str, int], Outcome]:
        """Submit and step until nothing is left."""
        for item in items:
            self.submit(item)
        for _ in range(most):
            if not self.engine.has_work():
                return self.outcomes
            self.step()
        raise AssertionError("the engine does not come to an end")

    def _note(self, event: Event) -> None:
        match event:
            case Admitted():
                self._of(event).cached_tokens = event.cached_tokens
            case Burst():
                outcome = self._of(event)
                outcome.bursts.append(event)
                outcome.tokens.extend(event.tokens)
                outcome.logprobs.extend(event.logprobs or ())
            case Captured():
                for (name, _), outcome in self.outcomes.items():
                    if name == event.request_id:
                        outcome.captured.append(event)
                if self._grant(event):
                    self.engine.publish(event.capture_id)
                else:
                    self.engine.discard(event.capture_id)
            case Finished():
                self._of(event).finished = event
            case _:
                pass

    def _of(self, event: Admitted | Burst | Finished) -> Outcome:
        return self.outcomes[event.request_id, event.choice]


def run_one(engine: Engine, item: GenerateRequest) -> Outcome:
    """One request alone, captures granted."""
    return Driver(engine).run([item])[item.key]


def baseline(engine: Engine) -> None:
    """Nothing is owned: every block, slot and snapshot is free or cached (C6)."""
    engine.check()
    stats = engine.stats()
    for counts in (stats.blocks, stats.slots, stats.snapshots):
        assert counts.balanced
        assert counts.owned == 0


def cold(tokens: Sequence[int], **fields: Any) -> list[int]:
    """What a request says alone, without the cache, in an engine of its own."""
    return run_one(build(), request(tokens, "cold", use_cache=False, **fields)).tokens
