"""Pools and tree under random life: hits, primes, captures granted and refused, ends, evictions.

After every step each reference is recounted from its holders, and the prefix tree is compared with a model that only
knows which boundaries were published and not evicted.
"""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from services.gpu_worker.engine.cache.entry import Capture
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sessions.base import Session
from tests.engine_kit import request
from tests.session_kit import VOCAB, Bench

PIECES = [tuple(random.Random(seed).randrange(3, VOCAB) for _ in range(64)) for seed in range(3)]


class CacheMachine(RuleBasedStateMachine):
    """Prompts are paths over three 64-token pieces with a short tail, so that they share prefixes often."""

    sessions: Bundle[Session] = Bundle("sessions")
    captures: Bundle[Capture] = Bundle("captures")

    @initialize()
    def start(self) -> None:
        self.bench = Bench()
        self.live: list[Session] = []
        self.states: set[bytes] = set()
        self.count = 0

    def _request(self, path: list[int], tail: int, **fields: int) -> GenerateRequest:
        self.count += 1
        tokens = tuple(token for piece in path for token in PIECES[piece]) + tuple(range(3, 3 + tail))
        return request(tokens, f"r{self.count}", max_tokens=4, **fields)

    @rule(
        target=sessions,
        path=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        tail=st.integers(0, 20),
        look=st.booleans(),
        capture_at=st.integers(0, 300),
        chunk=st.sampled_from([64, 128, 512]),
    )
    def prime(self, path: list[int], tail: int, look: bool, capture_at: int, chunk: int) -> object:
        item = self._request(path, tail, capture_at=capture_at)
        if look:
            hit = self.bench.cache.lookup(item.request_id, item.root, item.tokens, item.chain)
            usable = [
                key
                for index, key in enumerate(item.chain)
                if key in self.states and (index + 1) * BLOCK_ROWS < len(item.tokens)
            ]
            assert (hit.key if hit else None) == (usable[-1] if usable else None)
        if (
            self.bench.cache.blocks.free < self.bench.cache.fresh_blocks(item)
            or not self.bench.cache.slots.free
        ):
            self.bench.cache.drop_hit(item.request_id)
            return multiple()
        session = self.bench.prime(item, chunk=chunk)
        self.live.append(session)
        return session

    @rule(target=captures, session=consumes(sessions), rounds=st.integers(0, 3))
    def end(self, session: Session, rounds: int) -> object:
        self.bench.rounds([session], rounds)
        captures = session.drain_captures()
        session.sequence.guard.release()
        session.sequence.guard.release()
        self.live.remove(session)
        return multiple(*captures)

    @rule(capture=consumes(captures))
    def grant(self, capture: Capture) -> None:
        if self.bench.cache.publish(capture.capture_id):
            self.states.add(capture.entry.key)

    @rule(capture=consumes(captures))
    def refuse(self, capture: Capture) -> None:
        self.bench.cache.discard(capture.capture_id)

    @rule(blocks=st.integers(0, 6), snapshots=st.integers(0, 2))
    def evict(self, blocks: int, snapshots: int) -> None:
        before = (self.bench.cache.blocks.free, self.bench.cache.snapshots.free)
        evicted = self.bench.cache.evict(self.bench.cache.candidates(blocks, snapshots))
        after = (self.bench.cache.blocks.free, self.bench.cache.snapshots.free)
        assert (after[0] - before[0], after[1] - before[1]) == (evicted.blocks, evicted.snapshots)
        self.states -= {*evicted.gone, *evicted.stateless}

    @invariant()
    def every_reference_has_a_holder(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.cache.check([session.sequence for session in self.live])
        for counts in self.bench.cache.counts():
            assert counts.balanced
            assert min(counts.free, counts.owned, counts.cached) >= 0

    @invariant()
    def paths_fork_only_at_entries(self) -> None:
        if not hasattr(self, "bench"):
            return
        for node in self.bench.cache.tree._nodes.values():
            assert node.entry is not None or len(node.children) == 1

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for session in self.live:
            session.sequence.guard.release()
        for capture_id in list(self.bench.cache._pending):
            self.bench.cache.discard(capture_id)
        for _ in range(100):
            if not self.bench.cache.evict(self.bench.cache.candidates(999, 999)).gone:
                break
        forks = any(entry.children > 1 for entry in self.bench.cache.tree.entries())
        assert not forks
        assert self.bench.cache.blocks.free == self.bench.cache.blocks.total
        assert self.bench.cache.snapshots.free == self.bench.cache.snapshots.total


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
