"""Latent rows: written where they belong, read as key and as value at any column of any launch, routed by a sigmoid."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels import experts, paged_attention
from kernels.gate.ledger import Check, Ledger
from kernels.gate.rowwise import rows_alone
from kernels.gate.sizes import Place
from kernels.paged_attention import SPLIT_ROWS, AttentionPlan, CardAttention, WritePlan
from kernels.tiles import ROWS


def checks(place: Place) -> Iterator[tuple[str, Check]]:
    """Verify with its writes, prefill, the router."""
    yield "latent verify", partial(_verify, place)
    yield "latent prefill", partial(_prefill, place)
    yield "sigmoid router", partial(_router, place)


class Rows:
    """Sequences of the given lengths, written by launches into scattered blocks of a plane that nobody wrote before."""

    def __init__(self, place: Place, lengths: Sequence[int], *, behind: int = 0) -> None:
        """`behind` elements stand at the end of a row that attention does not read."""
        self.place, self.lengths = place, tuple(lengths)
        self.heads, self.rank, rope = place.sizes.latent
        self.width = self.rank + rope
        blocks = max(-(-length // ROWS) for length in lengths) + 1
        self.plane = place.nan(blocks * len(lengths), 1, ROWS, self.width + behind)
        order = torch.randperm(blocks * len(lengths), generator=torch.Generator().manual_seed(len(lengths)))
        self.tables = order.view(len(lengths), -1).to(place.device, torch.int32)
        most = max(lengths)
        self.fresh = place.normal(len(lengths), most, self.width + behind, seed=1)
        self.query = place.normal(len(lengths), most, self.heads, self.width, seed=2, scale=self.width**-0.5)
        card = self.card([(sequence, 0, length) for sequence, length in enumerate(lengths)], most)
        nothing = place.ints()
        paged_attention.write_latent(
            self.fresh.flatten(0, 1), self.plane, WritePlan(nothing, nothing, card=card)
        )

    def card(
        self, rows: Sequence[tuple[int, int, int]], columns: int, *, prefill: bool = False
    ) -> CardAttention:
        """Of (sequence, start, count) each."""
        return CardAttention(
            block_tables=self.tables[[sequence for sequence, _, _ in rows]].contiguous(),
            starts=self.place.ints(*(start for _, start, _ in rows)),
            counts=self.place.ints(*(count for _, _, count in rows)),
            columns=columns,
            max_splits=-(-max(self.lengths) // SPLIT_ROWS),
            prefill=prefill,
        )

    def launch(self, rows: Sequence[tuple[int, int, int]], columns: int, *, prefill: bool = False) -> Tensor:
        """[S, columns, heads, rank]; padding holds NaN."""
        plan = AttentionPlan.for_card(self.card(rows, columns, prefill=prefill))
        return self.attended(rows, columns, plan)

    def attended(self, rows: Sequence[tuple[int, int, int]], columns: int, plan: AttentionPlan) -> Tensor:
        """`launch` by a plan of these rows."""
        query = self.place.nan(len(rows), columns, self.heads, self.width)
        for number, (sequence, start, count) in enumerate(rows):
            query[number, :count] = self.query[sequence, start : start + count]
        out = paged_attention.attend_latent(query.flatten(0, 1), self.plane, plan, self.rank)
        return out.unflatten(0, (-1, columns))

    def exact(self, sequence: int, position: int) -> Tensor:
        """A row by float64 softmax: [heads, rank]."""
        rows = self.fresh[sequence, : position + 1].double()
        weights = (self.query[sequence, position].double() @ rows.T).softmax(-1)
        return weights @ rows[:, : self.rank]


def _verify(place: Place, ledger: Ledger) -> None:
    """Rows around every edge, alone as plain decode and at every column of launches with other sequences."""
    sizes = place.sizes
    widest = max(sizes.columns)
    pages = Rows(place, [edge + widest for edge in sizes.edges])
    starts = [max(0, edge - widest // 2) for edge in sizes.edges]
    alone: dict[tuple[int, int], Tensor] = {}
    for sequence, start in enumerate(starts):
        for position in range(start, start + widest):
            row = pages.launch([(sequence, position, 1)], 1)[0, 0]
            alone[sequence, position] = row
            ledger.close(row, pages.exact(sequence, position), place.limit(half=6e-3, single=5e-6))
    dice = random.Random(1)
    for columns in sizes.columns:
        rows = [(sequence, start, dice.randint(0, columns)) for sequence, start in enumerate(starts)]
        dice.shuffle(rows)
        out = pages.launch(rows, columns)
        for number, (sequence, start, count) in enumerate(rows):
            for t in range(count):
                what = f"column {t} of {columns}, position {start + t}, {len(rows)} sequences"
                ledger.equal(out[number, t], alone[sequence, start + t], what)
            nothing = torch.zeros_like(out[number, count:])
            ledger.equal(out[number, count:], nothing, f"padding behind {count} of {columns} columns")


def _prefill(place: Place, ledger: Ledger) -> None:
    """One prompt, whole and in every cut."""
    cuts = place.sizes.cuts
    length = sum(cuts[0])
    pages = Rows(place, [length, 70])
    wholes: list[Tensor] = []
    for cut in cuts:
        first, parts = 0, []
        for count in cut:
            columns = -(-count // ROWS) * ROWS
            parts.append(pages.launch([(0, first, count)], columns, prefill=True)[0, :count])
            first += count
        wholes.append(torch.cat(parts))
        ledger.equal(wholes[-1], wholes[0], f"{length} rows cut as {cut}")
    for position in {0, 63, 64, length - 1}:
        ledger.close(wholes[0][position], pages.exact(0, position), place.limit(half=8e-3, single=5e-6))


def _router(place: Place, ledger: Ledger) -> None:
    """Choices and weights, alone and in every count of rows, with and without groups."""
    sizes = place.sizes
    rows = max(sizes.counts) + 64
    logits = place.normal(rows, sizes.experts, seed=5, dtype=torch.float32)
    bias = place.normal(sizes.experts, seed=6, scale=0.1, dtype=torch.float32)
    for groups, best in ((1, 1), (4, 2)):

        def route(part: Tensor, groups: int = groups, best: int = best) -> Tensor:
            routes = experts.route_grouped(
                part, bias, sizes.top_k, groups=groups, best_groups=best, factor=2.5
            )
            return torch.cat([routes.ids.float(), routes.weights], dim=1)

        rows_alone(ledger, route, [logits], sizes.counts)
