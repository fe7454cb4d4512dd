"""Decode-made states under random life: taken, set aside, parked, gone on from, spilled, changed, given up.

After every step each reference is recounted from its holders. Rows are written with the tokens that they hold, so that what
a sequence goes on from is seen to be its own, and a turn that goes on never writes into what another may still need.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from torch import Tensor

from services.gpu_worker.engine.cache.decoded import DecodedState, Role
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sequence import SequenceState, session_hash
from tests.engine_kit import request
from tests.session_kit import PRICES, VOCAB, Bench

HOST_BYTES = 6 * PRICES.block_bytes + 2 * PRICES.state_bytes
ROOTS = (b"\x01" * 32, b"\x02" * 32)
Live = tuple[GenerateRequest, SequenceState, DecodedState | None]
"""A running stream and its newest checkpoint."""


def rows_of(tokens: tuple[int, ...]) -> Tensor:
    """What a block that holds these tokens (up to 64) looks like; [8]."""
    return torch.tensor([len(tokens), *(sum(tokens[i::7]) for i in range(7))], dtype=torch.float32)


class DecodedMachine(RuleBasedStateMachine):
    """`waiting` streams are not in the machine's list of live ones: only their checkpoint holds anything."""

    live: Bundle[Live] = Bundle("live")
    waiting: Bundle[tuple[GenerateRequest, DecodedState]] = Bundle("waiting")

    @initialize()
    def start(self) -> None:
        self.bench = Bench(host_bytes=HOST_BYTES, max_decoded=9)
        self.cache, self.model = self.bench.cache, self.bench.model
        self.running: list[SequenceState] = []
        self.count = 0

    @rule(target=live, seed=st.integers(0, 3), length=st.integers(1, 150), root=st.sampled_from(ROOTS))
    def begin(self, seed: int, length: int, root: bytes) -> object:
        draw = random.Random(seed)
        tokens = tuple(draw.randrange(3, VOCAB) for _ in range(length))
        return self._admit(self._request(tokens, root), None)

    def _request(self, tokens: tuple[int, ...], root: bytes) -> GenerateRequest:
        self.count += 1
        return request(tokens, f"r{self.count}", root=root, max_tokens=90, reuse="decode")

    def _admit(self, item: GenerateRequest, checkpoint: DecodedState | None) -> object:
        """Go on from what there is; write the rest of the prompt."""
        base = self.cache.base(item, checkpoint)
        if self.cache.blocks.free < self.cache.fresh_blocks(item, None, base) or not self.cache.slots.free:
            self.cache.decoded.drop(checkpoint)
            return multiple()
        if base is not None and not self.cache.bring_base(base):
            assert not base.alive
            return multiple()
        sequence = SequenceState.host_only()
        sequence.session_hash = session_hash(item.root, *item.key)
        assert self.cache.admit(item, sequence, None, base) is not None
        self.running.append(sequence)
        if base is not None:
            self._is_right(item, sequence, base)
            if base is checkpoint:
                base.role = Role.RUNNING
        self._write(sequence, item.tokens[sequence.seq_len :])
        return item, sequence, checkpoint if base is checkpoint else None

    def _is_right(self, item: GenerateRequest, sequence: SequenceState, base: DecodedState) -> None:
        """Rows, state and tokens are those that were kept, of this namespace, and a prefix of what is asked."""
        assert base.root == item.root
        assert tuple(sequence.tokens) == base.tokens
        assert base.role is not Role.PARKED or base.tokens == item.tokens[: base.position]
        assert base.role is Role.PARKED or base.tokens[: len(item.tokens)] == item.tokens
        assert self.model._slots[sequence.ssm_slot_idx()] == list(base.tokens)
        assert sequence.kv_valid_tokens == base.position
        for index, block in enumerate(sequence.block_table[: len(base.blocks)]):
            held = base.tokens[index * BLOCK_ROWS : (index + 1) * BLOCK_ROWS]
            assert torch.equal(self.model.read_block(block), rows_of(held))

    def _write(self, sequence: SequenceState, tokens: tuple[int, ...]) -> None:
        """Append rows, as a launch would: into the sequence's own blocks and its slot."""
        first = sequence.seq_len // BLOCK_ROWS
        sequence.commit(list(tokens))
        self.model._slots[sequence.ssm_slot_idx()].extend(tokens)
        for index in range(first, -(-sequence.seq_len // BLOCK_ROWS)):
            held = tuple(sequence.tokens[index * BLOCK_ROWS : (index + 1) * BLOCK_ROWS])
            self.model.write_block(sequence.block_table[index], rows_of(held))

    @rule(target=live, stream=consumes(live), count=st.integers(1, 70))
    def decode(self, stream: Live, count: int) -> object:
        item, sequence, checkpoint = stream
        room = min(count, len(item.tokens) + item.max_tokens - sequence.seq_len)
        self._write(sequence, tuple(3 + (sequence.seq_len + i) % 19 for i in range(room)))
        # The unfilled block of an older checkpoint went on with the stream: its rows stand, the stand-in's sum does not.
        self.cache.decoded.drop(checkpoint)
        return item, sequence, None

    @rule(target=live, stream=consumes(live))
    def take(self, stream: Live) -> object:
        item, sequence, checkpoint = stream
        self.cache.decoded.drop(checkpoint)
        return item, sequence, self._keep(item, sequence, Role.RUNNING)

    def _keep(self, item: GenerateRequest, sequence: SequenceState, role: Role) -> DecodedState | None:
        hidden = torch.zeros(1)
        return self.cache.decoded.keep(sequence, root=item.root, last_hidden=hidden, role=role)

    @rule(target=waiting, stream=consumes(live))
    def give_way(self, stream: Live) -> object:
        item, sequence, checkpoint = stream
        self._release(sequence)
        if checkpoint is None or not checkpoint.alive:
            return multiple()
        checkpoint.role = Role.WAITING
        return item, checkpoint

    def _release(self, sequence: SequenceState) -> None:
        sequence.guard.release()
        self.running.remove(sequence)

    @rule(target=live, stream=consumes(waiting))
    def come_back(self, stream: tuple[GenerateRequest, DecodedState]) -> object:
        return self._admit(*stream)

    @rule(stream=consumes(waiting))
    def cancel(self, stream: tuple[GenerateRequest, DecodedState]) -> None:
        self.cache.decoded.drop(stream[1])
        self.cache.decoded.drop(stream[1])

    @rule(stream=consumes(live), park=st.booleans())
    def end(self, stream: Live, park: bool) -> None:
        item, sequence, checkpoint = stream
        parked = self._keep(item, sequence, Role.PARKED) if park else None
        if parked is not None:
            self.cache.decoded.replace(parked)
        self._release(sequence)
        self.cache.decoded.drop(checkpoint)

    @rule(target=live, number=st.integers(0, 9), tail=st.integers(1, 40), own=st.booleans())
    def next_turn(self, number: int, tail: int, own: bool) -> object:
        """Somebody asks what a parked turn said, and more; of its own namespace or of another."""
        parked = self.cache.decoded.parked
        if not parked:
            return multiple()
        before = parked[number % len(parked)]
        root = before.root if own else next(root for root in ROOTS if root != before.root)
        item = self._request((*before.tokens, *range(3, 3 + tail % 20 + 1)), root)
        found = self.cache.decoded.find(root, item.tokens)
        assert found is not None or not own
        assert found is None or found.root == root
        assert self.cache.base(replace(item, reuse="exact"), None) is None
        return self._admit(item, None)

    @rule(number=st.integers(0, 9))
    def spill(self, number: int) -> None:
        idle = [d for d in self.cache.decoded if d.role is not Role.RUNNING]
        if idle:
            self.cache.decoded.spill(idle[number % len(idle)])

    @rule(number=st.integers(0, 9))
    def change_a_copy(self, number: int) -> None:
        """Bytes in the host tier change: whoever would go on from them starts over."""
        parts = [part for d in self.cache.decoded for part in (d.state, *d.blocks) if hasattr(part, "values")]
        if parts:
            parts[number % len(parts)].values[-1] += 1.0

    @rule(count=st.integers(1, 9))
    def need_blocks(self, count: int) -> None:
        before = self.cache.blocks.free
        freed = self.cache.decoded.free_blocks(count)
        assert freed == (self.cache.blocks.free > before)
        assert all(d.role is Role.RUNNING for d in self.cache.decoded) or self.cache.blocks.free >= before

    @rule()
    def need_a_snapshot(self) -> None:
        before = self.cache.snapshots.free
        assert self.cache.decoded.free_snapshot() == (self.cache.snapshots.free > before)

    @invariant()
    def every_reference_has_a_holder(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.cache.check(self.running)
        for counts in self.cache.counts():
            assert counts.balanced
            assert min(counts.free, counts.owned, counts.cached) >= 0

    @invariant()
    def what_is_parked_never_changes(self) -> None:
        if not hasattr(self, "bench"):
            return
        for parked in self.cache.decoded.parked:
            for index, block in enumerate(parked.blocks):
                held = parked.tokens[index * BLOCK_ROWS : (index + 1) * BLOCK_ROWS]
                if isinstance(block, int):
                    assert torch.equal(self.model.read_block(block), rows_of(held))

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for sequence in list(self.running):
            self._release(sequence)
        for decoded in list(self.cache.decoded):
            self.cache.decoded.drop(decoded)
        assert self.cache.tier.used == 0
        assert self.cache.blocks.free == self.cache.blocks.total
        assert self.cache.snapshots.free == self.cache.snapshots.total


TestDecodedMachine = DecodedMachine.TestCase
TestDecodedMachine.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
