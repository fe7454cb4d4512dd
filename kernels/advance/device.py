"""The end of a round in one launch: a program a sequence walks and moves the integers, the others copy hiddens.

As torch operations it is some 25 launches and half a dozen copies, which a graph replays one after the other: each costs
more than the work it does, on the device and in the host's launch of the graph.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.advance.plan import STOPS, RoundState

_COPIED: Final = 2048
"""Elements of the hiddens a program copies."""


@triton.jit(do_not_specialize=["columns", "hidden_width", "tail_columns", "capacity", "fold_rows"])
def _advance(
    picks, ids, hidden, told, starts, counts, left, wide, stops, pending, head, store_after, tail_tokens, tail_counts,
    tail_hidden, decreed, columns, hidden_width, tail_columns, capacity, fold_rows,
    WIDTH: tl.constexpr, STOPS: tl.constexpr, DECREED: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part > 0:
        element = (part - 1) * COPIED + tl.arange(0, COPIED)
        live = element < columns * hidden_width
        copied = tl.load(hidden + sequence * columns * hidden_width + element, mask=live)
        tl.store(tail_hidden + sequence * tail_columns * hidden_width + element, copied, mask=live)
    else:
        at = tl.arange(0, WIDTH)
        column = at < columns
        count = tl.load(counts + sequence)
        pick = tl.load(picks + sequence * columns + at, mask=column, other=-1)
        draft = tl.load(ids + sequence * columns + 1 + at, mask=at < columns - 1, other=-1)
        stop = tl.load(stops + sequence * STOPS + tl.arange(0, STOPS))
        if DECREED:
            accepted = tl.load(decreed + sequence)
        else:
            ends = tl.max((pick[:, None] == stop[None, :]).to(tl.int32), axis=1) > 0
            stands = (at < count - 1) & (pick == draft) & (ends == 0)
            accepted = tl.min(tl.where(stands, WIDTH, at), axis=0)
        accepted = tl.minimum(accepted, tl.maximum(count - 1, 0))
        rows = tl.where(count > 0, accepted + 1, 0)

        mine = told + sequence * 2 * columns
        tl.store(mine + at, pick, mask=column)
        tl.store(mine + columns + at, draft, mask=at < columns - 1)
        tl.store(mine + 2 * columns - 1, rows)
        tl.store(tail_tokens + sequence * tail_columns + at, pick, mask=column)
        tl.store(tail_counts + sequence, rows)

        anchor = tl.sum(tl.where(at == accepted, pick, 0), axis=0)
        ended = (tl.max((stop == anchor).to(tl.int32), axis=0) > 0) | (anchor < 0)
        tl.store(ids + sequence * columns, tl.maximum(anchor, 0))
        still = tl.where(ended, 0, tl.load(left + sequence) - rows)
        tl.store(left + sequence, still)
        tl.store(starts + sequence, tl.load(starts + sequence) + rows)
        waiting = tl.load(pending + sequence)
        folded = waiting * tl.load(store_after + sequence)
        tl.store(head + sequence, (tl.load(head + sequence) + folded) % capacity)
        waiting += rows - folded
        tl.store(pending + sequence, waiting)
        count = tl.minimum(tl.maximum(still, 0), tl.load(wide + sequence))
        tl.store(counts + sequence, count)
        tl.store(store_after + sequence, ((waiting >= fold_rows) & (count > 0)).to(tl.int32))


def advance(
    state: RoundState, picks: Tensor, ids: Tensor, hidden: Tensor, *, decreed: Tensor | None = None
) -> Tensor:
    """As the twin; `picks`, `ids` and `hidden` are contiguous. Raises ValueError when one is not."""
    if not (picks.is_contiguous() and ids.is_contiguous() and hidden.is_contiguous()):
        raise ValueError("picks, ids and hiddens of a round are contiguous")
    sequences, columns = picks.shape
    told = torch.empty(sequences, 2 * columns, dtype=torch.int32, device=picks.device)
    copies = triton.cdiv(columns * hidden.shape[-1], _COPIED)
    _advance[(sequences, 1 + copies)](
        picks, ids, hidden, told, state.starts, state.counts, state.left, state.wide, state.stops, state.pending,
        state.head, state.store_after, state.tail_tokens, state.tail_counts, state.tail_hidden,
        picks if decreed is None else decreed, columns, hidden.shape[-1], state.tail_tokens.shape[1], state.capacity,
        state.fold_rows, WIDTH=triton.next_power_of_2(columns), STOPS=STOPS, DECREED=decreed is not None, COPIED=_COPIED,
        num_warps=1,
    )  # fmt: skip
    return told
