"""The gated delta rule: both forms against the recurrence in float64, the fold, and the gates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import gated_delta
from kernels.gated_delta import DeltaShape, ReplayPlan
from kernels.testing import CO_TENANTS, COLUMNS, CUTS, assert_equal_bits, poison, threads

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=16, value_dim=16)
SCALE = gated_delta.qk_scale(SHAPE)
CAPACITY, SLOTS = 8, 9


def _rows(count: int, seed: int = 0) -> Tensor:
    """Packed rows with plausible beta in (0, 1) and g < 0."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, SHAPE.channels, generator=generator)
    beta = torch.rand(count, SHAPE.value_heads, generator=generator)
    g = -torch.rand(count, SHAPE.value_heads, generator=generator) * 0.5
    return torch.cat([mixed, beta, g], dim=-1)


def _recurrence(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, float64, one row and one head at a time."""
    state = torch.zeros(SHAPE.value_heads, SHAPE.key_dim, SHAPE.value_dim, dtype=torch.float64)
    out = []
    for row in rows.double():
        keys = SHAPE.key_heads * SHAPE.key_dim
        q, k = (part.view(SHAPE.key_heads, -1) for part in (row[:keys], row[keys : 2 * keys]))
        q, k = (x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        value = row[2 * keys : SHAPE.channels].view(SHAPE.value_heads, -1)
        beta, g = row[SHAPE.channels :].view(2, -1)
        head_out = []
        for head in range(SHAPE.value_heads):
            query, key = q[head // 2] * SHAPE.key_dim**-0.5, k[head // 2]
            state[head] *= g[head].exp()
            state[head] += torch.outer(key, beta[head] * (value[head] - state[head].T @ key))
            head_out.append(state[head].T @ query)
        out.append(torch.stack(head_out))
    return torch.stack(out), state


def _chunked(rows: Tensor, cuts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    state, out, first = torch.zeros(SHAPE.value_heads, SHAPE.key_dim, SHAPE.value_dim), [], 0
    for count in cuts:
        padded = torch.full((-(-count // 64) * 64, SHAPE.packed), torch.nan)
        padded[:count] = rows[first : first + count]
        out.append(gated_delta.chunk_prefill(state, padded, count, SHAPE, SCALE)[:count])
        first += count
    return torch.cat(out), state


class Decoder:
    """One layer's pool, poisoned where nothing was written, driven like the runner drives it."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.state = torch.zeros(slots, SHAPE.value_heads, SHAPE.key_dim, SHAPE.value_dim)
        self.store = torch.empty(slots * CAPACITY + 1, SHAPE.packed)
        poison(self.store)
        self.store[-1] = 0.0
        self.slots = slots

    def verify(self, slots: list[int], folds: list[int], rows: Tensor) -> Tensor:
        plan = ReplayPlan.build(slots, folds, rows.shape[1], CAPACITY, self.slots)
        return gated_delta.replay_step(self.state, self.store, plan, rows, SHAPE, SCALE)

    def fold(self, slot: int, rows: int) -> Tensor:
        plan = ReplayPlan.build([slot], [rows], 0, CAPACITY, self.slots)
        gated_delta.fold(self.state, self.store, plan, SHAPE, SCALE)
        return self.state[slot].clone()


def _decode(rows: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Row by row: outputs, and the state before each row's fold (after the rows before it)."""
    decoder, out, states = Decoder(), [], []
    for i, row in enumerate(rows):
        out.append(decoder.verify([4], [min(i, 1)], row[None, None])[0, 0])
        states.append(decoder.state[4].clone())
    states.append(decoder.fold(4, 1))
    return torch.stack(out), states


def test_chunked_and_replayed_forms_agree_with_the_recurrence() -> None:
    rows = _rows(200)
    out, state = _recurrence(rows)
    chunk_out, chunk_state = _chunked(rows, (200,))
    step_out, step_states = _decode(rows)
    for got, expected in ((chunk_out, out), (step_out, out), (chunk_state, state), (step_states[-1], state)):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_prefill_bits_do_not_depend_on_the_cut() -> None:
    rows = _rows(500)
    whole_out, whole_state = _chunked(rows, (500,))
    for count in (1, 2):
        with threads(count):
            for cuts in CUTS:
                out, state = _chunked(rows, cuts)
                assert_equal_bits(out, whole_out, f"o of {cuts}")
                assert_equal_bits(state, whole_state, f"S of {cuts}")


@pytest.mark.parametrize("co_tenants", CO_TENANTS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_verify_bits_equal_decode(columns: int, co_tenants: int) -> None:
    rows = _rows(64)
    decoded, states = _decode(rows)
    others = [slot for slot in range(SLOTS) if slot != 5][:co_tenants]
    for count in (1, 2):
        with threads(count):
            decoder, fold = Decoder(), 0
            decoder.state[others] = 1.0
            for number, first in enumerate(range(0, 64 - columns, columns)):
                batch = torch.stack(
                    [_rows(columns, 100 + first + i) for i in range(co_tenants)]
                    + [rows[first : first + columns]]
                )
                folds = [(number * 3 + i) % (columns + 1) if first else 0 for i in range(co_tenants)]
                out = decoder.verify([*others, 5], [*folds, fold], batch)[-1]
                assert_equal_bits(out, decoded[first : first + columns], f"o from {first}")
                assert_equal_bits(decoder.state[5], states[first], f"S before {first}")
                fold = columns


def test_verify_eight_accept_three_then_verify_equals_decode() -> None:
    """Alone, and beside a sequence that accepted all eight: the shorter fold is padded at its front."""
    rows = _rows(32)
    decoded, states = _decode(rows)
    for others in ([], [6]):
        decoder = Decoder()
        drafts = torch.cat([rows[:3], _rows(5, 9)])
        decoder.verify([*others, 2], [0] * (len(others) + 1), torch.stack([drafts] * (len(others) + 1)))
        batch = torch.stack([rows[3:9]] * (len(others) + 1))
        again = decoder.verify([*others, 2], [*(8 for _ in others), 3], batch)[-1]
        assert_equal_bits(again, decoded[3:9], "o after the rollback")
        assert_equal_bits(decoder.state[2], states[3], "S after the rollback")
        assert_equal_bits(decoder.fold(2, 6), states[9], "S after a flush")


def test_a_new_row_never_writes_the_state() -> None:
    decoder = Decoder()
    decoder.state.normal_()
    before = decoder.state.clone()
    decoder.verify([0, 3], [0, 0], _rows(8).view(2, 4, -1))
    assert_equal_bits(decoder.state, before, "states")
