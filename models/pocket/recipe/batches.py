"""Batches for training: rows cut at seeded places from the token shards, a pure function of (seed, step)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.pocket.recipe.corpus import WORK
from models.pocket.recipe.data import ASSISTANT_BIT, END_OF_TEXT, ID_MASK


@dataclass(frozen=True, kw_only=True)
class Batch:
    """`ids` and `targets` [B, T] int64; `starts` [B, T] bool; `weights` [B, T] float32 of the targets' losses.
    `seed` for what a stage draws from the batch.
    """

    ids: Tensor
    targets: Tensor
    starts: Tensor
    weights: Tensor
    seed: int


def load_shard(name: str, device: torch.device) -> Tensor:
    """The shard's flat array as int32 on `device`, assistant bit included."""
    tokens = np.load(WORK / f"{name}.npz")["tokens"]
    return torch.from_numpy(tokens.astype(np.int32)).to(device)


class Mixture:
    """Draws rows from several shards in fixed shares.

    A row that begins inside a document starts a document there. For prose that is fine; for dialogues the part before
    the first whole one carries no loss, because its tools and earlier turns are missing.
    """

    def __init__(
        self, shards: list[Tensor], rows: list[int], *, dialogue: list[bool], other_weight: float, seed: int
    ) -> None:
        self.shards = shards
        self.rows = rows
        self.dialogue = dialogue
        self.other_weight = other_weight
        self.seed = seed

    def batch(self, step: int, length: int) -> Batch:
        """The batch of one step, rows of `length` tokens."""
        seed = self.seed * 1_000_003 + step
        generator = torch.Generator().manual_seed(seed)
        pieces, weights = [], []
        for shard, rows, dialogue in zip(self.shards, self.rows, self.dialogue, strict=True):
            at = torch.randint(0, len(shard) - length - 1, (rows,), generator=generator).to(shard.device)
            piece = shard[at[:, None] + torch.arange(length + 1, device=shard.device)]
            weight = torch.ones_like(piece[:, 1:], dtype=torch.float32)
            if dialogue:
                written = (piece[:, 1:] & ASSISTANT_BIT) != 0
                whole = ((piece & ID_MASK) == END_OF_TEXT).cumsum(1)[:, :-1] > 0
                weight = torch.where(written, 1.0, self.other_weight) * whole
            pieces.append(piece & ID_MASK)
            weights.append(weight)
        tokens = torch.cat(pieces).long()
        starts = torch.zeros_like(tokens[:, :-1], dtype=torch.bool)
        starts[:, 0] = True
        starts[:, 1:] = tokens[:, :-2] == END_OF_TEXT
        return Batch(
            ids=tokens[:, :-1], targets=tokens[:, 1:], starts=starts, weights=torch.cat(weights), seed=seed
        )
