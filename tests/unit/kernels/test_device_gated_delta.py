"""The gated delta net's device kernels, interpreted, against the twin: any fold schedule, ragged rows, cuts on the grid."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.gated_delta import CardReplay, DeltaShape, ReplayPlan, device, qk_scale, reference
from kernels.testing import poison

TAPS = 4
SHAPES = (DeltaShape(1, 2, 16, 16), DeltaShape(2, 4, 12, 20), DeltaShape(1, 1, 32, 8))


@dataclass(frozen=True)
class Weights:
    conv: Tensor
    rate: Tensor
    dt_bias: Tensor


def _weights(shape: DeltaShape) -> Weights:
    generator = torch.Generator().manual_seed(5)
    return Weights(
        conv=torch.randn(TAPS, shape.channels, generator=generator) * 0.5,
        rate=torch.rand(shape.value_heads, generator=generator) + 0.1,
        dt_bias=torch.randn(shape.value_heads, generator=generator),
    )


def _projected(rows: int, shape: DeltaShape, seed: int) -> Tensor:
    """Rows as a projection leaves them, the gate's columns behind."""
    return torch.randn(rows, shape.packed + 8, generator=torch.Generator().manual_seed(seed))


def _close(actual: Tensor, expected: Tensor) -> None:
    assert not actual.isnan().any()
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9)
    assert error < 2e-5, f"relative error {error:.2e}"


def _sequence(shape: DeltaShape, rows: Tensor) -> tuple[Tensor, Tensor]:
    """o and the state after all rows of one sequence, by the twin, one verify."""
    state = torch.zeros(1, shape.value_heads, shape.key_dim, shape.value_dim)
    count = rows.shape[0]
    store = torch.zeros(count + 1, shape.packed)
    windows = torch.zeros(1, TAPS - 1 + count, shape.channels)
    plan = ReplayPlan.build([0], [0], count, count, 1, TAPS - 1)
    out = reference.decode(rows, _weights(shape), state, store, windows, plan, shape, qk_scale(shape))
    reference.fold(state, store, ReplayPlan.build([0], [count], 0, count, 1), shape, qk_scale(shape))
    return out, state[0]


class Card:
    """A pool of rings, poisoned, driven as the runner drives it: head and pending are the host's."""

    def __init__(self, shape: DeltaShape, slots: int, ring: int) -> None:
        self.shape = shape
        self.state = torch.full((slots, shape.value_heads, shape.key_dim, shape.value_dim), torch.nan)
        self.store = torch.empty(slots, ring, shape.packed)
        self.windows = torch.empty(slots, ring, shape.channels)
        poison(self.store, self.windows)
        self.head, self.pending = [TAPS - 1] * slots, [0] * slots
        for slot in range(slots):
            self.state[slot] = 0.0
            self.windows[slot, : TAPS - 1] = 0.0

    def _plan(self, slots: list[int], stores: list[int], counts: list[int], columns: int) -> ReplayPlan:
        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        card = CardReplay(
            slots=ints(slots),
            pending=ints([self.pending[slot] for slot in slots]),
            head=ints([self.head[slot] for slot in slots]),
            store_after=ints(stores),
            counts=ints(counts),
            columns=columns,
        )
        return ReplayPlan.for_card(card)

    def _stored(self, slot: int) -> None:
        self.head[slot] = (self.head[slot] + self.pending[slot]) % self.store.shape[1]
        self.pending[slot] = 0

    def verify(self, slots: list[int], rows: list[Tensor], stores: list[int], columns: int) -> Tensor:
        counts = [len(part) for part in rows]
        y = torch.full((len(slots), columns, self.shape.packed + 8), torch.nan)
        for number, part in enumerate(rows):
            y[number, : len(part)] = part
        out = device.decode(
            y.flatten(0, 1),
            _weights(self.shape),
            self.state,
            self.store,
            self.windows,
            self._plan(slots, stores, counts, columns),
            self.shape,
            qk_scale(self.shape),
        )
        for slot, stored in zip(slots, stores, strict=True):
            if stored:
                self._stored(slot)
        return out.view(len(slots), columns, self.shape.value_heads, self.shape.value_dim)

    def flush(self, slot: int) -> None:
        device.fold(self.state, self.store, self._plan([slot], [1], [0], 0), self.shape, qk_scale(self.shape))
        self._stored(slot)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_verify_values(shape: DeltaShape) -> None:
    rows = _projected(6, shape, 1)
    expected, state = _sequence(shape, rows)
    card = Card(shape, 3, 16)
    out = card.verify([2], [rows], [0], 6)
    _close(out[0], expected)
    card.pending[2] = 6
    card.flush(2)
    _close(card.state[2], state)
    assert torch.equal(card.state[1], torch.zeros_like(card.state[1]))


