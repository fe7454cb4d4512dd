"""`burstline bench cache`: what the prefix cache saves agents, against other ways to cache, and what it costs.

The engine serves the trace prompt by prompt, with and without speculation, and with a small device pool over a host tier;
the other caches are replayed on the same trace (`replay`), ours too, which must agree with the engine token by token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.bench.agents import Ask, trace
from services.bench.load import cpu_seconds
from services.bench.prefixes import common_prefix, reusable, stable_floor
from services.bench.replay import AttentionOnly, Hybrid, NoCache, PromptEnds, play, request_of
from services.bench.stall import bars as stall_bars
from services.bench.stall import run_stall
from services.gpu_worker.engine.cache.evict import POLICIES
from services.gpu_worker.engine.cache.prices import Prices
from services.gpu_worker.engine.config import BLOCK_ROWS, EngineConfig
from services.gpu_worker.engine.events import Burst
from services.gpu_worker.engine.models.loader import LoadedModel
from services.prove.driver import Driver, WatchedEngine
from shared.clock import SYSTEM
from shared.errors import EngineFault
from shared.evidence import Bar

SPECULATION_K: Final = 3
ROOMY: Final = (768, 512)
"""Blocks and snapshots that hold the whole trace."""
TIGHT: Final = (240, 72)
"""About a third of that."""
TTFT_REPEATS: Final = 9
MIN_SERVED: Final = 0.90
MIN_TTFT_RATIO: Final = 7.0
MAX_EXTRA_WORK: Final = BLOCK_ROWS - 1

Results = dict[str, Any]
Took = tuple[float, float]
"""Seconds of the clock, and of the processor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """A trace that an engine served."""

    served: list[int]  #: cached tokens of each prompt
    streams: list[tuple[int, ...]]
    cache_bytes: int  #: that the cache held at the end, host tier included
    cached_tokens: int  #: KV rows that it held for them
    mismatches: int
    spilled: int


def serve(
    model: LoadedModel, asks: Sequence[Ask], *, k: int, pools: tuple[int, int], host_bytes: int = 0
) -> Played:
    """Serve a trace with a fresh engine, one prompt after another, captures granted."""
    engine = _engine(model, pools, host_bytes)
    driver = Driver(engine)
    for number, ask in enumerate(asks):
        driver.run([request_of(ask, f"ask-{number}", speculation_k=k)])
    engine.check()
    records = [driver.records[f"ask-{number}", 0] for number in range(len(asks))]
    stats, prices = engine.stats(), Prices.of(engine.dims)
    states = sum(1 for entry in engine._cache.tree.entries() if entry.kept)
    rows = len(engine._cache.tree)
    return Played(
        served=[record.cached_tokens for record in records],
        streams=[tuple(record.tokens) for record in records],
        cache_bytes=prices.size(rows, states),
        cached_tokens=rows * BLOCK_ROWS,
        mismatches=stats.mismatches,
        spilled=stats.spilled,
    )


