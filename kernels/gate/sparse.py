"""Sparse attention: which keys a row sees, and attention to them, at any column of any launch and any cut of a prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from kernels import paged_attention
from kernels.gate.latent import Rows
from kernels.gate.ledger import Check, Ledger
from kernels.gate.sizes import Place
from kernels.paged_attention import AttentionPlan
from kernels.tiles import ROWS


def checks(place: Place) -> Iterator[tuple[str, Check]]:
    """Verify, prefill."""
    yield "sparse verify", partial(_verify, place)
    yield "sparse prefill", partial(_prefill, place)


class Chosen(Rows):
    """Latent rows with an index key behind each."""

    def __init__(self, place: Place, lengths: Sequence[int]) -> None:
        self.index_heads, self.key_width, self.most = place.sizes.index
        super().__init__(place, lengths, behind=self.key_width)
        self.asked = place.normal(len(lengths), max(lengths), self.index_heads, self.key_width, seed=3)
        self.shares = place.normal(len(lengths), max(lengths), self.index_heads, seed=4)

    def launch_chosen(
        self, rows: Sequence[tuple[int, int, int]], columns: int, *, prefill: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Marks [S, columns, keys], zero where no key is, and attention [S, columns, heads, rank]; padding asks NaN."""
        query = self.place.nan(len(rows), columns, self.index_heads, self.key_width)
        shares = self.place.nan(len(rows), columns, self.index_heads)
        for number, (sequence, start, count) in enumerate(rows):
            query[number, :count] = self.asked[sequence, start : start + count]
            shares[number, :count] = self.shares[sequence, start : start + count]
        plan = AttentionPlan.for_card(self.card(rows, columns, prefill=prefill))
        keys = self.plane[..., -self.key_width :]
        plan = paged_attention.narrowed(query.flatten(0, 1), shares.flatten(0, 1), keys, plan, self.most)
        assert plan.card is not None
        assert plan.card.seen is not None
        marks = plan.card.seen.unflatten(0, (len(rows), columns)).clone()
        for number, (_, start, count) in enumerate(rows):
            for t in range(columns):
                marks[number, t, start + t + 1 if t < count else 0 :] = 0
        return marks, self.attended(rows, columns, plan)

    def judge(self, ledger: Ledger, marks: Tensor, sequence: int, position: int) -> None:
        """As many keys as there may be, and the scores that they have against the best by float64."""
        keys = self.fresh[sequence, : position + 1, -self.key_width :].double()
        each = (self.asked[sequence, position].double() @ keys.T).relu()
        scores = (each * self.shares[sequence, position].double()[:, None]).sum(0)
        best = min(self.most, position + 1)
        ledger.equal(marks.sum(), marks.new_full((), best).sum(), f"keys that position {position} sees")
        found = scores[marks[: position + 1] != 0]
        ledger.close(found.sum()[None], scores.topk(best).values.sum()[None], self.place.limit(half=1e-5))


def _verify(place: Place, ledger: Ledger) -> None:
    """Rows around every edge, alone as plain decode and at every column of launches with other sequences."""
    sizes = place.sizes
    widest = max(sizes.columns)
    pages = Chosen(place, [edge + widest for edge in sizes.edges])
    starts = [max(0, edge - widest // 2) for edge in sizes.edges]
    alone: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for sequence, start in enumerate(starts):
        for position in range(start, start + widest):
            marks, out = pages.launch_chosen([(sequence, position, 1)], 1)
            alone[sequence, position] = marks[0, 0], out[0, 0]
            pages.judge(ledger, marks[0, 0], sequence, position)
    dice = random.Random(2)
    for columns in sizes.columns:
        rows = [(sequence, start, dice.randint(0, columns)) for sequence, start in enumerate(starts)]
        dice.shuffle(rows)
        marks, out = pages.launch_chosen(rows, columns)
        for number, (sequence, start, count) in enumerate(rows):
            for t in range(count):
                what = f"column {t} of {columns}, position {start + t}, {len(rows)} sequences"
                seen, expected = alone[sequence, start + t]
                ledger.equal(marks[number, t], seen, f"marks, {what}")
                ledger.equal(out[number, t], expected, what)


def _prefill(place: Place, ledger: Ledger) -> None:
    """One prompt, whole and in every cut."""
    cuts = place.sizes.cuts
    length = sum(cuts[0])
    pages = Chosen(place, [length, 70])
    first_cut: list[Tensor] = []
    for cut in cuts:
        at = 0
        for count in cut:
            columns = -(-count // ROWS) * ROWS
            marks, out = pages.launch_chosen([(0, at, count)], columns, prefill=True)
            for t in range(count):
                if cut is cuts[0]:
                    first_cut += [marks[0, t], out[0, t]]
                    continue
                ledger.equal(marks[0, t], first_cut[2 * (at + t)], f"marks of row {at + t} cut as {cut}")
                ledger.equal(out[0, t], first_cut[2 * (at + t) + 1], f"row {at + t} cut as {cut}")
            at += count
    for position in {0, 63, 64, length - 1}:
        pages.judge(ledger, first_cut[2 * position], 0, position)
