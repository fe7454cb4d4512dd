"""Long prompts do not stall those who decode: what is primed between two of their launches is bounded (counted)."""

from __future__ import annotations

from typing import Any

import pytest

from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.limits import EngineLimits
from tests.engine_kit import Driver, baseline, build, cold, prompt, request


class Log:
    """Rows primed since the running stream's last verify, at each of its verifies."""

    def __init__(self, engine: Engine, slot: int) -> None:
        self.primed_before: list[int] = []
        self._rows = 0
        self._slot = slot
        self._prefill, self._verify = engine.runner.prefill, engine.runner.verify
        engine.runner.prefill = self._on_prefill  # type: ignore[method-assign]
        engine.runner.verify = self._on_verify  # type: ignore[method-assign]

    def _on_prefill(self, chunks: Any) -> Any:
        self._rows += sum(len(chunk.tokens) for chunk in chunks)
        return self._prefill(chunks)

    def _on_verify(self, rows: Any) -> Any:
        if any(row.slot == self._slot for row in rows):
            self.primed_before.append(self._rows)
            self._rows = 0
        return self._verify(rows)


@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("k", [0, 3])
def test_a_running_stream_waits_for_one_chunk_budget_at_most_however_many_prompts_come(
    chunk: int, k: int
) -> None:
    engine = build(prefill_chunk=chunk, num_blocks=128, limits=EngineLimits(busy_burst_rounds=2))
    driver = Driver(engine)
    running = request(prompt(70, 1), "running", max_tokens=40, speculation_k=k)
    driver.submit(running)
    driver.step()
    (stream,) = engine._active
    log = Log(engine, stream.session.sequence.ssm_slot_idx())
    long = [request(prompt(400 - number, 2 + number), f"long{number}", max_tokens=2) for number in range(2)]
    outcomes = driver.run(long)
    busy = [rows for rows in log.primed_before if rows]
    assert max(busy) <= chunk
    assert len(busy) > 2, "prompts were primed while it ran"
    assert outcomes[running.key].tokens == cold(running.tokens, max_tokens=40)
    baseline(engine)
