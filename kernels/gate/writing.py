"""The launch that norms, turns and writes: queries and page bytes of rows together, alone, and of prompts in every cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kernels import paged_attention
from kernels.gate.ledger import Check, Ledger
from kernels.gate.sizes import Place
from kernels.norm_rope import rope_table
from kernels.paged_attention import CardAttention, WritePlan
from kernels.tiles import ROWS

EPS: Final = 1e-6

Rows = Sequence[tuple[int, int, int]]
"""(sequence, first row, rows) of a launch."""


def checks(place: Place) -> Iterator[tuple[str, Check]]:
    """With norms and a gate between keys and values, and without either."""
    for normed in (True, False):
        label = "" if normed else " plain"
        yield f"write verify{label}", partial(_verify, place, normed=normed)
        yield f"write prefill{label}", partial(_prefill, place, normed=normed)


class Writer:
    """Projected rows of some sequences, from position 0 on, and where they go."""

    def __init__(self, place: Place, lengths: Sequence[int], *, normed: bool) -> None:
        sizes = place.sizes
        self.place, self.lengths, self.normed = place, tuple(lengths), normed
        heads = (2 * sizes.heads if normed else sizes.heads) + 2 * sizes.kv_heads
        self.y = place.normal(len(lengths), max(lengths), heads * sizes.head_dim, seed=4)
        self.scale = 1 + place.normal(
            sizes.heads + sizes.kv_heads, sizes.head_dim, seed=5, scale=0.1, dtype=torch.float32
        )
        self.rope = rope_table(2 * sizes.rotary_half, 1e6, max(lengths) + ROWS).to(place.device)
        pages = max(lengths) // ROWS + 2
        self.tables = torch.arange(pages * len(lengths), device=place.device, dtype=torch.int32)
        self.tables = self.tables.view(len(lengths), pages)

    def pools(self) -> Tensor:
        """Keys and values that nobody wrote: [2, blocks, kv_heads, 64, d]."""
        sizes = self.place.sizes
        return self.place.nan(2, self.tables.numel(), sizes.kv_heads, ROWS, sizes.head_dim)

    def launch(self, rows: Rows, columns: int, pools: Tensor, *, prefill: bool = False) -> Tensor:
        """Queries [S, columns, heads, d]; rows that are padding hold anything."""
        place = self.place
        starts, counts = [start for _, start, _ in rows], [count for _, _, count in rows]
        y = place.nan(len(rows), columns, self.y.shape[2])
        for number, (sequence, start, count) in enumerate(rows):
            y[number, :count] = self.y[sequence, start : start + count]
        card = CardAttention(
            block_tables=self.tables[[sequence for sequence, _, _ in rows]].contiguous(),
            starts=place.ints(*starts),
            counts=place.ints(*counts),
            columns=columns,
            max_splits=1,
            prefill=prefill,
        )
        positions = torch.tensor(starts)[:, None] + torch.arange(columns)
        angles = self.rope[positions.clamp(max=len(self.rope) - 1).flatten().to(place.device)]
        plan = WritePlan(angles.contiguous(), torch.empty(0, dtype=torch.int64), None, card)
        eps = EPS if self.normed else None
        out = paged_attention.qk_norm_rope_write(y.flatten(0, 1), self.scale, pools[0], pools[1], plan, eps)
        return out.view(len(rows), columns, place.sizes.heads, place.sizes.head_dim)

    def exact(self, sequence: int, position: int) -> Tensor:
        """Queries of a row in float64: [heads, d]."""
        sizes = self.place.sizes
        x = self.y[sequence, position].double().view(-1, sizes.head_dim)[: sizes.heads]
        if self.normed:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        x = x * self.scale[: sizes.heads]
        cos, sin = self.rope[position].double()
        half = sizes.rotary_half
        one, other = x[:, :half], x[:, half : 2 * half]
        return torch.cat([one * cos - other * sin, other * cos + one * sin, x[:, 2 * half :]], 1)


def _verify(place: Place, ledger: Ledger, *, normed: bool) -> None:
    """Rows around every edge: all sequences in one launch, against a launch for each row."""
    columns = max(place.sizes.columns)
    writer = Writer(place, [edge + columns for edge in place.sizes.edges], normed=normed)
    rows = [
        (sequence, max(0, edge - columns // 2), columns - sequence % 3)
        for sequence, edge in enumerate(place.sizes.edges)
    ]
    together, apart = writer.pools(), writer.pools()
    whole = writer.launch([*rows, (0, 0, 0)], columns, together)
    for number, (sequence, start, count) in enumerate(rows):
        for t in range(count):
            row = writer.launch([(sequence, start + t, 1)], 1, apart)[0, 0]
            ledger.equal(whole[number, t], row, f"query of column {t}, position {start + t}")
            ledger.close(row, writer.exact(sequence, start + t), place.limit(single=2e-6))
    ledger.equal(together, apart, "pages")


def _prefill(place: Place, ledger: Ledger, *, normed: bool) -> None:
    """One prompt in every cut."""
    cuts = place.sizes.cuts
    length = sum(cuts[0])
    writer = Writer(place, [length], normed=normed)
    wholes: list[tuple[Tensor, Tensor]] = []
    for cut in cuts:
        pools, first, parts = writer.pools(), 0, []
        for count in cut:
            columns = -(-count // ROWS) * ROWS
            out = writer.launch([(0, first, count)], columns, pools, prefill=True)
            parts.append(out[0, :count])
            first += count
        wholes.append((torch.cat(parts), pools))
        ledger.equal(wholes[-1][0], wholes[0][0], f"queries of {length} rows cut as {cut}")
        ledger.equal(pools, wholes[0][1], f"pages of {length} rows cut as {cut}")
    for position in (0, 63, 64, length - 1):
        ledger.close(wholes[0][0][position], writer.exact(0, position), place.limit(single=2e-6))
