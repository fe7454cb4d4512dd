"""Drafters without any cache: every round computes the whole history anew, the slow way.

The trunk and the MTP head are the plain torch modules of the recipe that trained them, the block drafter is
`block_reference`, the n-gram drafter a search through all tokens; nothing is shared with the engine. What the engine's
drafters lose against these, if anything, is what keeping rows, rings and indexes costs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from models.pocket.recipe import weights
from models.pocket.recipe.layers import Layout
from models.pocket.recipe.model import Pocket
from services.bench.block_reference import SlowBlock
from services.gpu_worker.engine.models.block_config import BlockDims
from services.gpu_worker.engine.requests import DrafterKind

LONGEST_MATCH: Final = 5
SHORTEST_MATCH: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What the trunk computed of P rows: hiddens after the final norm [P, H], and the block drafter's taps [P, taps * H]
    (null without one), float32."""

    hidden: Tensor
    taps: Tensor | None


class History:
    """A model's folder and, beside it, a block drafter's (null = there is none)."""

    def __init__(self, folder: Path, block: Path | None = None) -> None:
        self._model: Pocket = weights.load(folder / "model.safetensors", folder).eval()
        embedding = self._model.model.embed_tokens.weight.detach()
        self._block = None if block is None else _slow_block(block, embedding)

    @torch.no_grad()
    def rows(self, tokens: Sequence[int]) -> Rows:
        """One pass over the tokens, nothing kept from another."""
        ids = torch.tensor([list(tokens)])
        outputs = self._model.model.outputs(ids, self._layout(len(tokens)))
        taps = (
            None if self._block is None else torch.cat([outputs[at][0] for at in self._block.dims.taps], -1)
        )
        return Rows(hidden=self._model.model.norm(outputs[-1])[0], taps=taps)

    def drafts(self, kind: DrafterKind, tokens: Sequence[int], rows: Rows, count: int) -> list[int]:
        """Greedy drafts after `tokens`, of which all but the last, the anchor, have `rows`."""
        match kind:
            case "mtp":
                return self._chain(tokens, rows.hidden, count)
            case "block":
                assert self._block is not None
                assert rows.taps is not None
                return self._block.drafts(rows.taps, tokens[-1], count)
            case "ngram":
                return repeated(tokens, count)
        raise ValueError(f"{kind} drafts nothing")

    @torch.no_grad()
    def _chain(self, tokens: Sequence[int], hidden: Tensor, count: int) -> list[int]:
        """The head over all rows for every draft: row p pairs token p with the hidden of p - 1 (zeros before the first),
        rows of drafts with the head's own output in its place."""
        head, embed = self._model.mtp, self._model.model.embed_tokens
        ids, before = list(tokens), torch.cat((torch.zeros_like(hidden[:1]), hidden))
        for _ in range(count):
            embedded = head.pre_fc_norm_embedding(embed(torch.tensor(ids)))
            joined = head.fc(torch.cat((embedded, head.pre_fc_norm_hidden(before)), -1))
            y = head.norm(head.layers[0](joined[None], self._layout(len(ids))))[0, -1:]
            ids.append(int(self._model.logits(y[0]).argmax()))
            before = torch.cat((before, y))
        return ids[len(tokens) :]

    def _layout(self, length: int) -> Layout:
        starts = torch.zeros(1, length, dtype=torch.bool)
        starts[0, 0] = True
        return Layout.of(starts, self._model.shape)


def repeated(tokens: Sequence[int], count: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest run of 5 to 2 tokens that the history ends with."""
    known = list(tokens)
    for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        for end in range(len(known) - 1, length - 1, -1):
            if known[end - length : end] == known[-length:]:
                for at in range(end, end + count):
                    known.append(known[at])
                return known[len(tokens) :]
    return []


def _slow_block(folder: Path, embedding: Tensor) -> SlowBlock:
    """The tensors as they lie in the file, in float32; embedding and head are the target's, which ties them."""
    dims = BlockDims.from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    tensors = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    return SlowBlock(dims=dims, weights=tensors, embedding=embedding, head=embedding)
