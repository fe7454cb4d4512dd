"""The driver: scheduled actions, copies of the cache, and pools that must be whole at the end."""

from __future__ import annotations

import pytest

from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.requests import GenerateRequest
from services.prove.driver import Driver, WatchedEngine
from shared.errors import EngineFault
from tests.engine_kit import prompt, request, tiny_model


def engine() -> WatchedEngine:
    config = EngineConfig(num_blocks=32, num_slots=4, num_snapshots=8, max_batch=4, max_context=1024)
    return WatchedEngine(config, tiny_model())


def item(name: str = "r", **fields: object) -> GenerateRequest:
    return request(prompt(130), name, max_tokens=6, **fields)


def test_the_cache_is_copied_up_to_the_public_length() -> None:
    driver = Driver(engine())
    driver.run([item()])
    got = driver.records["r", 0]
    assert got.cache is not None
    assert got.cache.draft is not None
    assert got.cache.rows.shape[3] == 130 + len(got.tokens) - 1
    assert got.cache.draft.shape[2] == 130
    assert got.cache.state.abs().sum() > 0


def test_a_cancelled_stream_leaves_no_copy() -> None:
    driver = Driver(engine())
    driver.at(1, lambda: driver.submit(item()))
    driver.at(2, lambda: driver.engine.cancel("r", "enough"))
    driver.run()
    assert driver.records["r", 0].end.detail == "enough"
    assert driver.records["r", 0].cache is None
    assert not driver.engine.kept


def test_actions_come_in_their_order_and_idle_steps_are_skipped() -> None:
    driver, seen = Driver(engine()), []
    for step in (500, 3, 7):
        driver.at(step, lambda step=step: seen.append((step, driver.steps)))  # type: ignore[misc]
    driver.run()
    assert seen == [(3, 3), (7, 7), (500, 500)]


def test_clear_gives_everything_back() -> None:
    driver = Driver(engine())
    driver.run([item()])
    assert driver.engine.stats().entries > 0
    driver.clear()
    assert driver.engine.stats().entries == 0


def test_clear_finds_what_is_still_held() -> None:
    driver = Driver(engine())
    driver.run([item()])
    tokens = prompt(130)
    assert driver.engine.lookup("holder", item().root, tokens, item().chain) is not None
    with pytest.raises(EngineFault, match="1 entries and 0 host bytes outlive"):
        driver.clear()


def test_a_stuck_engine_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(engine())
    monkeypatch.setattr(driver.engine, "has_work", lambda: True)
    with pytest.raises(EngineFault, match="without an event"):
        driver.run()


def test_an_end_that_never_came_is_a_fault() -> None:
    driver = Driver(engine())
    driver.submit(item())
    with pytest.raises(EngineFault, match="no end"):
        _ = driver.records["r", 0].end
