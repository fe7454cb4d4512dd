"""What is asked in a benchmark, and one measured pass of an engine over it.

The prompts share their system prompt, so a pass starts with that in the prefix cache. Streams end by themselves or at
the budget; when one ends the next begins, so that the batch stays full until the last ones run out.
"""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from services.bench.figures import Pass, by_position
from services.gpu_worker.engine.config import BLOCK_ROWS, EngineConfig
from services.gpu_worker.engine.events import Burst
from services.gpu_worker.engine.faults import Faults, Phase, StreamKey
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from services.prove.axes import Drafting, Policy
from services.prove.driver import Driver, WatchedEngine
from services.prove.prompts import CONVERT, chat_tokens
from shared.clock import SYSTEM
from shared.protocol.chain import chain

ROOT: Final = bytes(32)
MAX_TOKENS: Final = 96
CONTEXT: Final = 1024
BURST_ROUNDS: Final = 8
SHARED_BLOCKS: Final = 64
"""For the prompts that are cached before a pass."""
SYSTEM_PROMPT: Final = "You are the Burstline help desk. Answer in one or two sentences. Use a tool when one fits, and quote its result."
QUESTIONS: Final = (
    "What is Burstline?",
    "What does the gateway do?",
    "Tell me about the worker.",
    "What is the cache broker for?",
    "What is a burst?",
    "How does a round work?",
    "What is a drafter?",
    "Explain the trunk.",
    "What is the MTP head?",
    "What is a boundary capture?",
    "What is a prefix entry?",
    "Convert 5 km to miles.",
    "Convert 12 feet to m.",
    "What is a chain key?",
    "How do the gateway and the worker talk?",
    "Which database does the broker use?",
)
RULES: Final[Mapping[str, SamplingParams]] = {
    "greedy": SamplingParams(seed=0, temperature=0.0),
    "sampled": SamplingParams(seed=7, temperature=1.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to decode. `policy` says when the engine may draft less than asked."""

    drafting: Drafting
    policy: Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """`batch` streams at once, twice as many (at least eight) in all."""

    rule: str
    batch: int

    def requests(self, drafting: Drafting, stop_ids: frozenset[int]) -> list[GenerateRequest]:
        """The same questions for every drafter; seeds differ by stream."""
        return [self._request(number, drafting, stop_ids) for number in range(max(8, 2 * self.batch))]

    def _request(self, number: int, drafting: Drafting, stop_ids: frozenset[int]) -> GenerateRequest:
        question = QUESTIONS[number % len(QUESTIONS)]
        tokens = chat_tokens(_messages(question), tools=[CONVERT])
        rule = RULES[self.rule]
        return GenerateRequest(
            request_id=f"stream-{number}",
            root=ROOT,
            tokens=tokens,
            chain=chain(ROOT, tokens),
            sampling=replace(rule, seed=rule.seed + number),
            max_tokens=MAX_TOKENS,
            stop_ids=stop_ids,
            **drafting.fields(),
        )


class _Forwards(Faults):
    """Breaks nothing: counts the trunk forwards of decode."""

    def __init__(self) -> None:
        self.count = 0

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        self.count += phase == "verify"


def measure(model: LoadedModel, load: Load, arm: Arm) -> Pass:
    """Run a load once on a fresh engine whose cache holds the shared prefix; never more than `batch` are in the engine.

    Steps that prime are left out of the processor time: it is of decode alone.
    """
    forwards = _Forwards()
    engine = _engine(model, load.batch, arm.policy, forwards)
    requests = load.requests(arm.drafting, model.eos_ids)
    _warm(engine, requests)
    driver, queue = Driver(engine), deque(requests)
    forwards.count, began = 0, SYSTEM.monotonic_ns()
    spans: set[tuple[int, int]] = set()
    tokens, cpu_tokens, spent = 0, 0, 0.0
    while queue or engine.has_work():
        stats = engine.stats()
        for _ in range(load.batch - stats.waiting - stats.priming - stats.decoding):
            if queue:
                driver.submit(queue.popleft())
        stats = engine.stats()
        started = cpu_seconds()
        bursts = [event for event in driver.step() if isinstance(event, Burst)]
        told = sum(len(burst.tokens) for burst in bursts)
        tokens += told
        if not stats.waiting and not stats.priming:
            spent += cpu_seconds() - started
            cpu_tokens += told
        spans.update((burst.start_ns, burst.end_ns) for burst in bursts)
    records = [driver.records[request.key] for request in requests]
    counters = [record.end.telemetry for record in records]
    return Pass(
        streams=tuple(tuple(record.tokens) for record in records),
        decode_tokens=tokens,
        decode_seconds=sum(end - start for start, end in spans) / 1e9,
        cpu_rate=cpu_tokens / spent,
        wall_seconds=(SYSTEM.monotonic_ns() - began) / 1e9,
        forwards=forwards.count,
        rounds=sum(one.rounds for one in counters),
        drafted_at=by_position([one.drafted_at for one in counters]),
        accepted_at=by_position([one.accepted_at for one in counters]),
    )


def cpu_seconds() -> float:
    """Processor time of this process: what other processes take of the machine is not in it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _engine(model: LoadedModel, batch: int, policy: Policy, forwards: _Forwards) -> WatchedEngine:
    config = EngineConfig(
        num_blocks=(batch + 2) * CONTEXT // BLOCK_ROWS + SHARED_BLOCKS,
        num_slots=batch,
        num_snapshots=SHARED_BLOCKS,
        max_batch=batch,
        prefill_chunk=512,
        max_context=CONTEXT,
    )
    engine = WatchedEngine(config, model, limits=policy.limits(BURST_ROUNDS), faults=forwards)
    engine.watching = False
    return engine


def _warm(engine: WatchedEngine, requests: list[GenerateRequest]) -> None:
    """Capture what all prompts begin with, so that the measured pass primes their ends alone."""
    prompts = [request.tokens for request in requests]
    shared = next(
        (place for place, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1),
        min(map(len, prompts)),
    )
    first = requests[0]
    warm = replace(
        first, request_id="warm", max_tokens=1, ckpt_at=shared, speculation_k=0, stop_ids=frozenset()
    )
    Driver(engine).run([warm])


def _messages(question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
