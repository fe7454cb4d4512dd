"""A stand-in for model, runner and states: rows are a pure function of the whole prefix, so any bookkeeping fault shows.

A hidden is [1] and holds the number of a prefix. The trunk's row of a prefix and the draft head's row are the same
unless `wrong(prefix)` says that the head errs there; the head sees only (token, hidden of the row before), so a wrong
pairing costs every draft.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.checksum import Checksum, checksum
from services.gpu_worker.engine.batch import DraftRows, PrefillChunk, VerifyRows
from services.gpu_worker.engine.cache.manager import CacheManager
from services.gpu_worker.engine.cache.offload import HostTier
from services.gpu_worker.engine.cache.prices import Prices
from services.gpu_worker.engine.drafters.ngram import NamespaceIndex, NgramDrafter
from services.gpu_worker.engine.flights import WholeResult, WholeRow
from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.sessions.base import Session
from services.gpu_worker.engine.sessions.mtp import SpecSession
from services.gpu_worker.engine.sessions.outcome import SessionShape
from services.gpu_worker.engine.sessions.rounds import run_round
from tests.engine_kit import prompt

VOCAB = 24
PRICES = Prices(token_flops=10, pair_flops=1, block_bytes=32, state_bytes=16)
"""Bytes are those of the stand-in's blocks, and of its states with their hidden."""
Prefix = tuple[int, ...]
SAMPLED = SamplingParams(seed=77, temperature=1.0)


def sometimes(prefix: Prefix) -> bool:
    """The head errs on every third prefix."""
    return (sum(prefix) + len(prefix)) % 3 == 0


def ids(length: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt in the stand-in's vocabulary."""
    return prompt(length, seed, VOCAB)


def spec(session: Session) -> SpecSession:
    """The session, which must have a drafter."""
    assert isinstance(session, SpecSession)
    return session


class StandIn:
    """Runner and state pool in one. Checks what the real ones check."""

    def __init__(self, wrong: Callable[[Prefix], bool] = lambda _: False) -> None:
        self.verifies = 0
        self.drafts = 0
        self._wrong = wrong
        self._prefixes: list[Prefix] = [()]
        self._numbers: dict[Prefix, int] = {(): 0}
        self._slots: dict[int, list[int]] = {}
        self._open: dict[int, tuple[int, ...]] = {}
        self._snapshots: dict[int, list[int]] = {}
        self.poisoned: set[Prefix] = set()
        self.rows: dict[int, Tensor] = {}
        """What a block holds, as far as a test wrote it; 8 values."""

    def reset(self, slot: int) -> None:
        self._slots[slot] = []
        self._open.pop(slot, None)

    def take_snapshot(self, slot: int, snapshot: int) -> None:
        self._snapshots[snapshot] = list(self._slots[slot])

    def restore(self, snapshot: int, slot: int) -> None:
        self._slots[slot] = list(self._snapshots[snapshot])

    def read_block(self, block: int) -> Tensor:
        return self.rows.get(block, torch.zeros(8)).clone()

    def write_block(self, block: int, rows: Tensor) -> None:
        self.rows[block] = rows.clone()

    def write_blocks(self, blocks: Sequence[int], rows: Sequence[Tensor]) -> None:
        for block, copy in zip(blocks, rows, strict=True):
            self.write_block(block, copy)

    def sums_of(self, blocks: Sequence[int]) -> list[Checksum]:
        return [checksum(self.read_block(block)) for block in blocks]

    def read_snapshot(self, snapshot: int) -> tuple[Tensor, int]:
        state = self._snapshots[snapshot]
        return torch.tensor([self._number(tuple(state)), len(state), 7.0]), len(state)

    def write_snapshot(self, snapshot: int, values: Tensor, position: int) -> None:
        self._snapshots[snapshot] = list(self._prefixes[int(values[0])])
        assert len(self._snapshots[snapshot]) == position

    def prefill(self, chunk: PrefillChunk) -> Tensor:
        state = self._slots[chunk.slot]
        assert chunk.start == len(state)
        assert chunk.start % 64 == 0
        assert self._prefixes[int(chunk.previous_hidden[0])] == tuple(state)
        hidden = self._hiddens(state, chunk.tokens)
        state.extend(chunk.tokens)
        return hidden

    def verify(self, rows: Sequence[VerifyRows]) -> list[Tensor]:
        self.verifies += 1
        assert len({row.slot for row in rows}) == len(rows)
        for row in rows:
            assert row.slot not in self._open, "a verify before accept"
            assert row.start == len(self._slots[row.slot])
            self._open[row.slot] = tuple(row.tokens)
        return [self._hiddens(self._slots[row.slot], row.tokens) for row in rows]

    runs_whole = uncaptured = False

    def whole(self, rows: Sequence[WholeRow], *, more: bool = False) -> list[WholeResult]:
        raise AssertionError("nothing runs whole here")

    def land(self, but: Collection[int] = ()) -> None: ...

    def accept(self, slot: int, rows: int) -> None:
        self._slots[slot].extend(self._open.pop(slot)[:rows])

    def flush(self, slot: int) -> None:
        """Rows are plain lists here: nothing lags."""
        assert slot not in self._open

    def draft(self, rows: Sequence[DraftRows]) -> list[Tensor]:
        self.drafts += 1
        result = []
        for row in rows:
            numbers = []
            for offset, (token, hidden) in enumerate(zip(row.tokens, row.hiddens, strict=True)):
                before = self._prefixes[abs(int(hidden[0]))]
                assert len(before) == row.start + offset, "a draft row is paired with another row's hidden"
                prefix = (*before, token)
                number = self._number(prefix)
                numbers.append(-number if self._wrong(prefix) else number)
            result.append(torch.tensor(numbers, dtype=torch.float32)[:, None])
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.from_numpy(np.stack([self.row(int(value)) for value in hidden[:, 0]]))

    def row(self, number: int) -> np.ndarray:
        """[VOCAB] float32; a negative number is the erring head's row."""
        prefix = self._prefixes[abs(number)]
        if prefix in self.poisoned:
            return np.full(VOCAB, np.nan, dtype=np.float32)
        seed = [len(prefix), int(number < 0), *prefix]
        return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32)

    def _hiddens(self, state: Sequence[int], tokens: Sequence[int]) -> Tensor:
        numbers = [self._number((*state, *tokens[: i + 1])) for i in range(len(tokens))]
        return torch.tensor(numbers, dtype=torch.float32)[:, None]

    def _number(self, prefix: Prefix) -> int:
        if prefix not in self._numbers:
            self._numbers[prefix] = len(self._prefixes)
            self._prefixes.append(prefix)
        return self._numbers[prefix]


