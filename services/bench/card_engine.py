"""Plain decode of a shape through the whole engine on a card: scheduler, sessions, picks told, blocks grown, all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from services.bench.card import blocks_for
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import Burst
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from shared.clock import SYSTEM
from shared.protocol.chain import chain

ROOT: Final = bytes(32)
PROMPT: Final = 512
TOKENS: Final = 65


def run_card_engine(
    loaded: LoadedModel, batches: Sequence[int], *, report: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Milliseconds a round of `batch` greedy streams, and their tokens a second."""
    results: dict[str, Any] = {}
    for batch in batches:
        seconds, tokens = _decode(loaded, batch)
        results[f"batch {batch}"] = {
            "round_ms": round(seconds / tokens * batch * 1e3, 3),
            "tokens_per_s": round(tokens / seconds, 1),
        }
        report(f"engine, batch {batch}: {results[f'batch {batch}']}")
    return results


def _decode(loaded: LoadedModel, batch: int) -> tuple[float, int]:
    """Seconds and tokens of all rounds but the first burst's, whose sizes are captured then."""
    context = PROMPT + 2 * TOKENS
    config = EngineConfig(
        num_blocks=batch * blocks_for(context + 64),
        num_slots=batch,
        num_snapshots=2,
        max_batch=batch,
        max_verify=4,
        prefill_chunk=4096,
        max_context=context,
    )
    engine = Engine(config, loaded, limits=EngineLimits(max_waiting=batch))
    engine.runner.prepare(0, lambda _: None)
    for number in range(batch):
        engine.submit(_request(number, loaded.dims.vocab))
    while engine.stats().waiting or engine.stats().priming:
        engine.step()
    engine.step()
    began, tokens, ended = SYSTEM.monotonic_ns(), 0, 0
    while engine.has_work():
        bursts = [event for event in engine.step() if isinstance(event, Burst)]
        if len(bursts) < batch:
            break
        tokens += sum(len(burst.tokens) for burst in bursts)
        ended = SYSTEM.monotonic_ns()
    return (ended - began) / 1e9, tokens


def _request(number: int, vocab: int) -> GenerateRequest:
    tokens = tuple((number * 104_729 + 7919 * i) % vocab for i in range(PROMPT))
    return GenerateRequest(
        request_id=f"stream-{number}",
        root=ROOT,
        tokens=tokens,
        chain=chain(ROOT, tokens),
        sampling=SamplingParams(seed=number, temperature=0.0),
        max_tokens=TOKENS,
        use_cache=False,
    )
