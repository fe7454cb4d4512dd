"""Grouped-query attention over paged KV, for prefill tiles and for decode and verify tiles.

reference, chosen   the twins on the CPU                card_write, card_rows   rows into their pages
plan                what a launch reads, and where      card_pages              how pages are read
device              the card's side of this face        card_prefill            many query rows of a sequence
card_latent         rows that are keys and values       card_splits             decode and verify, split by keys
card_chosen         which keys a sparse row sees
"""

import torch
from torch import Tensor

from kernels.dispatch import device_module, on_card
from kernels.paged_attention import chosen, reference
from kernels.paged_attention.plan import (
    AttentionPlan,
    CardAttention,
    QueryTile,
    WritePlan,
)
from kernels.paged_attention.reference import write_rows
from kernels.tiles import SPLIT_ROWS

__all__ = [
    "SPLIT_ROWS",
    "AttentionPlan",
    "CardAttention",
    "QueryTile",
    "WritePlan",
    "attend",
    "attend_latent",
    "check_latent",
    "narrowed",
    "qk_norm_rope_write",
    "write_latent",
    "write_rows",
]


def qk_norm_rope_write(
    y: Tensor, scale: Tensor, keys: Tensor, values: Tensor, plan: WritePlan, eps: float | None
) -> Tensor:
    """Queries of a projection's rows, normed and turned; keys and values go into their pages. See the twin."""
    module = device_module("paged_attention") if on_card(y) else reference
    return module.qk_norm_rope_write(y, scale, keys, values, plan, eps)


def write_latent(rows: Tensor, plane: Tensor, plan: WritePlan) -> None:
    """Ready rows of a plane whose rows are keys and values at once go into their pages. See the twin."""
    module = device_module("paged_attention") if on_card(rows) else reference
    module.write_latent(rows, plane, plan)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, gate: Tensor | None = None
) -> Tensor:
    """Attention of query rows over their pages, times the sigmoid of `gate` if there is one. See the twin."""
    module = device_module("paged_attention") if on_card(query) else reference
    return module.attend(query, keys, values, plan, gate)


def attend_latent(query: Tensor, plane: Tensor, plan: AttentionPlan, rank: int) -> Tensor:
    """Attention of query rows over pages whose rows are keys and values at once. See the twin."""
    module = device_module("paged_attention") if on_card(query) else reference
    return module.attend_latent(query, plane, plan, rank)


def narrowed(query: Tensor, weights: Tensor, keys: Tensor, plan: AttentionPlan, most: int) -> AttentionPlan:
    """The plan in which every row sees no more than `most` keys, those that an index scores highest. See the twin."""
    module = device_module("paged_attention") if on_card(query) else chosen
    return module.narrowed(query, weights, keys, plan, most)


def check_latent(rank: int, rope: int, row: int, dtype: torch.dtype) -> None:
    """ValueError for latent rows that a card cannot attend to: `row` elements, of which `rank` are key and value."""
    device_module("paged_attention").check_latent(rank, rope, row, dtype)
