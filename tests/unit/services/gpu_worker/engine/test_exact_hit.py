"""A prompt that the cache holds whole (R-Q6): nothing is computed of it, and every bit is the cold run's.

The first token comes from the hidden that the snapshot keeps; the recurrent state has seen the last prompt token already,
so it goes on from there; the draft plane's next row pairs the first token with that hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.faults import Faults, OutOfMemory, StreamKey
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from services.prove.driver import CacheBytes, Driver, Record, WatchedEngine
from shared.clock import ManualClock
from shared.errors import EngineFault
from tests.engine_kit import GREEDY, WARM, baseline, prompt, request, tiny_model
from tests.session_kit import Bench, ids, sometimes

PENALISED = SamplingParams(seed=9, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.4)
TOKENS = prompt(192, seed=6)
WAYS = {
    "greedy, plain": {"sampling": GREEDY},
    "greedy, mtp": {"sampling": GREEDY, "speculation_k": 3},
    "sampled, mtp": {"sampling": WARM, "speculation_k": 4},
    "sampled, n-gram": {"sampling": WARM, "speculation_k": 3, "drafter": "ngram"},
    "penalised, mtp": {"sampling": PENALISED, "speculation_k": 2},
}


def build(faults: Faults | None = None, **sizes: int) -> WatchedEngine:
    config: dict[str, int] = {
        "num_blocks": 32,
        "num_slots": 8,
        "num_snapshots": 8,
        "prefill_chunk": 128,
        "max_context": 512,
    }
    limits = EngineLimits(burst_rounds=1)
    return WatchedEngine(
        EngineConfig(**(config | sizes)), tiny_model(), limits=limits, clock=ManualClock(), faults=faults
    )


def asked(name: str, tokens: Sequence[int] = TOKENS, **fields: object) -> GenerateRequest:
    return request(tokens, name, **({"max_tokens": 20, "top_logprobs": 2} | fields))  # type: ignore[arg-type]


def run(engine: WatchedEngine, *items: GenerateRequest) -> list[Record]:
    driver = Driver(engine)
    driver.run(items)
    baseline(engine)
    return [driver.records[item.key] for item in items]


def same_cache(one: CacheBytes | None, other: CacheBytes | None) -> bool:
    assert one is not None
    assert other is not None
    assert one.draft is not None
    assert other.draft is not None
    return (
        torch.equal(one.rows, other.rows)
        and torch.equal(one.draft, other.draft)
        and torch.equal(one.state, other.state)
        and torch.equal(one.window, other.window)
    )


def check_same(cold: Record, warm: Record) -> None:
    assert warm.tokens == cold.tokens
    assert warm.logprobs == cold.logprobs
    assert same_cache(warm.cache, cold.cache)


@pytest.mark.parametrize("length", [64, 128, 192])
@pytest.mark.parametrize("way", WAYS)
def test_r_q6_a_whole_hit_computes_no_prompt_row_and_gives_the_cold_bits(way: str, length: int) -> None:
    fields = WAYS[way]
    engine = build()
    (first,) = run(engine, asked("first", TOKENS[:length], **fields))
    before = engine.stats().prefill_tokens
    (again,) = run(engine, asked("again", TOKENS[:length], **fields))
    assert again.cached_tokens == again.end.cached_tokens == again.end.prompt_tokens == length
    assert engine.stats().prefill_tokens == before, "a prompt row was computed"
    check_same(first, again)
    (cold,) = run(build(), asked("cold", TOKENS[:length], use_cache=False, **fields))
    check_same(cold, again)


def test_r_q6_from_the_host_tier() -> None:
    engine = build(host_tier_bytes=10**8)
    (first,) = run(engine, asked("first"))
    assert engine.spill([asked("key").chain[-1]]) == 1
    (again,) = run(engine, asked("again"))
    assert again.cached_tokens == len(TOKENS)
    check_same(first, again)


def test_r_q6_choices_of_one_request_start_from_the_same_snapshot() -> None:
    engine = build()
    run(engine, asked("first"))
    items = [asked("many", choice=choice, sampling=SamplingParams(seed=choice)) for choice in range(3)]
    records = run(engine, *items)
    for item, record in zip(items, records, strict=True):
        assert record.cached_tokens == len(TOKENS)
        alone = asked("alone", choice=item.choice, sampling=item.sampling, use_cache=False)
        check_same(run(build(), alone)[0], record)


@pytest.mark.parametrize("at", range(1, 16, 3))
def test_r_q6_a_stream_that_gives_way_comes_back_by_a_whole_hit(at: int) -> None:
    class GivesWay(Faults):
        def give_way(self, key: StreamKey, committed: int) -> bool:
            return key[0] == "again" and not self.gone and committed >= len(TOKENS) + at

        gone = False

    faults = GivesWay()
    engine = build(faults)
    (first,) = run(engine, asked("first", speculation_k=3))
    driver = Driver(engine)
    driver.submit(asked("again", speculation_k=3))
    while engine.has_work():
        driver.step()
        faults.gone = faults.gone or driver.happened["Parked"] > 0
    assert driver.happened["Parked"] == 1
    check_same(first, driver.records["again", 0])
    baseline(engine)


def test_r_q6_the_first_row_of_logits_does_not_fit_into_memory_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build()
    (first,) = run(engine, asked("first"))
    logits, tries = engine.runner.logits, iter([1])

    def breaks_once(hidden: Tensor) -> Tensor:
        if next(tries, None):
            raise OutOfMemory("the launch did not fit")
        return logits(hidden)

    monkeypatch.setattr(engine.runner, "logits", breaks_once)
    (again,) = run(engine, asked("again"))
    assert again.cached_tokens == len(TOKENS)
    check_same(first, again)


def test_r_q6_the_state_is_never_advanced_over_the_last_prompt_token_twice() -> None:
    """The stand-in knows every prefix: a row that was fed twice would be another prefix, and other tokens."""
    tokens = ids(128)
    bench = Bench(sometimes)
    session = bench.prime(request(tokens, "first", speculation_k=3, max_tokens=9))
    bench.cache.publish(session.drain_captures()[-1].capture_id)
    bench.rounds([session])
    said = [emission.token for emission in session.drain()]
    session.sequence.guard.release()

    item = request(tokens, "again", speculation_k=3, max_tokens=9)
    assert bench.cache.lookup(item.request_id, item.root, item.tokens, item.chain) is not None
    again = bench.open(item)
    assert again.sequence.marconi_exact_snap is not None
    assert not again.primed, "the end of the prompt was not read yet"
    bench.cache.drop_hit(item.request_id)
    again.sequence.guard.release()

    bench.cache.lookup(item.request_id, item.root, item.tokens, item.chain)
    assert bench.complete(item) == said


def test_r_q6_nothing_is_restored_where_rows_are_missing() -> None:
    bench = Bench()
    session = bench.open(request(ids(128), "cold"))
    assert session.sequence.marconi_exact_snap is None
    with pytest.raises(EngineFault, match="128 prompt rows"):
        session.restored(bench.cache)
