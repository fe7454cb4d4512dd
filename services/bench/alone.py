"""One engine that answers prompts one at a time, with whatever drafter, and counts what each answer took."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from services.bench.counts import Counts
from services.bench.held_out import Prompt
from services.bench.load import BURST_ROUNDS, CONTEXT, cpu_seconds
from services.gpu_worker.engine.config import BLOCK_ROWS, EngineConfig
from services.gpu_worker.engine.events import Burst, FinishReason
from services.gpu_worker.engine.gain import Pace
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from services.gpu_worker.engine.trials import measured
from services.prove.axes import POLICIES, Drafting
from services.prove.driver import WHOLE, Driver, WatchedEngine
from shared.clock import SYSTEM
from shared.errors import EngineFault
from shared.protocol.chain import chain

COLUMNS: Final = 8
"""Of the widest verify."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What one stream said, its stop id among it, and what it took."""

    tokens: tuple[int, ...]
    counts: Counts


class Streams:
    """One engine that answers prompts alone, with whatever drafter, without any gate."""

    def __init__(self, model: LoadedModel, budget: int) -> None:
        self._model, self._budget = model, budget
        config = EngineConfig(
            num_blocks=3 * CONTEXT // BLOCK_ROWS,
            num_slots=1,
            num_snapshots=8,
            max_batch=1,
            max_context=CONTEXT,
            max_verify=COLUMNS,
        )
        self._engine = WatchedEngine(config, model, limits=POLICIES["always draft"].limits(BURST_ROUNDS))
        self._engine.watching = False
        self._driver = Driver(self._engine)

    def pace(self) -> Pace:
        """Launches of one stream in processor time, timed while nobody else has the slots."""
        engine, block = self._engine, self._engine.runner.block

        def reset(slot: int) -> None:
            engine.states.reset(slot)
            if block is not None:
                block.reset(slot)

        (pace,) = measured(engine.runner, batches=[1], columns=COLUMNS, reset=reset, timer=SYSTEM.thread_ns)
        return pace

    def tell(self, prompt: Prompt, name: str, drafting: Drafting) -> Told:
        """Answer a prompt. Its cached part is there from the second answer on. Raises EngineFault when it failed."""
        request = self._request(prompt, name, drafting)
        self._driver.submit(request)
        tokens, spent = 0, 0.0
        while self._engine.has_work():
            stats, began = self._engine.stats(), cpu_seconds()
            bursts = [event for event in self._driver.step() if isinstance(event, Burst)]
            if not stats.waiting and not stats.priming:
                spent += cpu_seconds() - began
                tokens += sum(len(burst.tokens) for burst in bursts)
        record = self._driver.records.pop(request.key)
        end = record.end
        if end.reason not in WHOLE:
            raise EngineFault(f"{name} ended with {end.reason}: {end.error_code}")
        stop = [end.stop_id] if end.reason is FinishReason.STOP and end.stop_id is not None else []
        return Told(
            tokens=(*record.tokens, *stop),
            counts=Counts(
                streams=1,
                rounds=end.telemetry.rounds,
                tokens=end.completion_tokens - 1,
                drafted_at=end.telemetry.drafted_at,
                accepted_at=end.telemetry.accepted_at,
                timed_tokens=tokens,
                seconds=spent,
            ),
        )

    def forget(self) -> None:
        """Evict what was cached. Raises EngineFault when memory was not given back (C6)."""
        self._driver.clear()

    def _request(self, prompt: Prompt, name: str, drafting: Drafting) -> GenerateRequest:
        root = hashlib.sha256(repr(prompt.tokens).encode()).digest()
        return GenerateRequest(
            request_id=name,
            root=root,
            tokens=prompt.tokens,
            chain=chain(root, prompt.tokens),
            sampling=SamplingParams(seed=0, temperature=0.0),
            max_tokens=self._budget,
            stop_ids=self._model.eos_ids,
            **drafting.fields(),
        )
