"""Plain decode of a shape through the whole engine on a card: scheduler, sessions, picks told, blocks grown, all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from services.bench.card import blocks_for
from services.bench.card_record import Row, ignored
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import Burst
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from shared.clock import SYSTEM
from shared.evidence import Bar
from shared.protocol.chain import chain

ROOT: Final = bytes(32)
PROMPT: Final = 512
TOKENS: Final = 65
ADDED_LIMIT_MS: Final = 0.3


def run_card_engine(loaded: LoadedModel, batches: Sequence[int], *, row: Row = ignored) -> dict[str, Any]:
    """Milliseconds a round of `batch` greedy streams, those of it in which the host did not wait for the card, and the
    streams' tokens a second."""
    results: dict[str, Any] = {}
    for batch in batches:
        decoded = _decode(loaded, batch)
        rounds = decoded.tokens / batch
        results[f"batch {batch}"] = {
            "round_ms": round(decoded.seconds / rounds * 1e3, 3),
            "host_ms": round((decoded.seconds - decoded.waited) / rounds * 1e3, 4),
            "tokens_per_s": round(decoded.tokens / decoded.seconds, 1),
        }
        row(f"batch {batch}", results[f"batch {batch}"])
    return results


@dataclass(slots=True)
class Decoded:
    """What was decoded, and how long it took; `waited` = seconds in which the host stood at an event of the card."""

    seconds: float = 0.0
    waited: float = 0.0
    tokens: int = 0


@contextmanager
def _waits(of: Decoded) -> Iterator[None]:
    """Counts what passes in `Event.synchronize`, where a round is waited for."""
    plain = torch.cuda.Event.synchronize

    def watched(event: torch.cuda.Event) -> None:
        began = SYSTEM.monotonic_ns()
        plain(event)
        of.waited += (SYSTEM.monotonic_ns() - began) / 1e9

    torch.cuda.Event.synchronize = watched  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.cuda.Event.synchronize = plain  # type: ignore[method-assign]


def _decode(loaded: LoadedModel, batch: int) -> Decoded:
    """All rounds but the first burst's, whose sizes are captured then."""
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
    decoded = Decoded()
    with _waits(decoded):
        _rounds(engine, batch, decoded)
    return decoded


def _rounds(engine: Engine, batch: int, decoded: Decoded) -> None:
    """Until the first stream ends. What was waited for after the last whole burst does not count."""
    began = SYSTEM.monotonic_ns()
    while engine.has_work():
        waited = decoded.waited
        bursts = [event for event in engine.step() if isinstance(event, Burst)]
        if len(bursts) < batch:
            decoded.waited = waited
            return
        decoded.tokens += sum(len(burst.tokens) for burst in bursts)
        decoded.seconds = (SYSTEM.monotonic_ns() - began) / 1e9


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


def bars(engine: dict[str, Any], steps: dict[str, Any]) -> list[Bar]:
    """What of the host's work the card waits for: a round of the whole engine against its graph alone."""
    if "batch 1" not in engine or "1 x 1" not in steps:
        return []
    added = engine["batch 1"]["round_ms"] - steps["1 x 1"]["graph_ms"]
    return [Bar.at_most("what the engine adds to a step, batch 1", round(added, 3), ADDED_LIMIT_MS, "ms")]
