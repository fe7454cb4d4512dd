"""A trace of prompts played against a prefix cache alone: the engine's real bookkeeping, without model, rows or time.

What is served is exact, since a hit depends on keys, capacity and policy, and on no computed value; `burstline bench
cache` checks that the engine serves the same. So policies and other caches are compared at any size in seconds.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from kernels.checksum import Checksum, checksum
from services.bench.agents import Ask
from services.gpu_worker.engine.cache.evict import Policy, worst_first
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.cache.offload import HostTier
from services.gpu_worker.engine.cache.prices import Prices
from services.gpu_worker.engine.config import BLOCK_ROWS
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.wants import SPARE_SNAPSHOTS
from shared.errors import EngineFault
from shared.protocol.chain import chain

MAX_TOKENS: Final = 8


def root_of(tenant: int) -> bytes:
    """The tenant's chain root."""
    return hashlib.sha256(f"tenant {tenant}".encode()).digest()


def request_of(ask: Ask, name: str, **fields: int) -> GenerateRequest:
    """The request that a worker would get for a prompt; every other one is sampled."""
    root, size = root_of(ask.tenant), len(ask.tokens)
    return GenerateRequest(
        request_id=name,
        root=root,
        tokens=ask.tokens,
        chain=chain(root, ask.tokens),
        sampling=SamplingParams(seed=size, temperature=float(size % 2)),
        max_tokens=MAX_TOKENS,
        ckpt_at=ask.stable,
        **fields,  # type: ignore[arg-type]
    )


class Cache(Protocol):
    """Answers, prompt by prompt, how many leading tokens need not be computed."""

    def serve(self, ask: Ask) -> int: ...


class NoCache:
    """Computes everything."""

    def serve(self, ask: Ask) -> int:
        return 0


class AttentionOnly:
    """Keeps KV blocks by least recent use, as a cache for pure transformers does, and no recurrent states.

    A hit is the minimum over all layer groups, so a hybrid model gets nothing of what `matched` counts.
    """

    def __init__(self, num_blocks: int) -> None:
        self.matched = 0  #: tokens whose KV rows were there
        self._room = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def serve(self, ask: Ask) -> int:
        keys = chain(root_of(ask.tenant), ask.tokens)
        for key in keys[: (len(ask.tokens) - 1) // BLOCK_ROWS]:
            if key not in self._blocks:
                break
            self.matched += BLOCK_ROWS
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._room:
            self._blocks.popitem(last=False)
        return 0


class Hybrid:
    """The engine's cache manager under a policy, each prompt from its lookup to its published captures."""

    def __init__(
        self,
        *,
        pools: tuple[int, int],
        prices: Prices,
        policy: Policy = worst_first,
        host_bytes: int = 0,
    ) -> None:
        """`pools` = blocks and snapshots."""
        memory = _Weightless(prices)
        self.manager = CacheManager(
            num_blocks=pools[0],
            num_slots=1,
            num_snapshots=pools[1],
            max_pending=4,
            states=memory,
            tier=HostTier(host_bytes, memory),
            prices=prices,
            policy=policy,
        )
        self._asked = 0

    def serve(self, ask: Ask) -> int:
        self._asked += 1
        request, sequence = request_of(ask, f"r{self._asked}"), SequenceState.host_only()
        manager = self.manager
        manager.lookup(request.request_id, request.root, request.tokens, request.chain)
        self._make_room(manager.fresh_blocks(request))
        manager.expect(request.request_id)
        manager.bring_back(request.request_id)
        if manager.admit(request, sequence) is None:
            raise EngineFault("a prompt does not fit into the cache of this benchmark")
        captures = []
        for position in self._cuts(ask, request, sequence.seq_len):
            sequence.commit(request.tokens[sequence.seq_len : position])
            captures.append(manager.capture(request, sequence, position, torch.zeros(0)))
        sequence.commit(request.tokens[sequence.seq_len :])
        sequence.guard.release()
        for capture in captures:
            if capture is not None:
                manager.publish(capture.capture_id)
        self._make_room(0)
        return sequence.cached_prefix_tokens

    def _cuts(self, ask: Ask, request: GenerateRequest, start: int) -> Sequence[int]:
        return self.manager.boundaries(request, start, None, ask.stable // BLOCK_ROWS * BLOCK_ROWS)

    def _make_room(self, blocks: int) -> None:
        """As a worker does: spill, then evict, until the request fits and two snapshots are spare."""
        manager = self.manager
        while True:
            short = blocks - manager.blocks.free, SPARE_SNAPSHOTS - manager.snapshots.free
            if max(short) <= 0:
                return
            manager.make_room(max(0, short[0]), max(0, short[1]))
            short = blocks - manager.blocks.free, SPARE_SNAPSHOTS - manager.snapshots.free
            keys = manager.candidates(max(0, short[0]), max(0, short[1]))
            evicted = manager.evict(keys)
            if not evicted.gone and not evicted.stateless:
                return


class PromptEnds(Hybrid):
    """Keeps one state a prompt, at its end: neither branch points nor the boundary before the generation header."""

    def _cuts(self, ask: Ask, request: GenerateRequest, start: int) -> Sequence[int]:
        position = len(ask.tokens) // BLOCK_ROWS * BLOCK_ROWS
        path = self.manager.tree.match(request.root, request.tokens, request.chain)
        forks = self.manager.tree.forks(path, position // BLOCK_ROWS)
        return [] if position <= start or forks or self.manager.has_state(request, position) else [position]


class _Weightless:
    """States and memory without content; copies weigh what the prices say."""

    def __init__(self, prices: Prices) -> None:
        self._block = torch.zeros(1).expand(prices.block_bytes // 4)
        self._state = torch.zeros(1).expand(prices.state_bytes // 4)

    def reset(self, slot: int) -> None: ...

    def take_snapshot(self, slot: int, snapshot: int) -> None: ...

    def restore(self, snapshot: int, slot: int) -> None: ...

    def read_block(self, block: int) -> Tensor:
        return self._block

    def write_block(self, block: int, rows: Tensor) -> None: ...

    def write_blocks(self, blocks: Sequence[int], rows: Sequence[Tensor]) -> None: ...

    def sums_of(self, blocks: Sequence[int]) -> list[Checksum]:
        return [checksum(self._block)] * len(blocks)

    def read_snapshot(self, snapshot: int) -> tuple[Tensor, int]:
        return self._state, 0

    def write_snapshot(self, snapshot: int, values: Tensor, position: int) -> None: ...


def play(trace: Iterable[Ask], cache: Cache) -> list[int]:
    """Tokens served of each prompt."""
    return [cache.serve(ask) for ask in trace]
