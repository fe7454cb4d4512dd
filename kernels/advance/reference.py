"""The end of a round, defined: what the device kernel must meet bit for bit, all of it integers and copies."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.advance.plan import RoundState


def advance(
    state: RoundState, picks: Tensor, ids: Tensor, hidden: Tensor, *, decreed: Tensor | None = None
) -> Tensor:
    """Commit a round and say where the next one starts.

    `picks` int32 [S, T]: the target's token after every column, -1 = a broken row. `ids` int32 [S, T]: what the columns
    were fed; column 0 becomes the next anchor. `hidden` [S, T, H] of the columns. `decreed` int32 [>= S]: accepted drafts
    by decree instead of the walk, for a benchmark of random weights.

    Answers int32 [S, 2 T]: each sequence's picks, its drafts, then the rows that it commits (0 = padding). A draft
    stands when it is what the target picked before it, no stop id came earlier, and it lies within `counts`. A sequence
    whose newest pick is a stop id or broken has nothing `left`; one without `left` is padding from then on, and folds no
    more, since nobody asks for rounds after its end.
    """
    sequences, columns = picks.shape
    starts, counts, left = (part[:sequences] for part in (state.starts, state.counts, state.left))
    pending, head = state.pending[:sequences], state.head[:sequences]
    store, stops = state.store_after[:sequences], state.stops[:sequences]
    accepted = _accepted(picks, ids, counts, stops) if decreed is None else decreed[:sequences]
    accepted = torch.minimum(accepted, (counts - 1).clamp_min(0))
    rows = torch.where(counts > 0, accepted + 1, 0)
    told = torch.cat([picks, ids[:, 1:], rows[:, None]], dim=1)

    state.tail_tokens[:sequences, :columns] = picks
    state.tail_hidden[:sequences, :columns] = hidden
    state.tail_counts[:sequences] = rows
    anchor = picks.gather(1, accepted[:, None].long()).squeeze(1)
    ended = (anchor[:, None] == stops).any(1) | (anchor < 0)
    ids[:, 0] = anchor.clamp_min(0)
    left.sub_(rows).masked_fill_(ended, 0)
    starts.add_(rows)
    folded = pending * store
    head.copy_((head + folded) % state.capacity)
    pending.add_(rows - folded)
    counts.copy_(torch.minimum(left.clamp_min(0), state.wide[:sequences]))
    store.copy_((pending >= state.fold_rows) & (counts > 0))
    return told


def _accepted(picks: Tensor, ids: Tensor, counts: Tensor, stops: Tensor) -> Tensor:
    """int32 [S]: columns after the anchor's that were fed what the target picked, before the first stop id."""
    inside = torch.arange(1, picks.shape[1], device=picks.device)[None, :] < counts[:, None]
    ends = (picks[:, :-1, None] == stops[:, None, :]).any(2)
    stands = (picks[:, :-1] == ids[:, 1:]) & inside & ~ends
    return stands.int().cumprod(dim=1).sum(dim=1, dtype=torch.int32)