class Bench:
    """One cache and one stand-in; primes and runs sessions by hand."""

    def __init__(
        self,
        wrong: Callable[[Prefix], bool] = lambda _: False,
        *,
        max_ctx: int = 2048,
        host_bytes: int = 0,
        max_decoded: int = 0,
    ) -> None:
        self.model = StandIn(wrong)
        self.cache = CacheManager(
            num_blocks=128,
            num_slots=16,
            num_snapshots=8,
            max_pending=8,
            states=self.model,
            tier=HostTier(host_bytes, self.model),
            prices=PRICES,
            max_decoded=max_decoded,
        )
        self.said = NamespaceIndex()
        self.shape = SessionShape(vocab=VOCAB, hidden=1, max_verify=8, cache_max_ctx=max_ctx)

    def open(self, item: GenerateRequest) -> Session:
        """Admit; restores a hit that was looked up before."""
        sequence = SequenceState.host_only()
        self.cache.bring_back(item.request_id)
        admission = self.cache.admit(item, sequence)
        assert admission is not None
        kind = SpecSession if item.speculation_k else Session
        session = kind(item, sequence, self.shape, last_hidden=admission.last_hidden)
        if item.drafter == "ngram" and isinstance(session, SpecSession):
            session.drafter = NgramDrafter(item.tokens, item.root, self.said)
        return session

    def prime(self, item: GenerateRequest, *, chunk: int = 128) -> Session:
        session = self.open(item)
        if not session.prime_left:
            hidden = session.restored(self.cache)
        while not session.primed:
            rows = session.next_chunk(chunk, self.cache)
            hidden = self.model.prefill(rows)
            session.prefilled(rows, hidden, self.cache)
        session.end_prime(self.model.logits(hidden[-1:]).numpy()[0])
        return session

    def rounds(self, sessions: Sequence[Session], count: int = 1000) -> None:
        """At most `count` rounds over the sessions that have not ended."""
        for _ in range(count):
            if not run_round([s for s in sessions if s.ending is None], self.model):
                return

    def complete(self, item: GenerateRequest) -> list[int]:
        """All tokens of a request run alone, and everything given back."""
        session = self.prime(item)
        self.rounds([session])
        session.sequence.guard.release()
        return [emission.token for emission in session.drain()]