def test_a_pending_row_is_its_key_its_decay_and_its_correction() -> None:
    shape = SHAPES[0]
    rows = _projected(4, shape, 2)
    plain, poisoned = Card(shape, 1, 8), Card(shape, 1, 8)
    for card in (plain, poisoned):
        card.verify([0], [rows[:3]], [0], 3)
        card.pending[0] = 3
    # Queries and betas have done their work.
    poisoned.store[0, :, : shape.key_heads * shape.key_dim] = torch.nan
    poisoned.store[0, :, shape.channels : shape.channels + shape.value_heads] = torch.nan
    results = [card.verify([0], [rows[3:]], [1], 1) for card in (plain, poisoned)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(plain.state, poisoned.state)


def test_any_schedule_of_folds_and_columns_gives_the_same_bits() -> None:
    shape, total, ring = SHAPES[0], 18, 14
    rows = {slot: _projected(total + 8, shape, slot) for slot in (0, 1)}
    plain = Card(shape, 2, ring)
    expected = []
    for at in range(total):
        expected.append(plain.verify([0], [rows[0][at : at + 1]], [1], 1)[0, 0])
        plain.pending[0] = 1
    plain.flush(0)

    card, at = Card(shape, 3, ring), {0: 0, 1: 0}
    walk = (
        (3, 2, 0, 4),
        (1, 1, 0, 4),
        (4, 0, 1, 2),
        (2, 2, 0, 1),
        (4, 4, 1, 3),
        (3, 1, 1, 3),
        (4, 3, 0, 4),
        (4, 4, 1, 4),
    )
    for columns, accepted, stores, other in walk:
        count = min(columns, total - at[0])
        parts = [rows[0][at[0] : at[0] + count], rows[1][at[1] : at[1] + other]]
        out = card.verify([0, 1, 2], [*parts, rows[0][:0]], [stores, 1, 0], 4)
        for t in range(count):
            assert torch.equal(out[0, t], expected[at[0] + t]), (at[0], t)
        assert torch.equal(out[0, count:], torch.zeros_like(out[0, count:]))
        assert torch.equal(out[2], torch.zeros_like(out[2]))
        kept = min(accepted, count)
        card.pending[0] += kept
        card.pending[1] = other if other < 4 else 1
        at[0] += kept
        at[1] += card.pending[1]
    while at[0] < total:
        out = card.verify([0], [rows[0][at[0] : at[0] + 1]], [0], 1)
        assert torch.equal(out[0, 0], expected[at[0]])
        card.pending[0] += 1
        at[0] += 1
        if card.pending[0] >= 4:
            card.flush(0)
    card.flush(0)
    assert torch.equal(card.state[0], plain.state[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_values(shape: DeltaShape) -> None:
    y = _projected(128, shape, 3)
    y[70:] = torch.nan
    state, window = (
        torch.zeros(shape.value_heads, shape.key_dim, shape.value_dim),
        torch.randn(3, shape.channels),
    )
    own_state, own_window = state.clone(), window.clone()
    expected = reference.prefill(y.clone(), _weights(shape), state, window, 70, shape, qk_scale(shape))
    out = device.prefill(y, _weights(shape), own_state, own_window, 70, shape, qk_scale(shape))
    _close(out[:70], expected[:70])
    assert not out.isnan().any()
    _close(own_state, state)
    assert torch.equal(own_window, window)


def test_any_cut_on_the_grid_gives_the_same_bits() -> None:
    shape = SHAPES[0]
    y = _projected(190, shape, 4)

    def run(cuts: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        state = torch.zeros(shape.value_heads, shape.key_dim, shape.value_dim)
        window, first, out = torch.zeros(TAPS - 1, shape.channels), 0, []
        for count in cuts:
            padded = torch.full((-(-count // 64) * 64, y.shape[1]), torch.nan)
            padded[:count] = y[first : first + count]
            part = device.prefill(padded, _weights(shape), state, window, count, shape, qk_scale(shape))
            out.append(part[:count])
            first += count
        return torch.cat(out), state, window

    whole = run((190,))
    for cuts in ((128, 62), (64, 126)):
        for one, other in zip(whole, run(cuts), strict=True):
            assert torch.equal(one, other), cuts


def test_a_short_tail_keeps_older_inputs() -> None:
    shape = SHAPES[0]
    window = torch.randn(TAPS - 1, shape.channels)
    before = window.clone()
    y = _projected(64, shape, 6)
    device.prefill(y, _weights(shape), torch.zeros(2, 16, 16), window, 1, shape, qk_scale(shape))
    assert torch.equal(window, torch.cat([before[1:], y[:1, : shape.channels]]))
