"""The gated delta net: any schedule of columns, accepted rows and folds against plain decode; prompts in every cut."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kernels import gated_delta
from kernels.gate.ledger import Check, Ledger
from kernels.gate.sizes import Place
from kernels.gated_delta import CardReplay, ReplayPlan, reference
from kernels.tiles import ROWS

TAPS: Final = 4
SEQUENCES: Final = 3


@dataclass(frozen=True, slots=True)
class Weights:
    """`MixWeights` of a check."""

    conv: Tensor
    rate: Tensor
    dt_bias: Tensor

    def double(self) -> Weights:
        """On the CPU, for the twin."""
        return Weights(self.conv.cpu().double(), self.rate.cpu().double(), self.dt_bias.cpu().double())


def checks(place: Place) -> Iterator[tuple[str, Check]]:
    """Decode and verify with lazy folds, then prefill."""
    yield "gated delta verify", partial(_verify, place)
    yield "gated delta prefill", partial(_prefill, place)


def weights(place: Place) -> Weights:
    """Of one layer, at magnitudes where states neither vanish nor explode."""
    shape = place.sizes.delta
    return Weights(
        conv=place.normal(TAPS, shape.channels, seed=1, scale=0.5, dtype=torch.float32),
        rate=place.normal(shape.value_heads, seed=2, dtype=torch.float32).abs() * 0.3 + 0.05,
        dt_bias=place.normal(shape.value_heads, seed=3, dtype=torch.float32),
    )


class Slots:
    """States and rings of some slots, driven as a runner drives them: head and pending rows are the host's."""

    def __init__(self, place: Place, slots: int) -> None:
        shape = place.sizes.delta
        self.place, self.shape, self.weights = place, shape, weights(place)
        self.ring = TAPS - 1 + 3 * max(place.sizes.columns)
        self.state = place.normal(
            slots, shape.value_heads, shape.key_dim, shape.value_dim, seed=4, scale=0.1, dtype=torch.float32
        )
        self.state[:] = self.state[:1].clone()
        self.store = place.nan(slots, self.ring, shape.packed, dtype=torch.float32)
        self.windows = place.nan(slots, self.ring, shape.channels)
        self.windows[:, : TAPS - 1] = 0
        self.head, self.pending = [TAPS - 1] * slots, [0] * slots

    def verify(
        self, slots: Sequence[int], rows: Sequence[Tensor], stores: Sequence[bool], columns: int
    ) -> Tensor:
        """New rows of each slot, padded with NaN -> o [S, columns, value_heads, dv]."""
        width = self.shape.packed + self.shape.value_heads * self.shape.value_dim
        y = self.place.nan(len(slots), columns, width)
        for number, part in enumerate(rows):
            y[number, : len(part)] = part
        out = gated_delta.decode(
            y.flatten(0, 1), self.weights, self.state, self.store, self.windows,
            self._plan(slots, stores, [len(part) for part in rows], columns), self.shape,
            gated_delta.qk_scale(self.shape),
        )  # fmt: skip
        for slot, stored in zip(slots, stores, strict=True):
            if stored:
                self._folded(slot)
        return out.view(len(slots), columns, self.shape.value_heads, self.shape.value_dim)

    def flush(self, slot: int) -> None:
        """Fold what is pending now."""
        if self.pending[slot]:
            plan = self._plan([slot], [True], [0], 0)
            gated_delta.fold(self.state, self.store, plan, self.shape, gated_delta.qk_scale(self.shape))
            self._folded(slot)

    def _plan(
        self, slots: Sequence[int], stores: Sequence[bool], counts: Sequence[int], columns: int
    ) -> ReplayPlan:
        ints = self.place.ints
        return ReplayPlan.for_card(
            CardReplay(
                slots=ints(*slots),
                pending=ints(*(self.pending[slot] for slot in slots)),
                head=ints(*(self.head[slot] for slot in slots)),
                store_after=ints(*map(int, stores)),
                counts=ints(*counts),
                columns=columns,
            )
        )

    def _folded(self, slot: int) -> None:
        self.head[slot] = (self.head[slot] + self.pending[slot]) % self.ring
        self.pending[slot] = 0


def projected(place: Place, rows: int, seed: int) -> Tensor:
    """Rows as a projection leaves them: q k v, b, a, and a gate's columns that the mixer does not read."""
    shape = place.sizes.delta
    return place.normal(rows, shape.packed + shape.value_heads * shape.value_dim, seed=seed)


