"""`burstline prove` finds what goes wrong with sliding layers: each fault is one that a ring invites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pytest
import torch

from kernels.paged_attention import QueryTile
from services.gpu_worker.engine.cache import ring_pool
from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.layers import steps
from services.prove.axes import Cell
from services.prove.cover import pairwise
from services.prove.reference import References
from services.prove.stage import groups
from tests.property.prove.test_faults import FIXED, SEED, THIN, found

Patch = pytest.MonkeyPatch

SHOWS: Final = frozenset({"tokens", "logprobs", "kv rows", "window tail"})
REFUSED: Final = frozenset({"cached tokens"})
"""The checksum finds it first: a miss where a hit was due."""


def _tail_from_the_live_ring(patch: Patch) -> None:
    """A boundary remembers its slot, and what the slot's ring holds by then is restored."""
    slots: dict[int, int] = {}
    restore = RingPool.restore

    def take(self: RingPool, slot: int, snapshot: int, position: int) -> None:
        slots[snapshot] = slot

    def late(self: RingPool, snapshot: int, slot: int, position: int) -> None:
        self._tails[snapshot] = self.tail(slots[snapshot], position)
        restore(self, snapshot, slot, position)

    patch.setattr(RingPool, "take", take)
    patch.setattr(RingPool, "restore", late)


def _stale_ring(patch: Patch) -> None:
    """A restore leaves the ring of whoever was there."""

    def faulty(self: RingPool, snapshot: int, slot: int, position: int) -> None:
        self._low[slot], self._end[slot] = max(0, position - self.tail_rows), position

    patch.setattr(RingPool, "restore", faulty)


def _one_row_short(patch: Patch) -> None:
    """The tail lacks its oldest row, which only the first row after a restore sees."""
    tail = RingPool.tail

    def faulty(self: RingPool, slot: int, position: int) -> torch.Tensor:
        rows = tail(self, slot, position)
        rows[:, 0] = 0.0
        return rows

    def take(self: RingPool, slot: int, snapshot: int, position: int) -> None:
        self._tails[snapshot] = faulty(self, slot, position)

    patch.setattr(RingPool, "take", take)


def _ring_too_small(patch: Patch) -> None:
    """A launch overwrites rows that its own first rows see."""
    rows = ring_pool.ring_rows

    def faulty(dims: ModelDims, **launches: int) -> tuple[int, int]:
        blocks, tail = rows(dims, **launches)
        return blocks - 1, tail

    patch.setattr(ring_pool, "ring_rows", faulty)


def _tail_lost_on_the_way(patch: Patch) -> None:
    """What comes back from the host tier has its rows in the order of another place."""
    write = RingPool.write
    patch.setattr(RingPool, "write", lambda self, number, values: write(self, number, values.roll(64)))


def _window_of_a_tile(patch: Patch) -> None:
    """All rows of a tile see the window of its first one and what follows it: more, the more rows there are."""

    def faulty(start: int, columns: int, last: int, table: list[int], window: int = 0) -> QueryTile:
        return _Loose(start, columns, last, table, reach=window)

    patch.setattr(steps, "QueryTile", faulty)


@dataclass(frozen=True)
class _Loose(QueryTile):
    """Begins where a window does, and hides nothing after that."""

    reach: int = 0

    @property
    def first_key(self) -> int:
        return max(0, self.start - self.reach + 1) if self.reach else 0


FAULTS: Final[dict[str, tuple[Callable[[Patch], None], frozenset[str]]]] = {
    "tail from the live ring": (_tail_from_the_live_ring, SHOWS),
    "stale ring": (_stale_ring, SHOWS),
    "one row short": (_one_row_short, SHOWS),
    "ring too small": (_ring_too_small, SHOWS),
    "tail lost on the way": (_tail_lost_on_the_way, REFUSED),
    "window of a tile": (_window_of_a_tile, SHOWS),
}


@pytest.fixture(scope="module")
def planned() -> list[list[Cell]]:
    fixed = {**FIXED, "model": "window", "rule": "greedy, logprobs", "budget": "9 tokens"}
    return list(groups(pairwise(fixed, SEED), SEED))


@pytest.fixture(scope="module")
def references(planned: list[list[Cell]]) -> References:
    made = References()
    for group in planned:
        for cell in group:
            made.of(cell)
    return made


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_sliding_layers_is_found(
    name: str, planned: list[list[Cell]], references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    install, shows = FAULTS[name]
    install(monkeypatch)
    assert shows & found(planned, references, enough=shows).keys()


def test_sound_sliding_layers_show_no_difference(planned: list[list[Cell]], references: References) -> None:
    assert not found(planned[::THIN], references, enough=frozenset())
