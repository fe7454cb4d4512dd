"""`bench soak`: random requests with random faults, cancels and preemptions; every stream right, every pool at its baseline.

A tiny random model in small pools: few kinds of requests, each known alone and cold beforehand, come again and again with
other drafters, cached prefixes and neighbours. What ends by itself must be its whole stream; what was cancelled or
refused must be a beginning of it. One kind of error is right: Overloaded, for a stream that was alone in more launches
that were made to fail than it is begun again (R-S8). Any other is a fault of the engine.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.events import Finished, FinishReason
from services.gpu_worker.engine.faults import Faults, OutOfMemory, Phase, StreamKey
from services.gpu_worker.engine.limits import EngineLimits, SpecGate
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from services.gpu_worker.engine.streams import MEMORY_RETRIES
from services.prove.driver import Driver, Record, WatchedEngine
from shared.errors import Overloaded
from shared.evidence import Bar
from shared.protocol.chain import chain

REQUESTS: Final = 10_000
TOGETHER: Final = 12
"""Requests that run or wait at once, at most."""
BLOCKS: Final = 14
HOST_BYTES: Final = 2**19
"""Both tiers together hold about half of what the kinds share, so that entries are evicted and made again."""
KINDS: Final = 24
TENANTS: Final = 3
SESSIONS: Final = 5
RULES: Final = (
    SamplingParams(seed=1, temperature=0.0),
    SamplingParams(seed=2, temperature=1.0),
    SamplingParams(seed=3, temperature=0.8, top_k=40, repetition_penalty=1.2),
)
WHOLE: Final = (FinishReason.STOP, FinishReason.LENGTH)

Results = dict[str, Any]


class Chance(Faults):
    """Things go wrong at random, each with its own probability."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.alone: Counter[str] = Counter()  #: failed launches that had one stream, by its request

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        if self._rng.random() < 0.01:
            if len(streams) == 1:
                self.alone[streams[0][0]] += 1
            raise OutOfMemory(f"a {phase} was made to fail")

    def demote(self, stream: StreamKey, rounds: int) -> bool:
        return self._rng.random() < 0.02

    def give_way(self, stream: StreamKey, rows: int) -> bool:
        return self._rng.random() < 0.02


