"""What is asked in a benchmark, and one measured pass of an engine over it.

The prompts share their system prompt, so a pass starts with that in the prefix cache. Streams end by themselves or at
the budget; when one ends the next begins, so that the batch stays full until the last ones run out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from services.bench.figures import Pass, by_position
from services.gpu_worker.engine.batch import VerifyRows
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.requests import Burst, EngineLimits, GenerateRequest, SamplingParams
from services.gpu_worker.engine.runner import ModelRunner
from services.prove.axes import Drafting
from services.prove.driver import Driver, WatchedEngine
from services.prove.prompts import CONVERT, chat_tokens
from shared.clock import SYSTEM
from shared.protocol.chain import chain

ROOT: Final = bytes(32)
MAX_TOKENS: Final = 96
CONTEXT: Final = 1024
BURST_ROUNDS: Final = 8
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
    """One way to decode. `gated`: the engine's own gate shortens drafts that do not pay; otherwise K is always drafted."""

    drafting: Drafting
    gated: bool = False


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


class _Counted:
    """A runner that counts its trunk forwards of decode."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.forwards = 0

    def verify(self, rows: list[VerifyRows]) -> object:
        self.forwards += 1
        return self._runner.verify(rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def measure(model: LoadedModel, load: Load, arm: Arm) -> Pass:
    """Run a load once on a fresh engine whose cache holds the shared prefix."""
    engine = _engine(model, load.batch, arm)
    counted = _Counted(engine.runner)
    engine.runner = cast("ModelRunner", counted)
    requests = load.requests(arm.drafting, model.eos_ids)
    _warm(engine, requests)
    driver = Driver(engine)
    counted.forwards, began = 0, SYSTEM.monotonic_ns()
    for request in requests:
        driver.submit(request)
    spans: set[tuple[int, int]] = set()
    tokens = 0
    while engine.has_work():
        for event in driver.step():
            if isinstance(event, Burst):
                spans.add((event.start_ns, event.end_ns))
                tokens += len(event.tokens)
    wall_ns = SYSTEM.monotonic_ns() - began
    records = [driver.records[request.key] for request in requests]
    told = [record.end.telemetry for record in records]
    return Pass(
        streams=tuple(tuple(record.tokens) for record in records),
        decode_tokens=tokens,
        decode_seconds=sum(end - start for start, end in spans) / 1e9,
        wall_seconds=wall_ns / 1e9,
        forwards=counted.forwards,
        rounds=sum(one.rounds for one in told),
        drafted_at=by_position([one.drafted_at for one in told]),
        accepted_at=by_position([one.accepted_at for one in told]),
    )


def _engine(model: LoadedModel, batch: int, arm: Arm) -> WatchedEngine:
    config = EngineConfig(
        num_blocks=(batch + 2) * CONTEXT // 64 + 64,
        num_slots=batch,
        num_snapshots=64,
        max_batch=batch,
        prefill_chunk=512,
        max_context=CONTEXT,
    )
    limits = EngineLimits(
        burst_rounds=BURST_ROUNDS,
        busy_burst_rounds=2,
        draft_cost=EngineLimits().draft_cost if arm.gated else 0.0,
    )
    engine = WatchedEngine(config, model, limits=limits)
    engine.watching = False
    return engine


def _warm(engine: WatchedEngine, requests: list[GenerateRequest]) -> None:
    """Prime every prompt once, so that the measured pass restores what it can."""
    driver = Driver(engine)
    for number, request in enumerate(requests[: len(QUESTIONS)]):
        driver.run([_plain(request, number)])


def _plain(request: GenerateRequest, number: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"warm-{number}",
        root=request.root,
        tokens=request.tokens,
        chain=request.chain,
        sampling=RULES["greedy"],
        max_tokens=1,
    )


def _messages(question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
