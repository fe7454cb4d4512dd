"""`burstline bench prefill --device cuda`: prompts of a shape on a card, through the engine, cold and again.

What is timed is what a client waits for: from `submit` to the first token told, prefix cache, captures and all. A cold
prompt is one that nobody asked before; again means the same one, from the entries that the first time left.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from services.bench.card import blocks_for, prompt_flops
from services.bench.card_record import Row, ignored
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import Admitted, Burst, Captured, Finished
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from shared.clock import SYSTEM
from shared.errors import EngineFault
from shared.evidence import Bar
from shared.protocol.chain import chain

ROOT: Final = bytes(32)
COLD_LIMIT_S: Final = {8192: 0.95, 24576: 2.9}
AGAIN_LIMIT_S: Final = 0.06
CACHED_LEAST: Final = 8128
CAPTURE_LIMIT: Final = 1.01
FREE_LEAST: Final = 0.85
REPEATS: Final = 3
SHORT: Final = 512
"""Tokens of the prompt that is asked first, so that compilation is over before anything is timed."""


@dataclass
class Asker:
    """One engine and prompts that never repeat unless asked again."""

    loaded: LoadedModel
    longest: int
    chunk: int
    room: int
    """Prompts of the longest length that the cache holds."""
    host_bytes: int = 0
    engine: Engine = field(init=False)
    _asked: int = 0

    def __post_init__(self) -> None:
        context = self.longest + 128
        config = EngineConfig(
            num_blocks=self.room * blocks_for(context),
            num_slots=4,
            num_snapshots=4 * self.room,
            max_batch=4,
            max_verify=4,
            prefill_chunk=self.chunk,
            max_context=context,
            host_tier_bytes=self.host_bytes,
        )
        self.engine = Engine(config, self.loaded)

    def prompt(self, length: int) -> tuple[int, ...]:
        """Fresh ids."""
        self._asked += 1
        vocab, first = self.loaded.dims.vocab, self._asked * 104_729
        return tuple((first + 7919 * i + i * i) % vocab for i in range(length))

    def ask(self, tokens: tuple[int, ...], *, k: int = 0, use_cache: bool = True) -> tuple[float, int]:
        """Seconds to the first token, and how many tokens came from the cache."""
        name = f"ask-{SYSTEM.monotonic_ns()}"
        keys = tuple(chain(ROOT, tokens))
        request = GenerateRequest(
            request_id=name,
            root=ROOT,
            tokens=tokens,
            chain=keys,
            sampling=SamplingParams(seed=0, temperature=0.0),
            max_tokens=1 if k == 0 else 1 + k,
            use_cache=use_cache,
            speculation_k=k,
        )
        torch.cuda.synchronize()
        began = SYSTEM.monotonic_ns()
        if use_cache:
            self.engine.lookup(name, ROOT, tokens, keys)
        self.engine.submit(request)
        return self._run(began)

    def _run(self, began: int) -> tuple[float, int]:
        first, cached = 0.0, 0
        while self.engine.has_work():
            for event in self.engine.step():
                match event:
                    case Admitted():
                        cached = event.cached_tokens
                    case Burst() if not first:
                        first = (SYSTEM.monotonic_ns() - began) / 1e9
                    case Captured():
                        self.engine.publish(event.capture_id)
                    case Finished() if event.reason == "error":
                        raise EngineFault(f"a prompt of the benchmark ended with {event.detail}")
                    case _:
                        pass
        return first, cached


def run_card_prefill(
    loaded: LoadedModel,
    lengths: Sequence[int],
    *,
    chunk: int,
    row: Row = ignored,
) -> dict[str, Any]:
    """Cold, again, again with drafts, cold without captures; by prompt length."""
    asker = Asker(loaded, max(lengths), chunk, room=2 * REPEATS + 4)
    for k in (0, 3):
        asker.ask(asker.prompt(SHORT), k=k)
    results: dict[str, Any] = {}
    for length in lengths:
        asker.ask(asker.prompt(length))
        prompts = [asker.prompt(length) for _ in range(REPEATS)]
        cold = [asker.ask(prompt)[0] for prompt in prompts]
        bare = [asker.ask(asker.prompt(length), use_cache=False)[0] for _ in range(REPEATS)]
        again = [asker.ask(prompt) for prompt in prompts]
        drafting = [asker.ask(prompt, k=3) for prompt in prompts]
        flops = prompt_flops(loaded.dims, length)
        results[str(length)] = {
            "cold_s": round(statistics.median(cold), 4),
            "cold_tflops": round(flops / statistics.median(cold) / 1e12, 1),
            "cold_without_captures_s": round(statistics.median(bare), 4),
            "again_s": round(statistics.median(one for one, _ in again), 4),
            "again_cached": again[0][1],
            "again_mtp_s": round(statistics.median(one for one, _ in drafting), 4),
            "again_mtp_cached": drafting[0][1],
        }
        row(str(length), results[str(length)])
    return results


def bars(results: dict[str, Any]) -> list[Bar]:
    """The promises for the 27B shape."""
    told = []
    for length, limit in COLD_LIMIT_S.items():
        figures = results.get(str(length))
        if figures is not None:
            told.append(Bar.at_most(f"cold prompt of {length}", figures["cold_s"], limit, "s"))
            share = figures["cold_s"] / figures["cold_without_captures_s"]
            told.append(Bar.at_most(f"captures at {length}", round(share, 4), CAPTURE_LIMIT, "x"))
    again = results.get("8192")
    if again is not None:
        for name in ("again", "again_mtp"):
            told.append(Bar.at_most(f"8192 {name}", again[f"{name}_s"], AGAIN_LIMIT_S, "s"))
            told.append(Bar.at_least(f"8192 {name}: cached", again[f"{name}_cached"], CACHED_LEAST, "tokens"))
    return told


def free_bars(ours: dict[str, Any], free: dict[str, Any]) -> list[Bar]:
    """Speed of exact cold prompts over those of the same engine on cuBLAS as it comes."""
    return [
        Bar.at_least(
            f"exact over free cuBLAS, cold prompt of {length}",
            round(figures["cold_s"] / ours[length]["cold_s"], 3),
            FREE_LEAST,
            "x",
        )
        for length, figures in free.items()
    ]
