"""Paged attention: a row at any column of any launch, lengths at every edge, prompts cut anywhere on the grid; the write."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels import paged_attention
from kernels.gate.ledger import Check, Ledger
from kernels.gate.sizes import Place
from kernels.norm_rope import rope_table
from kernels.paged_attention import SPLIT_ROWS, AttentionPlan, CardAttention, WritePlan
from kernels.tiles import ROWS

EPS = 1e-6


def checks(place: Place) -> Iterator[tuple[str, Check]]:
    """Decode and verify, prefill, and the launch that writes."""
    for window in place.sizes.windows:
        label = f" window {window}" if window else ""
        yield f"attention verify{label}", partial(_verify, place, window)
        yield f"attention prefill{label}", partial(_prefill, place, window)
    yield "attention norm, rope, write", partial(_write, place)


class Pages:
    """Sequences of the given lengths, their blocks scattered in a plane where nothing else was ever written.

    Behind a sequence's last row its page holds zeros, as a write leaves it.
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
            for part, pool in zip(self.fresh, (self.keys, self.values), strict=True):
                pool[where] = 0
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


def _write(place: Place, ledger: Ledger) -> None:
    """Rows of all sequences in one launch, against every row in a launch of its own: queries and pages."""
    sizes = place.sizes
    columns = max(sizes.columns)
    starts = [max(0, edge - columns // 2) for edge in sizes.edges]
    counts = [columns - number % 3 for number in range(len(starts))]
    width = (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    y = place.normal(len(starts), columns, width, seed=4)
    scale = 1 + place.normal(
        sizes.heads + sizes.kv_heads, sizes.head_dim, seed=5, scale=0.1, dtype=torch.float32
    )
    rope = rope_table(2 * sizes.rotary_half, 1e6, max(starts) + columns).to(place.device)
    table = max(starts) // ROWS + 2
    blocks = torch.arange(table * len(starts), device=place.device, dtype=torch.int32).view(len(starts), -1)

    def launch(
        sequences: Sequence[int], first: int, taken: Sequence[int], wide: int, pools: Tensor
    ) -> Tensor:
        at = [starts[sequence] + first for sequence in sequences]
        card = CardAttention(
            blocks[list(sequences)].contiguous(), place.ints(*at), place.ints(*taken), wide, 1
        )
        positions = torch.tensor(at)[:, None] + torch.arange(wide)
        turned = rope[positions.clamp(max=len(rope) - 1).flatten().to(place.device)]
        plan = WritePlan(turned.contiguous(), torch.empty(0, dtype=torch.int64), None, card)
        given = y[list(sequences), first : first + wide].reshape(-1, width)
        out = paged_attention.qk_norm_rope_write(given.contiguous(), scale, pools[0], pools[1], plan, EPS)
        return out.view(len(sequences), wide, sizes.heads, sizes.head_dim)

    pools = [place.nan(2, table * len(starts), sizes.kv_heads, ROWS, sizes.head_dim) for _ in range(2)]
    whole = launch(range(len(starts)), 0, counts, columns, pools[0])
    for sequence, count in enumerate(counts):
        for t in range(count):
            row = launch([sequence], t, [1], 1, pools[1])[0, 0]
            ledger.equal(whole[sequence, t], row, f"query of column {t} of sequence {sequence}")
    ledger.equal(pools[0], pools[1], "pages")
    first = y[0, 0].double().view(-1, sizes.head_dim)[: sizes.heads]
    normed = first * torch.rsqrt(first.square().mean(-1, keepdim=True) + EPS) * scale[: sizes.heads]
    cos, sin = rope[starts[0]].double()
    one, other = normed[:, : sizes.rotary_half], normed[:, sizes.rotary_half : 2 * sizes.rotary_half]
    turned = torch.cat(
        [one * cos - other * sin, other * cos + one * sin, normed[:, 2 * sizes.rotary_half :]], 1
    )
    ledger.close(whole[0, 0], turned, place.limit(single=2e-6))
