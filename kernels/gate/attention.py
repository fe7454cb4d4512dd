"""Paged attention: a row at any column of any launch, lengths at every edge, prompts cut anywhere on the grid."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels import paged_attention
from kernels.gate.ledger import Check, Ledger
from kernels.gate.sizes import Place
from kernels.paged_attention import SPLIT_ROWS, AttentionPlan, CardAttention
from kernels.tiles import ROWS


def checks(place: Place) -> Iterator[tuple[str, Check]]:
    """Decode and verify, then prefill, with and without a window."""
    for window in place.sizes.windows:
        label = f" window {window}" if window else ""
        yield f"attention verify{label}", partial(_verify, place, window)
        yield f"attention prefill{label}", partial(_prefill, place, window)


class Pages:
    """Sequences of the given lengths, their blocks scattered in a plane where nothing else was ever written.

    Behind a sequence's last row its page of values holds zeros, as a write leaves it.
    """

    def __init__(self, place: Place, lengths: Sequence[int]) -> None:
        sizes = place.sizes
        self.place, self.lengths = place, tuple(lengths)
        self.table_width = max(-(-length // ROWS) for length in lengths) + 1
        blocks = self.table_width * len(lengths)
        shape = blocks, sizes.kv_heads, ROWS, sizes.head_dim
        self.keys, self.values = place.nan(*shape), place.nan(*shape)
        generator = torch.Generator().manual_seed(len(lengths))
        self.tables = (
            torch.randperm(blocks, generator=generator).view(len(lengths), -1).to(place.device, torch.int32)
        )
        most = max(lengths)
        self.query = place.normal(
            len(lengths), most, sizes.heads, sizes.head_dim, seed=1, scale=sizes.head_dim**-0.5
        )
        self.gate = place.normal(len(lengths), most, sizes.heads * sizes.head_dim, seed=2)
        self.fresh = place.normal(2, len(lengths), most, sizes.kv_heads, sizes.head_dim, seed=3)
        for sequence, length in enumerate(lengths):
            at = torch.arange(length, device=place.device)
            where = self.tables[sequence, at // ROWS].long()
            self.values[where] = 0
            for part, pool in zip(self.fresh, (self.keys, self.values), strict=True):
                pool[where, :, at % ROWS] = part[sequence, :length]

    def launch(
        self,
        rows: Sequence[tuple[int, int, int]],
        columns: int,
        *,
        window: int = 0,
        prefill: bool = False,
        more_splits: int = 0,
    ) -> Tensor:
        """(sequence, start, count) each -> [S, columns, heads, d]; padding holds NaN."""
        place, sizes = self.place, self.place.sizes
        query = place.nan(len(rows), columns, sizes.heads, sizes.head_dim)
        gate = place.nan(len(rows), columns, sizes.heads * sizes.head_dim)
        for number, (sequence, start, count) in enumerate(rows):
            query[number, :count] = self.query[sequence, start : start + count]
            gate[number, :count] = self.gate[sequence, start : start + count]
        card = CardAttention(
            block_tables=self.tables[[sequence for sequence, _, _ in rows]].contiguous(),
            starts=place.ints(*(start for _, start, _ in rows)),
            counts=place.ints(*(count for _, _, count in rows)),
            columns=columns,
            max_splits=-(-max(self.lengths) // SPLIT_ROWS) + more_splits,
            window=window,
            prefill=prefill,
        )
        out = paged_attention.attend(
            query.flatten(0, 1), self.keys, self.values, AttentionPlan.for_card(card), gate.flatten(0, 1)
        )
        return out.view(query.shape)

    def exact(self, sequence: int, position: int, window: int) -> Tensor:
        """A row by float64 softmax, gated: [heads, d]."""
        first = max(0, position - window + 1) if window else 0
        group = self.place.sizes.heads // self.place.sizes.kv_heads
        keys, values = (
            part[sequence, first : position + 1].double().repeat_interleave(group, 1) for part in self.fresh
        )
        weights = torch.einsum("hd,khd->hk", self.query[sequence, position].double(), keys).softmax(-1)
        gate = self.gate[sequence, position].double().view(self.place.sizes.heads, -1)
        return torch.einsum("hk,khd->hd", weights, values) * gate.sigmoid()


def _verify(place: Place, window: int, ledger: Ledger) -> None:
    """Rows around every edge, alone as plain decode and at every column of launches with other sequences."""
    sizes = place.sizes
    widest = max(sizes.columns)
    pages = Pages(place, [edge + widest for edge in sizes.edges])
    starts = [max(0, edge - widest // 2) for edge in sizes.edges]
    alone: dict[tuple[int, int], Tensor] = {}
    for sequence, start in enumerate(starts):
        for position in range(start, start + widest):
            row = pages.launch([(sequence, position, 1)], 1, window=window)[0, 0]
            alone[sequence, position] = row
            ledger.close(row, pages.exact(sequence, position, window), place.limit(half=6e-3, single=5e-6))
    dice = random.Random(window)
    for columns in sizes.columns:
        counts = [dice.randint(0 if columns > 1 else 1, columns) for _ in starts]
        counts[dice.randrange(len(counts))] = columns
        rows = [(sequence, start, counts[sequence]) for sequence, start in enumerate(starts)]
        dice.shuffle(rows)
        out = pages.launch(rows, columns, window=window, more_splits=dice.randint(0, 2))
        for number, (sequence, start, count) in enumerate(rows):
            for t in range(count):
                what = f"column {t} of {columns}, position {start + t}, {len(rows)} sequences"
                ledger.equal(out[number, t], alone[sequence, start + t], what)
            nothing = torch.zeros_like(out[number, count:])
            ledger.equal(out[number, count:], nothing, f"padding behind {count} of {columns} columns")


def _prefill(place: Place, window: int, ledger: Ledger) -> None:
    """One prompt, whole and in every cut; another sequence's pages hold other rows."""
    cuts = place.sizes.cuts
    length = sum(cuts[0])
    pages = Pages(place, [length, 70])
    wholes = []
    for cut in cuts:
        first, parts = 0, []
        for count in cut:
            columns = -(-count // ROWS) * ROWS
            out = pages.launch([(0, first, count)], columns, window=window, prefill=True)
            parts.append(out[0, :count])
            first += count
        wholes.append(torch.cat(parts))
        ledger.equal(wholes[-1], wholes[0], f"{length} rows cut as {cut}")
    for position in {0, 63, 64, length - 1}:
        exact = pages.exact(0, position, window)
        ledger.close(wholes[0][position], exact, place.limit(half=8e-3, single=5e-6))
