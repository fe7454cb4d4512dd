"""How long running streams wait while a long prompt primes beside them: the time between two deliveries of a stream.

Measured idle, while the prompt comes in chunks, and while it comes at once, which is what chunks are for. Between two
deliveries at most one chunk budget of prompt rows is primed, which is counted; times are of the processor, since other
work on the machine would be in wall time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from services.bench.figures import quantiles
from services.bench.load import cpu_seconds
from services.gpu_worker.engine.config import BLOCK_ROWS, EngineConfig
from services.gpu_worker.engine.events import Burst, Event, Primed
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from services.prove.driver import Driver, WatchedEngine
from shared.evidence import Bar
from shared.protocol.chain import chain

ROOT: Final = bytes(32)
STREAMS: Final = 4
SHORT: Final = 96
LONG: Final = 2600
"""Tokens of the prompts of those that run, and of the one that comes."""
MAX_TOKENS: Final = 400
IDLE_STEPS: Final = 16
CHUNKS: Final = (128, 512)
"""Chunk budgets; the last is the worker's own."""
MOST_OF_WHOLE: Final = 0.5
MOST_OVER_IDLE: Final = 6.0

Results = dict[str, Any]


class _Watch:
    """Gaps between the deliveries of each running stream, and the prompt rows primed within them."""

    def __init__(self, driver: Driver, names: Sequence[str]) -> None:
        self._driver = driver
        now, rows = cpu_seconds(), driver.engine.stats().prefill_tokens
        self._last = dict.fromkeys(names, (now, rows))
        self.seconds: list[float] = []
        self.rows: list[int] = []

    def step(self) -> list[Event]:
        """One step of the engine."""
        events = self._driver.step()
        now, rows = cpu_seconds(), self._driver.engine.stats().prefill_tokens
        for event in events:
            if isinstance(event, Burst) and event.request_id in self._last:
                then, primed = self._last[event.request_id]
                self._last[event.request_id] = now, rows
                self.seconds.append(now - then)
                self.rows.append(rows - primed)
        return events


def measure(model: LoadedModel, *, chunk: int, long: int = LONG) -> tuple[_Watch, _Watch]:
    """Deliveries while nothing primes, and while a prompt of `long` tokens does, `chunk` rows a step."""
    driver = Driver(_engine(model, chunk, long))
    names = [f"stream-{number}" for number in range(STREAMS)]
    for number, name in enumerate(names):
        driver.submit(_request(name, SHORT, number, MAX_TOKENS))
    while driver.engine.stats().decoding < STREAMS:
        driver.step()
    idle = _Watch(driver, names)
    for _ in range(IDLE_STEPS):
        idle.step()
    driver.submit(_request("long", long, STREAMS, 1))
    busy = _Watch(driver, names)
    while not any(isinstance(event, Primed) for event in busy.step()):
        pass
    return idle, busy


def run_stall(
    model: LoadedModel, *, long: int = LONG, report: Callable[[str], None] = lambda _: None
) -> Results:
    """All figures; milliseconds of processor time."""
    results: Results = {"streams": STREAMS, "prompt_tokens": long}
    whole = -(-long // BLOCK_ROWS) * BLOCK_ROWS
    for name, chunk in (*((f"chunk {chunk}", chunk) for chunk in CHUNKS), ("at once", whole)):
        idle, busy = measure(model, chunk=chunk, long=long)
        results[name] = {
            "idle_ms": quantiles([1e3 * gap for gap in idle.seconds]),
            "while_priming_ms": quantiles([1e3 * gap for gap in busy.seconds]),
            "deliveries_while_priming": len(busy.seconds),
            "most_rows_between_deliveries": max(busy.rows),
        }
        report(f"stall, {name}")
    return results


def bars(results: Results) -> list[Bar]:
    """Of the worker's own chunk budget."""
    budget = CHUNKS[-1]
    ours, whole = results[f"chunk {budget}"], results["at once"]
    longest = ours["while_priming_ms"]["max"]
    return [
        Bar.at_most(
            "prompt rows primed between two deliveries of a stream",
            ours["most_rows_between_deliveries"],
            budget,
            "rows",
        ),
        Bar.at_most(
            "longest wait of a stream beside a long prompt, over that beside the whole prompt at once",
            round(longest / whole["while_priming_ms"]["max"], 3),
            MOST_OF_WHOLE,
            "times",
        ),
        Bar.at_most(
            "longest wait of a stream beside a long prompt, over the median one of an idle worker",
            round(longest / ours["idle_ms"]["p50"], 2),
            MOST_OVER_IDLE,
            "times",
        ),
    ]


def _engine(model: LoadedModel, chunk: int, long: int) -> WatchedEngine:
    context = long + BLOCK_ROWS
    config = EngineConfig(
        num_blocks=(context + STREAMS * (SHORT + MAX_TOKENS)) // BLOCK_ROWS + 2 * STREAMS,
        num_slots=STREAMS + 1,
        num_snapshots=4,
        max_batch=STREAMS + 1,
        prefill_chunk=chunk,
        max_context=context,
    )
    engine = WatchedEngine(config, model)
    engine.watching = False
    return engine


def _request(name: str, length: int, seed: int, max_tokens: int) -> GenerateRequest:
    """Random ids, plain greedy decode, never stopped by an id."""
    draw = random.Random(seed)
    tokens = tuple(draw.randrange(16, 500) for _ in range(length))
    return GenerateRequest(
        request_id=name,
        root=ROOT,
        tokens=tokens,
        chain=chain(ROOT, tokens),
        sampling=SamplingParams(seed=0, temperature=0.0),
        max_tokens=max_tokens,
        use_cache=False,
    )
