"""A step that does not fit: streams are set aside, begun again, verify what they said, and nobody else notices (FR-126)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from services.gpu_worker.engine.events import Admitted, Captured, FinishReason, Parked
from services.gpu_worker.engine.faults import Faults, OutOfMemory, Phase, StreamKey
from services.gpu_worker.engine.headroom import CLEAN_LAUNCHES, Headroom
from services.gpu_worker.engine.limits import EngineLimits
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.runner import memory_faults
from shared.errors import EngineFault
from tests.engine_kit import GREEDY, WARM, Driver, baseline, build, cold, prompt, request, run_one


class Breaks(Faults):
    """Raises where `when(phase, streams, launch number)` says so."""

    def __init__(self, when: Callable[[Phase, list[str], int], bool]) -> None:
        self._when = when
        self.launches = 0
        self.broken = 0

    def launched(self, phase: Phase, streams: Sequence[StreamKey]) -> None:
        self.launches += 1
        if self._when(phase, [name for name, _ in streams], self.launches):
            self.broken += 1
            raise OutOfMemory("no room")


def item(number: int, **fields: object) -> GenerateRequest:
    params = replace(WARM, seed=number) if number % 2 else GREEDY
    fields = {"max_tokens": 24, "sampling": params, "speculation_k": 3, "top_logprobs": 1} | fields
    return request(prompt(90 + 40 * number, number), f"r{number}", **fields)


def parks(driver: Driver) -> list[tuple[str, int, int]]:
    return [(e.request_id, e.retries, e.emitted) for e in driver.events if isinstance(e, Parked)]


@pytest.mark.parametrize("launch", range(1, 12))
def test_fr_126_a_stream_broken_at_any_launch_is_the_same_stream(launch: int) -> None:
    chosen = item(1)
    plain = run_one(build(), replace(chosen, speculation_k=0))
    faults = Breaks(lambda phase, names, number: number == launch)
    engine = build(faults=faults, limits=EngineLimits(burst_rounds=2), prefill_chunk=64)
    driver = Driver(engine)
    outcome = driver.run([chosen])[chosen.key]
    assert faults.broken == 1
    assert outcome.tokens == plain.tokens, "nothing is lost and nothing comes twice"
    assert outcome.logprobs == plain.logprobs
    assert (outcome.end.reason, outcome.end.completion_tokens) == (FinishReason.LENGTH, 24)
    offsets = [(burst.offset, len(burst.tokens)) for burst in outcome.bursts]
    assert offsets == [
        (sum(count for _, count in offsets[:i]), count) for i, (_, count) in enumerate(offsets)
    ]
    assert [name for name, _, _ in parks(driver)] == ["r1"]
    assert sum(isinstance(event, Admitted) for event in driver.events) == 1
    assert engine.stats().set_aside == 1
    baseline(engine)


def test_r_s8_a_replay_captures_nothing_and_launches_eagerly() -> None:
    faults = Breaks(lambda phase, names, number: number == 1)
    engine = build(faults=faults)
    driver = Driver(engine)
    driver.submit(item(1))
    driver.step()
    driver.step()
    (stream,) = engine._active
    assert stream.session.capture_disabled
    assert stream.session.graphs.eager
    driver.run()
    assert not [event for event in driver.events if isinstance(event, Captured)]


@pytest.mark.parametrize("phase", ["prefill", "verify"])
def test_r_s8_a_stream_that_never_fits_ends_as_overloaded_and_its_neighbours_are_whole(phase: Phase) -> None:
    faults = Breaks(lambda at, names, number: at == phase and "r1" in names)
    engine = build(faults=faults, limits=EngineLimits(burst_rounds=2))
    driver = Driver(engine)
    items = [item(number) for number in range(4)]
    outcomes = driver.run(items)
    end = outcomes["r1", 0].end
    assert (end.reason, end.error_code) == (FinishReason.ERROR, "overloaded")
    assert max(retries for name, retries, _ in parks(driver) if name == "r1") == 2
    for chosen in items:
        if chosen.request_id != "r1":
            alone = cold(chosen.tokens, max_tokens=24, sampling=chosen.sampling)
            assert outcomes[chosen.key].tokens == alone
            assert outcomes[chosen.key].end.reason is FinishReason.LENGTH
    assert all(retries == 0 for name, retries, _ in parks(driver) if name != "r1"), "nobody else is to blame"
    baseline(engine)


def test_fr_126_a_batch_that_does_not_fit_is_cut_until_it_does() -> None:
    faults = Breaks(lambda phase, names, number: len(names) > 2)
    engine = build(faults=faults, limits=EngineLimits(burst_rounds=2))
    driver = Driver(engine)
    items = [item(number) for number in range(6)]
    outcomes = driver.run(items)
    for chosen in items:
        assert outcomes[chosen.key].tokens == cold(chosen.tokens, max_tokens=24, sampling=chosen.sampling)
    assert 1 <= faults.broken <= 3
    assert all(retries == 0 for _, retries, _ in parks(driver))
    baseline(engine)


def test_fr_126_a_prompt_that_does_not_fit_is_retried_in_smaller_chunks() -> None:
    engine = build(prefill_chunk=256)
    prefill, sizes = engine.runner.prefill, []

    def tight(chunks: object) -> object:
        (chunk,) = chunks
        sizes.append(len(chunk.tokens))
        if len(chunk.tokens) > 64:
            raise OutOfMemory("no room")
        return prefill(chunks)

    engine.runner.prefill = tight
    tokens = prompt(300)
    assert run_one(engine, request(tokens)).tokens == cold(tokens)
    assert sizes == [256, 128, 64, 64, 64, 64, 44]
    baseline(engine)


def test_r_q12_cached_tokens_are_those_of_the_first_admission() -> None:
    tokens = prompt(200, 3)
    engine = build(faults=Breaks(lambda phase, names, number: phase == "verify" and number == 9))
    run_one(engine, request(tokens, "first", max_tokens=2))
    outcome = run_one(engine, request(tokens, "second", max_tokens=20))
    assert outcome.cached_tokens == outcome.end.cached_tokens == 192
    assert engine.stats().set_aside == 1


def test_a_parked_stream_is_exempt_from_the_queue_limit_and_can_be_cancelled() -> None:
    """FR-107: what was admitted once is not thrown out because others wait."""
    faults = Breaks(lambda phase, names, number: phase == "verify" and number == 4)
    engine = build(faults=faults, max_batch=1, limits=EngineLimits(max_waiting=1, burst_rounds=1))
    driver = Driver(engine)
    driver.submit(item(1))
    driver.step()
    driver.submit(item(2))
    while not parks(driver):
        driver.step()
    assert engine.stats().waiting == 2
    said = len(driver.outcomes["r1", 0].tokens)
    engine.cancel("r1", "left")
    driver.step()
    end = driver.outcomes["r1", 0].end
    assert (end.reason, end.completion_tokens) == (FinishReason.CANCELLED, said)
    assert end.telemetry.rounds > 0
    driver.run()
    baseline(engine)


def test_fr_18_streams_parked_in_mid_run_say_the_same_at_every_k() -> None:
    """Eight streams in a tiny pool, launches broken now and then."""
    for k in (0, 3):
        engine = build(
            num_blocks=12,
            faults=Breaks(lambda phase, names, number: number in (5, 18, 33, 52)),
            limits=EngineLimits(burst_rounds=3),
        )
        items = [replace(item(number % 4, speculation_k=k), request_id=f"{number}") for number in range(8)]
        outcomes = Driver(engine).run(items)
        for chosen in items:
            assert outcomes[chosen.key].tokens == cold(chosen.tokens, max_tokens=24, sampling=chosen.sampling)
        baseline(engine)


def test_headroom_halves_and_grows_by_one() -> None:
    headroom = Headroom(8)
    assert [len(group) for group in headroom.groups(range(10))] == [8, 2]
    headroom.exceeded(6)
    assert headroom.width == 3
    headroom.exceeded(1)
    assert headroom.width == 1
    for _ in range(CLEAN_LAUNCHES - 1):
        headroom.fitted()
    assert headroom.width == 1
    headroom.fitted()
    assert headroom.width == 2


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["python", "device", "cpu allocator"],
)
def test_what_allocators_raise_is_out_of_memory(error: Exception) -> None:
    with pytest.raises(OutOfMemory), memory_faults():
        raise error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shape"), memory_faults():
        raise RuntimeError("shape mismatch")
    assert issubclass(OutOfMemory, EngineFault)