class Soak:
    """One engine and what was asked of it."""

    def __init__(self, model: LoadedModel, seed: int) -> None:
        self._rng = random.Random(seed)
        self._model = model
        self._kinds = _kinds(self._rng, model.dims.vocab)
        self._truth = [self._alone(kind) for kind in self._kinds]
        self._chance = Chance(self._rng)
        self._driver = Driver(self._engine(self._chance))
        self._running: dict[str, int] = {}
        self.ends: Counter[str] = Counter()
        self.wrong = 0
        self.unexplained: list[str] = []  #: errors that nothing which went wrong explains

    def run(self, requests: int, report: Callable[[str], None]) -> None:
        """Ask so many requests, about `TOGETHER` at a time, and step until all have ended."""
        asked = 0
        while asked < requests or self._driver.engine.has_work():
            while asked < requests and len(self._running) < self._rng.randint(1, TOGETHER):
                self._ask(f"{asked}")
                asked += 1
                if asked % 1000 == 0:
                    report(f"{asked} requests")
            if self._running and self._rng.random() < 0.03:
                self._driver.engine.cancel(self._rng.choice(sorted(self._running)), "not wanted any more")
            self._driver.step()
            self._settle()

    def left(self) -> int:
        """Blocks, slots and snapshots that are not free once every entry is evicted and every parked turn forgotten; raises
        EngineFault on an unbalanced book."""
        self._driver.engine.forget_turns()
        self._driver.clear()
        stats = self._driver.engine.stats()
        return sum(counts.total - counts.free for counts in (stats.blocks, stats.slots, stats.snapshots))

    def results(self) -> Results:
        """What happened."""
        stats = self._driver.engine.stats()
        return {
            "ends": dict(sorted(self.ends.items())),
            "errors_unexplained": self.unexplained,
            "streams_that_differ": self.wrong,
            "preempted": stats.preempted,
            "set_aside_for_memory": stats.set_aside - stats.preempted,
            "events": dict(sorted(self._driver.happened.items())),
            "decoded": asdict(stats.decoded),
            "spilled": stats.spilled,
            "brought_back": stats.brought_back,
            "blocks": stats.blocks.total,
        }

    def _engine(self, faults: Faults | None) -> WatchedEngine:
        config = EngineConfig(
            num_blocks=BLOCKS,
            num_slots=TOGETHER,
            num_snapshots=6,
            max_batch=TOGETHER,
            prefill_chunk=128,
            max_context=512,
            host_tier_bytes=HOST_BYTES,
        )
        limits = EngineLimits(
            burst_rounds=3,
            decode_reserve=8,
            spec_gate=SpecGate(low=4, high=9),
            decode_ckpt_blocks=1,
            max_decoded=3,
        )
        engine = WatchedEngine(config, self._model, limits=limits, faults=faults)
        engine.watching = False
        return engine

    def _alone(self, kind: GenerateRequest) -> Record:
        driver = Driver(self._engine(None))
        driver.run([replace(kind, use_cache=False)])
        return driver.records[kind.key]

    def _ask(self, name: str) -> None:
        which = self._rng.randrange(len(self._kinds))
        cached = self._rng.random() < 0.9
        request = replace(
            self._kinds[which],
            request_id=name,
            use_cache=cached,
            drafter=self._rng.choice(("none", "mtp", "ngram")),
            speculation_k=self._rng.randrange(6),
            reuse="decode" if cached and self._rng.random() < 0.2 else "exact",
            labels=(f"session-{self._rng.randrange(SESSIONS)}",),
        )
        self._driver.submit(request)
        self._running[name] = which

    def _settle(self) -> None:
        """Judge and forget what has ended, so that memory does not grow with the run."""
        for name, which in list(self._running.items()):
            record = self._driver.records[name, 0]
            if record.finished is None:
                continue
            del self._running[name], self._driver.records[name, 0]
            truth, end = self._truth[which].tokens, record.end
            self.ends[end.error_code or end.reason.value] += 1
            expected = truth if end.reason in WHOLE else truth[: len(record.tokens)]
            self.wrong += record.tokens != expected
            failed_alone = self._chance.alone.pop(name, 0)
            if end.reason is FinishReason.ERROR and not _explained(end, failed_alone):
                self.unexplained.append(f"request {name}: {end.error_code}: {end.detail}")


def _explained(end: Finished, failed_alone: int) -> bool:
    """Whether the error is what a stream gets whose launches failed so many times while it was alone in them."""
    return end.error_code == Overloaded.code and failed_alone > MEMORY_RETRIES


def _kinds(rng: random.Random, vocab: int) -> list[GenerateRequest]:
    """Requests that share beginnings, of several tenants."""
    trunk = [rng.randrange(3, vocab) for _ in range(320)]
    kinds = []
    for number in range(KINDS):
        tail = [rng.randrange(3, vocab) for _ in range(rng.randint(1, 90))]
        tokens = tuple(trunk[: rng.choice((0, 64, 100, 192, 256))] + tail)
        root = hashlib.sha256(bytes([number % TENANTS])).digest()
        kinds.append(
            GenerateRequest(
                request_id=f"kind-{number}",
                root=root,
                tokens=tokens,
                chain=chain(root, tokens),
                sampling=rng.choice(RULES),
                max_tokens=rng.choice((1, 6, 16, 48)),
                stop_ids=frozenset({7, 8}),
            )
        )
    return kinds


def run_soak(
    model: LoadedModel,
    *,
    requests: int = REQUESTS,
    seed: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[Results, list[Bar]]:
    """The figures and what they have to be."""
    soak = Soak(model, seed)
    soak.run(requests, report)
    results = {"requests": requests, "seed": seed} | soak.results()
    results["left_in_pools"] = soak.left()
    return results, [
        Bar.at_most("blocks, slots and snapshots not given back", results["left_in_pools"], 0, "of all"),
        Bar.at_most("streams that differ", results["streams_that_differ"], 0, "streams"),
        Bar.zero("errors other than Overloaded after failures alone", len(soak.unexplained), "requests"),
        Bar.at_least("requests that ended", sum(soak.ends.values()), requests, "requests"),
        Bar.at_least("streams preempted", results["preempted"], 1, "streams"),
        Bar.at_least("streams set aside for memory", results["set_aside_for_memory"], 1, "streams"),
        Bar.at_least("requests cancelled", soak.ends["cancelled"], 1, "requests"),
    ]
