"""Small pools over a small host tier, many conversations at once, copies that change, cancels: every stream is the cold one.

The engine spills, brings back, drops and misses by itself; the test only looks at what is said and at the books.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import FinishReason
from services.gpu_worker.engine.requests import GenerateRequest
from tests.engine_kit import WARM, Driver, baseline, build, prompt, request, run_one

REQUESTS = 40
TOKENS = 6


@cache
def asked(path: tuple[int, ...]) -> tuple[int, ...]:
    """A conversation: two blocks and a bit a turn, so that branches share what comes before."""
    return tuple(token for depth, turn in enumerate(path) for token in prompt(100, seed=10 * depth + turn))


@cache
def said(path: tuple[int, ...]) -> tuple[int, ...]:
    """What a cold engine of its own answers."""
    item = request(asked(path), "cold", sampling=WARM, max_tokens=TOKENS, use_cache=False)
    return tuple(run_one(build(), item).tokens)


class Walk:
    """Requests come, some leave, host memory changes now and then."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        probe = build(num_blocks=8, num_slots=1, max_batch=1, max_context=256)
        room = 4 * probe.state_bytes + 14 * probe.kv.block_bytes
        self.engine: Engine = build(
            num_blocks=22, num_slots=3, max_batch=3, num_snapshots=5, max_context=512, host_tier_bytes=room
        )
        self.driver = Driver(self.engine)
        self.paths: dict[str, tuple[int, ...]] = {}
        self.left: set[str] = set()

    def ask(self, number: int) -> None:
        depth = self.dice.randint(1, 4)
        path = tuple(self.dice.randrange(2) for _ in range(depth))
        name = f"r{number}"
        self.paths[name] = path
        self.driver.submit(self._request(name, path))

    def _request(self, name: str, path: tuple[int, ...]) -> GenerateRequest:
        return request(
            asked(path), name, sampling=WARM, max_tokens=TOKENS, speculation_k=self.dice.choice([0, 3])
        )

    def disturb(self) -> None:
        tree = self.engine._cache.tree
        copies = [node.host for node in tree.nodes() if node.host is not None]
        copies += [entry.host for entry in tree.entries() if entry.host is not None]
        if copies and self.dice.random() < 0.06:
            self.dice.choice(copies).values.view(-1)[self.dice.randrange(9)] += 0.5
        if self.dice.random() < 0.1 and self.paths:
            name = self.dice.choice(list(self.paths))
            self.engine.cancel(name, "left")
            self.left.add(name)

    def run(self) -> None:
        asked_for = 0
        while asked_for < REQUESTS or self.engine.has_work():
            if asked_for < REQUESTS and self.dice.random() < 0.5:
                self.ask(asked_for)
                asked_for += 1
            self.driver.step()
            self.disturb()
            self.engine.check()


@pytest.mark.parametrize("seed", range(4))
def test_fr_7_whatever_moves_between_the_tiers_the_streams_are_the_cold_ones(seed: int) -> None:
    walk = Walk(seed)
    walk.run()
    for name, path in walk.paths.items():
        outcome = walk.driver.outcomes[name, 0]
        if outcome.end.reason is FinishReason.CANCELLED:
            assert name in walk.left
            assert tuple(outcome.tokens) == said(path)[: len(outcome.tokens)]
        else:
            assert tuple(outcome.tokens) == said(path), f"{name} of {path}"
    stats = walk.engine.stats()
    assert min(stats.spilled, stats.brought_back) > 10
    baseline(walk.engine)
    while keys := walk.engine.eviction_candidates(10**6, 10**6):
        walk.engine.evict(keys)
    stats = walk.engine.stats()
    assert (stats.entries, stats.host_bytes, stats.blocks.free) == (0, 0, stats.blocks.total)
