"""From a block's output rows to drafts: the target's head, then what the drafter adds left to right (see `block_config`).

A draft depends on the draft before it, which is picked by the stream's own rules; so rows of logits are answered one by
one, each for the token that stands before it.
"""

from __future__ import annotations

from typing import Final, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.gpu_worker.engine.models.block import BlockDrafter
from services.gpu_worker.engine.models.block_config import Harvest
from services.gpu_worker.engine.models.family import Model
from shared.errors import EngineFault

CONFIDENT: Final = 0.5
"""Chance of standing under which a draft, and those behind it, are not worth their columns."""

Floats: TypeAlias = NDArray[np.float32]


class Proposal(Protocol):
    """What one block proposes."""

    @property
    def count(self) -> int:
        """Drafts that there are rows for."""
        ...

    def row(self, k: int, before: int) -> Floats:
        """[V] logits of the k-th draft; `before` = the token in front of it."""
        ...

    def stands(self, k: int, before: int) -> bool:
        """Whether the drafter believes in its k-th draft enough."""
        ...


class NoRows:
    """Nothing."""

    count = 0

    def row(self, k: int, before: int) -> Floats:
        raise EngineFault("a proposal without rows was asked for one")

    def stands(self, k: int, before: int) -> bool:
        return False


class PlainRows:
    """Every row by itself."""

    def __init__(self, logits: Floats) -> None:
        """[count, V]."""
        self._logits = logits

    @property
    def count(self) -> int:
        return len(self._logits)

    def row(self, k: int, before: int) -> Floats:
        return self._logits[k]

    def stands(self, k: int, before: int) -> bool:
        return True


class SelectorRows:
    """Few candidates a row, scored anew by the draft before it."""

    def __init__(self, heads: BlockHeads, values: Floats, ids: NDArray[np.int64], hidden: Floats) -> None:
        """values, ids [count, candidates]; hidden [count, rank]."""
        self._heads = heads
        self._values = values
        self._ids = ids
        self._hidden = hidden
        self._row = np.empty(heads.vocab, dtype=np.float32)

    @property
    def count(self) -> int:
        return len(self._values)

    def row(self, k: int, before: int) -> Floats:
        ids = self._ids[k]
        weight = self._heads.predecessor[before] * self._hidden[k]
        self._row.fill(-np.inf)
        self._row[ids] = self._values[k] + self._heads.successor[ids] @ weight
        return self._row

    def stands(self, k: int, before: int) -> bool:
        return True


class MarkovRows:
    """Rows that the token before them shifts, each with a chance of standing where there is a head for it."""

    def __init__(self, heads: BlockHeads, logits: Tensor, hidden: Tensor) -> None:
        """logits [count, draft_vocab]; hidden [count, H]."""
        self._heads = heads
        self._logits = logits
        self._hidden = hidden

    @property
    def count(self) -> int:
        return len(self._logits)

    def row(self, k: int, before: int) -> Floats:
        row = self._logits[k]
        if self._heads.markov is not None:
            first, second = self._heads.markov
            row = row + (second @ first[before]).float()
        return self._heads.spread(row[None])[0]

    def stands(self, k: int, before: int) -> bool:
        head = self._heads.confidence
        if head is None:
            return True
        features = self._hidden[k]
        if self._heads.confidence_with_markov and self._heads.markov is not None:
            features = torch.cat([features, self._heads.markov[0][before]])
        return bool(torch.sigmoid((head[0][0].float() * features.float()).sum() + head[1][0]) >= CONFIDENT)


class BlockHeads:
    """The heads of one drafter over one target."""

    def __init__(self, drafter: BlockDrafter, target: Model) -> None:
        dims, heads = drafter.dims, drafter.heads
        self.vocab = dims.vocab
        self._target = target
        self.ids = None if drafter.ids is None else drafter.ids.to(drafter.placement.device)
        """Target ids that it can propose; null = all."""
        self._first = 1 if dims.harvest is Harvest.DFLASH else 0
        self._multiplier, self._cap = dims.output_multiplier, dims.logit_cap
        self.top = min(dims.selector_top, dims.vocab)
        self.projection = heads.get("candidate_selector.hidden_projection.weight")
        self.predecessor, self.successor = (
            heads[f"candidate_selector.{name}_codebook"].float().cpu().numpy()
            if dims.selector_rank
            else np.empty((0, 0), dtype=np.float32)
            for name in ("predecessor", "successor")
        )
        self.markov: tuple[Tensor, Tensor] | None = None
        if dims.markov_rank:
            self.markov = heads["markov_head.markov_w1.weight"], heads["markov_head.markov_w2.weight"]
        self.confidence: tuple[Tensor, Tensor] | None = None
        if dims.confidence:
            self.confidence = heads["confidence_head.proj.weight"], heads["confidence_head.proj.bias"]
        self.confidence_with_markov = dims.confidence_with_markov

    def propose(self, y: Tensor, most: int) -> list[Proposal]:
        """Output rows [S, B, H] of S blocks -> what each proposes, at most `most` drafts."""
        used = self.rows(y, most)
        sequences, count, width = used.shape
        flat = used.reshape(-1, width)
        logits = self.logits(flat)
        if self.projection is not None:
            return self._selected(logits, flat, sequences)
        if self.markov is None and self.confidence is None:
            rows = self.spread(logits).reshape(sequences, count, -1)
            return [PlainRows(rows[number]) for number in range(sequences)]
        shaped = logits.view(sequences, count, -1)
        return [MarkovRows(self, shaped[number], used[number]) for number in range(sequences)]

    def spread(self, logits: Tensor) -> Floats:
        """[R, draft_vocab] -> [R, V] in host memory; ids that cannot be proposed get -inf."""
        values: Floats = logits.cpu().numpy()
        if self.ids is None:
            return values
        rows = np.full((len(values), self.vocab), -np.inf, dtype=np.float32)
        rows[:, self.ids.cpu().numpy()] = values
        return rows

    def _selected(self, logits: Tensor, flat: Tensor, sequences: int) -> list[Proposal]:
        values, ids = (part.cpu().numpy() for part in logits.topk(self.top, dim=-1, sorted=False))
        assert self.projection is not None
        hidden = (flat @ self.projection.t()).float().cpu().numpy()
        parts = (array.reshape(sequences, -1, array.shape[-1]) for array in (values, ids, hidden))
        return [SelectorRows(self, *of_one) for of_one in zip(*parts, strict=True)]

    def rows(self, y: Tensor, most: int) -> Tensor:
        """Output rows [S, B, H] -> those that propose, [S, K, H] with K <= `most`."""
        return y[:, self._first : self._first + most]

    def logits(self, flat: Tensor, *, narrow: bool = False) -> Tensor:
        """Rows [R, H] -> [R, draft_vocab] float32, before what drafts add. `narrow` = over no more ids than the target has
        drafts made on a card from, if the drafter has no ids of its own."""
        head = self._target.draft_logits if narrow and self.ids is None else self._target.logits
        logits = head(flat.contiguous())
        if self.ids is not None:
            logits = logits.index_select(1, self.ids)
        if self._multiplier != 1.0:
            logits = logits * self._multiplier
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap
