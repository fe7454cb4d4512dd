"""Pools and tree under random life: hits, primes, captures granted and refused, ends, spills, evictions.

After every step each reference is recounted from its holders, and the prefix tree is compared with a model that only
knows which boundaries were published and not evicted. Every block in the tree is written with its own chain key, so that
rows that come back in the wrong place are seen; copies in the host tier change at random, and must become misses.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from torch import Tensor

from services.gpu_worker.engine.cache.entry import Capture
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.sessions.base import Session
from tests.engine_kit import request
from tests.session_kit import PRICES, VOCAB, Bench

HOST_BYTES = 20 * PRICES.block_bytes + 3 * PRICES.state_bytes
PIECES = [tuple(random.Random(seed).randrange(3, VOCAB) for _ in range(64)) for seed in range(3)]


def rows_of(key: bytes) -> Tensor:
    """What the block at a chain key holds."""
    return torch.tensor(list(key[:8]), dtype=torch.float32)


class CacheMachine(RuleBasedStateMachine):
    """Prompts are paths over three 64-token pieces with a short tail, so that they share prefixes often."""

    sessions: Bundle[Session] = Bundle("sessions")
    captures: Bundle[Capture] = Bundle("captures")

    @initialize()
    def start(self) -> None:
        self.bench = Bench(host_bytes=HOST_BYTES)
        self.live: list[Session] = []
        self.states: set[bytes] = set()
        self.count = 0

    def _request(self, path: list[int], tail: int, **fields: int) -> GenerateRequest:
        self.count += 1
        tokens = tuple(token for piece in path for token in PIECES[piece]) + tuple(range(3, 3 + tail))
        return request(tokens, f"r{self.count}", max_tokens=4, **fields)

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=5), tail=st.integers(0, 20))
    def whole_turn(self, path: list[int], tail: int) -> None:
        """A request from its lookup to its end, all captures granted."""
        session = self._prime(path, tail, True, 64, 128)
        if session is not None:
            for capture in self._end(session):
                self.grant_one(capture)

    @rule(
        target=sessions,
        path=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        tail=st.integers(0, 20),
        look=st.booleans(),
        capture_at=st.integers(0, 300),
        chunk=st.sampled_from([64, 128, 512]),
    )
    def prime(self, path: list[int], tail: int, look: bool, capture_at: int, chunk: int) -> object:
        session = self._prime(path, tail, look, capture_at, chunk)
        return multiple() if session is None else session

    def _prime(self, path: list[int], tail: int, look: bool, capture_at: int, chunk: int) -> Session | None:
        item = self._request(path, tail, capture_at=capture_at)
        if look:
            hit = self.bench.cache.lookup(item.request_id, item.root, item.tokens, item.chain)
            usable = [key for key in item.chain if key in self.states]
            assert (hit.key if hit else None) == (usable[-1] if usable else None)
        if (
            self.bench.cache.blocks.free < self.bench.cache.fresh_blocks(item)
            or not self.bench.cache.slots.free
        ):
            self.bench.cache.drop_hit(item.request_id)
            return None
        wrong = self.bench.cache.tier.mismatches
        session = self.bench.prime(item, chunk=chunk)
        self._note_ruins()
        missed = look and hit is not None and session.sequence.cached_prefix_tokens == 0
        assert not missed or self.bench.cache.tier.mismatches > wrong or not self.bench.cache.snapshots.free
        self._write(item, session.sequence)
        self.live.append(session)
        return session

    def _note_ruins(self) -> None:
        """What is ruined is no hit any more."""
        self.states -= set(self.bench.cache._moves.ruined)

    def _write(self, item: GenerateRequest, sequence: SequenceState) -> None:
        """The rows that a prime computed, and no others."""
        for index in range(sequence.cached_prefix_blocks, len(item.chain)):
            self.bench.model.write_block(sequence.block_table[index], rows_of(item.chain[index]))

    @rule(target=captures, session=consumes(sessions), rounds=st.integers(0, 3))
    def end(self, session: Session, rounds: int) -> object:
        self.bench.rounds([session], rounds)
        return multiple(*self._end(session))

    def _end(self, session: Session) -> list[Capture]:
        captures = session.drain_captures()
        session.sequence.guard.release()
        session.sequence.guard.release()
        self.live.remove(session)
        return captures

    @rule(capture=consumes(captures))
    def grant(self, capture: Capture) -> None:
        self.grant_one(capture)

    def grant_one(self, capture: Capture) -> None:
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

    @rule(blocks=st.integers(0, 9), snapshots=st.integers(0, 3))
    def spill(self, blocks: int, snapshots: int) -> None:
        free = self.bench.cache.blocks.free, self.bench.cache.snapshots.free
        self.bench.cache.make_room(blocks, snapshots)
        assert self.bench.cache.blocks.free >= free[0]
        assert self.bench.cache.snapshots.free >= free[1]

    @rule(number=st.integers(0, 20))
    def change_a_copy(self, number: int) -> None:
        tree = self.bench.cache.tree
        copies = [node.host for node in tree.nodes() if node.host is not None]
        copies += [entry.host for entry in tree.entries() if entry.host is not None]
        if copies:
            copies[number % len(copies)].values[-1] += 1.0

    def walk(self, draw: random.Random) -> None:
        """One random step of a long walk."""
        match draw.choice("tttssec"):
            case "t":
                self.whole_turn([draw.randrange(3) for _ in range(draw.randint(1, 5))], draw.randint(1, 20))
            case "s":
                self.spill(draw.randint(0, 9), draw.randint(0, 3))
            case "e":
                self.evict(draw.randint(0, 6), draw.randint(0, 2))
            case _:
                self.change_a_copy(draw.randint(0, 20))

    @invariant()
    def every_reference_has_a_holder(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.cache.check([session.sequence for session in self.live])
        for counts in self.bench.cache.counts():
            assert counts.balanced
            assert min(counts.free, counts.owned, counts.cached) >= 0

    @invariant()
    def rows_on_the_device_are_those_of_their_keys(self) -> None:
        if not hasattr(self, "bench"):
            return
        for node in self.bench.cache.tree.nodes():
            if node.block is not None:
                assert torch.equal(self.bench.model.read_block(node.block), rows_of(node.key))

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
        for capture_id in list(self.bench.cache._captures.pending):
            self.bench.cache.discard(capture_id)
        for _ in range(100):
            evicted = self.bench.cache.evict(self.bench.cache.candidates(999, 999))
            if not evicted.gone and not evicted.stateless:
                break
        forks = any(entry.children > 1 for entry in self.bench.cache.tree.entries())
        assert not forks
        assert self.bench.cache.tier.used == 0
        assert self.bench.cache.blocks.free == self.bench.cache.blocks.total
        assert self.bench.cache.snapshots.free == self.bench.cache.snapshots.total


@pytest.mark.parametrize("seed", range(6))
def test_a_long_walk_spills_brings_back_and_misses(seed: int) -> None:
    """The same rules for longer than hypothesis goes, so that the host tier fills, overflows and is read from."""
    draw, machine = random.Random(seed), CacheMachine()
    machine.start()
    for _ in range(80):
        machine.walk(draw)
        machine.every_reference_has_a_holder()
        machine.paths_fork_only_at_entries()
        machine.rows_on_the_device_are_those_of_their_keys()
    tier = machine.bench.cache.tier
    assert min(tier.taken, tier.brought) > 5
    assert tier.mismatches > 0
    machine.teardown()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