def _verify(place: Place, ledger: Ledger) -> None:
    widest = max(place.sizes.columns)
    total = 3 * widest
    rows = [projected(place, total, seed=10 + sequence) for sequence in range(SEQUENCES)]
    plain = Slots(place, SEQUENCES)
    expected: list[list[Tensor]] = [[] for _ in rows]
    for sequence, given in enumerate(rows):
        for at in range(total):
            expected[sequence].append(plain.verify([sequence], [given[at : at + 1]], [True], 1)[0, 0])
            plain.pending[sequence] = 1
        plain.flush(sequence)
    first = Slots(place, 1)
    exact, state = _exact(place, rows[0], first.state[0], first.windows[0, : TAPS - 1])
    ledger.close(torch.stack(expected[0]).cpu(), exact, 2e-5)
    ledger.close(plain.state[0].cpu(), state, 2e-5)
    for columns in place.sizes.columns:
        slots = _schedule(place, rows, expected, columns, ledger)
        for sequence in range(SEQUENCES):
            slots.flush(sequence)
            ledger.equal(
                slots.state[sequence], plain.state[sequence], f"state after launches of {columns} columns"
            )


def _schedule(
    place: Place, rows: Sequence[Tensor], expected: Sequence[Sequence[Tensor]], columns: int, ledger: Ledger
) -> Slots:
    """All sequences to their end in launches of `columns`, some rows rejected, states stored or not, and a padded slot."""
    dice = random.Random(columns)
    slots, at, total = Slots(place, SEQUENCES + 1), [0] * SEQUENCES, len(rows[0])
    while min(at) < total:
        counts = [min(dice.randint(min(1, total - done), columns), total - done) for done in at]
        kept = [dice.randint(min(1, count), count) for count in counts]
        stores = [
            dice.random() < 0.5 or slots.pending[s] + columns > slots.ring // 2 for s in range(SEQUENCES)
        ]
        given = []
        for sequence, (done, count, stays) in enumerate(zip(at, counts, kept, strict=True)):
            part = rows[sequence][done : done + count].clone()
            part[stays:] = projected(place, count - stays, seed=dice.randrange(1 << 30))
            given.append(part)
        order = dice.sample(range(SEQUENCES), SEQUENCES)
        out = slots.verify(
            [*order, SEQUENCES],
            [*(given[sequence] for sequence in order), given[0][:0]],
            [*(stores[sequence] for sequence in order), False],
            columns,
        )
        for number, sequence in enumerate(order):
            for t in range(kept[sequence]):
                what = f"column {t} of {columns}, row {at[sequence] + t}"
                ledger.equal(out[number, t], expected[sequence][at[sequence] + t], what)
            at[sequence] += kept[sequence]
            slots.pending[sequence] += kept[sequence]
        ledger.equal(out[SEQUENCES], torch.zeros_like(out[SEQUENCES]), "a padded sequence")
    return slots


def _prefill(place: Place, ledger: Ledger) -> None:
    shape, cuts = place.sizes.delta, place.sizes.cuts
    length = sum(cuts[0])
    y = projected(place, length, seed=20)
    made = weights(place)

    before = place.normal(
        shape.value_heads, shape.key_dim, shape.value_dim, seed=5, scale=0.1, dtype=torch.float32
    )
    tail = place.normal(TAPS - 1, shape.channels, seed=6)

    def run(cut: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        state, window = before.clone(), tail.clone()
        first, parts = 0, []
        for count in cut:
            padded = place.nan(-(-count // ROWS) * ROWS, y.shape[1])
            padded[:count] = y[first : first + count]
            out = gated_delta.prefill(padded, made, state, window, count, shape, gated_delta.qk_scale(shape))
            parts.append(out[:count])
            first += count
        return torch.cat(parts), state, window

    whole = run(cuts[0])
    for cut in cuts[1:]:
        for name, told, expected in zip(("rows", "state", "window"), run(cut), whole, strict=True):
            ledger.equal(told, expected, f"{name} of {length} rows cut as {cut}")
    exact, state = _exact(place, y, before, tail)
    limit = 1e-2 if place.dtype == torch.bfloat16 else 2e-5
    ledger.close(whole[0].cpu(), exact, limit)
    ledger.close(whole[1].cpu(), state, limit)


def _exact(place: Place, rows: Tensor, state: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """o [n, value_heads, dv] and the state after all rows, by the twin in float64, one row after another on the CPU."""
    shape, count = place.sizes.delta, len(rows)
    scale = gated_delta.qk_scale(shape).double()
    states = state.cpu().double()[None].clone()
    store = torch.zeros(count + 1, shape.packed, dtype=torch.float64)
    windows = torch.zeros(1, TAPS - 1 + count, shape.channels, dtype=torch.float64)
    windows[0, : TAPS - 1] = window.cpu()
    plan = ReplayPlan.build([0], [0], count, count, 1, TAPS - 1)
    given = rows.cpu().double()
    out = reference.decode(given, weights(place).double(), states, store, windows, plan, shape, scale)
    reference.fold(states, store, ReplayPlan.build([0], [count], 0, count, 1), shape, scale)
    return out, states[0]
