"""The walk over a block's output rows where they lie: drafts are picked left to right without asking the host.

The same as `block_heads` and `drafters.block` do row by row, for many sequences at once and inside a launch that may be
kept as a graph: what a draft adds to the row after it is gathered on the card. Rows are picked by the streams' own rules
(`kernels.sampling`), so a draft is what the host would have picked, but for a broken row, which costs its drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import sampling
from kernels.sampling import PickPlan
from services.gpu_worker.engine.models.block_heads import CONFIDENT, BlockHeads


class BlockWalk:
    """Over the heads of one drafter. Stateless between calls."""

    def __init__(self, heads: BlockHeads, device: torch.device) -> None:
        self._heads = heads
        self._predecessor, self._successor = (
            torch.from_numpy(book).to(device) for book in (heads.predecessor, heads.successor)
        )
        ids = heads.ids
        self._ids = None if ids is None else ids.to(device=device, dtype=torch.int32)

    def __call__(
        self, y: Tensor, anchors: Tensor, starts: Tensor, most: int, rules: PickPlan
    ) -> tuple[Tensor, Tensor]:
        """Output rows y [S, B, H] of blocks whose `anchors` int32 [S] stand at `starts` int32 [S]: drafts int32 [S, K] with
        K <= `most`, and int32 [S] how many of them, from the first on, the drafter believes in."""
        rows = self._heads.rows(y, most)
        flat = rows.flatten(0, 1)
        logits = self._heads.logits(flat, narrow=True)
        if self._heads.projection is not None:
            return _believed(self._selected(logits, rows, anchors, starts, rules))
        if self._heads.markov is not None or self._heads.confidence is not None:
            return self._shifted(logits.view(*rows.shape[:2], -1), rows, anchors, starts, rules)
        picked = sampling.pick(logits, rules.of(starts, rows.shape[1]), id_map=self._ids).ids
        return _believed(picked.clamp_min(0).view(rows.shape[:2]))

    def _selected(
        self, logits: Tensor, rows: Tensor, anchors: Tensor, starts: Tensor, rules: PickPlan
    ) -> Tensor:
        """Few candidates a row, scored anew by the draft before it."""
        sequences, count, _ = rows.shape
        values, ids = (
            part.view(sequences, count, -1) for part in logits.topk(self._heads.top, dim=-1, sorted=False)
        )
        assert self._heads.projection is not None
        hidden = (rows @ self._heads.projection.t()).float()
        after = self._successor[ids]  # [S, K, candidates, rank]
        row = logits.new_empty(sequences, logits.shape[-1])
        before, drafts = anchors, []
        for k in range(count):
            weight = self._predecessor.index_select(0, before) * hidden[:, k]
            scores = values[:, k] + (after[:, k] @ weight[:, :, None]).squeeze(2)
            row.fill_(-torch.inf).scatter_(1, ids[:, k], scores)
            before = sampling.pick(row, rules.of(starts + k, 1)).ids.clamp_min(0)
            drafts.append(before)
        return torch.stack(drafts, 1)

    def _shifted(
        self, logits: Tensor, rows: Tensor, anchors: Tensor, starts: Tensor, rules: PickPlan
    ) -> tuple[Tensor, Tensor]:
        """Rows that the token before them shifts, each with a chance of standing where there is a head for it."""
        markov, before = self._heads.markov, anchors
        drafts, stand = [], []
        for k in range(rows.shape[1]):
            row, features = logits[:, k], rows[:, k]
            if markov is not None:
                first = markov[0].index_select(0, before)
                row = row + (first @ markov[1][: row.shape[1]].t()).float()
                if self._heads.confidence_with_markov:
                    features = torch.cat([features, first], 1)
            stand.append(self._stands(features))
            plan = rules.of(starts + k, 1)
            before = sampling.pick(row.contiguous(), plan, id_map=self._ids).ids.clamp_min(0)
            drafts.append(before)
        made = torch.stack(drafts, 1)
        return made, torch.stack(stand, 1).int().cumprod(1).sum(1, dtype=torch.int32)

    def _stands(self, features: Tensor) -> Tensor:
        """bool [S]: whether a draft is worth its column."""
        head = self._heads.confidence
        if head is None:
            return torch.ones(len(features), dtype=torch.bool, device=features.device)
        return torch.sigmoid((features.float() * head[0][0].float()).sum(1) + head[1][0]) >= CONFIDENT


def _believed(drafts: Tensor) -> tuple[Tensor, Tensor]:
    """All of them."""
    return drafts, torch.full((len(drafts),), drafts.shape[1], dtype=torch.int32, device=drafts.device)