def first_token(model: LoadedModel, asks: Sequence[Ask], *, repeats: int = TTFT_REPEATS) -> Results:
    """Time to the first token of the longest prompt: cold, and after the prompt before it; interleaved.

    Other load on the machine only ever adds to a time, so a ratio is that of the best times; medians are told beside. The
    ratio in processor time is the one that a busy machine leaves alone: one thread computes, so on a quiet one they agree.
    """
    longest = max(range(len(asks)), key=lambda index: len(asks[index].tokens))
    ask, prices = asks[longest], Prices.of(model.dims)
    before = max(
        (a for a in asks[:longest] if a.tenant == ask.tenant),
        key=lambda other: common_prefix(other.tokens, ask.tokens),
    )
    cold: list[Took] = []
    warm: list[Took] = []
    cached = 0
    for _ in range(repeats):
        driver = Driver(_engine(model, ROOMY, 0))
        cold.append(_ttft(driver, ask, "cold", use_cache=False))
        driver.run([request_of(before, "before")])
        warm.append(_ttft(driver, ask, "warm"))
        cached = driver.records["warm", 0].cached_tokens
    walls, cpus = ([[took[kind] for took in arm] for arm in (cold, warm)] for kind in (0, 1))
    return {
        "prompt_tokens": len(ask.tokens),
        "cached_tokens": cached,
        "cold_seconds": _times(walls[0]),
        "warm_seconds": _times(walls[1]),
        "cold_cpu_seconds": _times(cpus[0]),
        "warm_cpu_seconds": _times(cpus[1]),
        "cold_over_warm": round(min(walls[0]) / min(walls[1]), 2),
        "cold_over_warm_in_cpu": round(min(cpus[0]) / min(cpus[1]), 2),
        "entry_bytes": prices.size(cached // BLOCK_ROWS, 1),
    }


def run_cache(
    model: LoadedModel,
    *,
    asks: Sequence[Ask] | None = None,
    repeats: int = TTFT_REPEATS,
    report: Callable[[str], None] = lambda _: None,
) -> Results:
    """All figures; `asks` = another trace than the whole one, `repeats` of the times to the first token."""
    asks = asks or trace()
    report(f"{len(asks)} prompts")
    prices, needs = Prices.of(model.dims), reusable(asks)
    tier = prices.size(*ROOMY)
    arms = _arms(model, asks, tier, report)
    plain, spec, tiered = arms.values()
    attention = AttentionOnly(ROOMY[0])
    replayed = _replays(asks, attention, prices)
    policies = {
        name: play(asks, Hybrid(pools=TIGHT, prices=prices, policy=policy))
        for name, policy in POLICIES.items()
    }
    report("other caches")
    floors, lengths = stable_floor(asks), [len(ask.tokens) for ask in asks]
    extra = [floor - got for got, floor in zip(plain.served, floors, strict=True)]
    return {
        "trace": {
            "prompts": len(asks),
            "tokens": sum(lengths),
            "longest": max(lengths),
            "reusable": sum(needs),
        },
        "served": {name: _figures(lengths, needs, got) for name, got in replayed.items()}
        | {name: _figures(lengths, needs, played.served) for name, played in arms.items()},
        "attention_rows_matched_but_useless": attention.matched,
        "policies_in_small_pools": {name: _figures(lengths, needs, got) for name, got in policies.items()},
        "pools": {"roomy": ROOMY, "tight": TIGHT, "host_tier_bytes": tier},
        "work_beyond_new_tokens": {"median": statistics.median(extra), "max": max(extra)},
        "first_token": first_token(model, asks, repeats=repeats),
        "stall": run_stall(model, report=report),
        "bytes": {
            "kv_bytes_per_token": prices.block_bytes // BLOCK_ROWS,
            "state_bytes": prices.state_bytes,
            "cache_bytes_per_cached_token": round(plain.cache_bytes / plain.cached_tokens, 1),
            "cache_bytes": plain.cache_bytes,
        },
        "host_tier": {"spilled": tiered.spilled, "mismatches": tiered.mismatches},
        "differences": {
            "streams_by_speculation": _unequal(plain.streams, spec.streams),
            "streams_by_host_tier": _unequal(spec.streams, tiered.streams),
            "hits_by_speculation": _unequal(plain.served, spec.served),
            "hits_engine_against_replay": _unequal(plain.served, replayed["ours"]),
        },
    }


def _arms(
    model: LoadedModel, asks: Sequence[Ask], tier: int, report: Callable[[str], None]
) -> dict[str, Played]:
    """The trace through the engine: plain, speculating, and that in small pools over a host tier of `tier` bytes."""
    arms: dict[str, Played] = {}
    for name, k, pools, host in (
        ("engine, no speculation", 0, ROOMY, 0),
        (f"engine, speculation K={SPECULATION_K}", SPECULATION_K, ROOMY, 0),
        ("engine, small device and host tier", SPECULATION_K, TIGHT, tier),
    ):
        arms[name] = serve(model, asks, k=k, pools=pools, host_bytes=host)
        report(name)
    return arms


def _replays(asks: Sequence[Ask], attention: AttentionOnly, prices: Prices) -> dict[str, list[int]]:
    """The trace against caches alone: cached tokens of each prompt."""
    return {
        "no cache": play(asks, NoCache()),
        "attention-only LRU": play(asks, attention),
        "prompt-end checkpoints": play(asks, PromptEnds(pools=ROOMY, prices=prices)),
        "ours": play(asks, Hybrid(pools=ROOMY, prices=prices)),
    }


def bars(results: Mapping[str, Any]) -> list[Bar]:
    """What must hold."""
    served = results["served"]
    shares = [figures["share_of_reusable"] for name, figures in served.items() if name.startswith("engine")]
    names = ("without speculation", "with speculation", "through the host tier")
    told = [
        Bar.at_least(f"reusable tokens served {name}", share, MIN_SERVED, "of reusable tokens")
        for name, share in zip(names, shares, strict=True)
    ]
    told.append(
        Bar.at_least(
            "processor time to first token, cold over warm",
            results["first_token"]["cold_over_warm_in_cpu"],
            MIN_TTFT_RATIO,
            "times",
        )
    )
    told.append(
        Bar.at_most(
            "work of a turn beyond its tokens after the last stable boundary",
            results["work_beyond_new_tokens"]["max"],
            MAX_EXTRA_WORK,
            "tokens",
        )
    )
    told += [
        Bar.at_most(name.replace("_", " "), count, 0, "prompts")
        for name, count in results["differences"].items()
    ]
    told.append(Bar.at_most("host tier mismatches", results["host_tier"]["mismatches"], 0, "copies"))
    return told + stall_bars(results["stall"])


def _figures(lengths: Sequence[int], needs: Sequence[int], served: Sequence[int]) -> dict[str, Any]:
    """`needed` = tokens that no earlier prompt of the tenant had; `computed` = tokens that were primed."""
    total, hits = sum(lengths), sum(min(s, n) for s, n in zip(served, needs, strict=True))
    return {
        "needed": total - sum(needs),
        "computed": total - sum(served),
        "served": sum(served),
        "share_of_reusable": round(hits / sum(needs), 4),
        "share_of_prompts": round(sum(served) / total, 4),
        "computed_per_prompt": round((total - sum(served)) / len(lengths), 1),
    }


def _unequal(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def _engine(model: LoadedModel, pools: tuple[int, int], host_bytes: int) -> WatchedEngine:
    config = EngineConfig(
        num_blocks=pools[0],
        num_slots=1,
        num_snapshots=pools[1],
        max_batch=1,
        prefill_chunk=512,
        max_context=model.dims.max_positions,
        host_tier_bytes=host_bytes,
    )
    engine = WatchedEngine(config, model)
    engine.watching = False
    return engine


def _ttft(driver: Driver, ask: Ask, name: str, **fields: bool) -> Took:
    """From the lookup to the first burst."""
    request = request_of(ask, name, **fields)
    began, used = SYSTEM.monotonic_ns(), cpu_seconds()
    took: Took | None = None
    driver.submit(request)
    while driver.engine.has_work():
        events = driver.step()
        if took is None and any(isinstance(event, Burst) for event in events):
            took = (SYSTEM.monotonic_ns() - began) / 1e9, cpu_seconds() - used
    if took is None:
        raise EngineFault("a prompt was not answered")
    return took


def _times(seconds: Sequence[float]) -> dict[str, float]:
    return {"best": round(min(seconds), 4), "median": round(statistics.median(seconds), 4)}
