"""qwen3_next: the hybrid of Qwen3.5 with its projections interleaved and its experts stored one by one.

`NextWeights` answers the hybrid's tensor names from a checkpoint of this layout, so that one trunk serves both:

    linear_attn.in_proj_qkvz   a key head at a time: its query, its key, the values and the output gates of its value heads
    linear_attn.in_proj_ba     a key head at a time: beta, then decay, of its value heads
    mlp.experts.{e}.{gate, up, down}_proj

Source: transformers 5.24, `modeling_qwen3_next` (`fix_query_key_value_ordering`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.models.expert_tensors import StackedExperts, one_by_one
from services.gpu_worker.engine.models.fields import need
from services.gpu_worker.engine.models.hybrid_config import read_hybrid
from services.gpu_worker.engine.models.tensors import Shapes, checkpoint_shapes

_QKV, _Z = "linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"
_B, _A = "linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"
_QKVZ, _BA = "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"


def read_next(config: Mapping[str, Any], *, has_mtp: bool, mtp_mixes: bool) -> ModelDims:
    """Parse a `config.json`. `mtp_mixes` = the MTP head's layer is a mixture. Raises `EngineFault` naming the field."""
    text = {"partial_rotary_factor": 0.25, "norm_topk_prob": True} | dict(config)
    dims = read_hybrid(text, has_mtp=has_mtp)
    if not dims.experts:
        return dims
    layers = len(dims.layer_types)
    dense = [index for index in range(layers) if not _mixes(text, index)]
    if has_mtp and not mtp_mixes:
        dense.append(layers)
    return replace(
        dims,
        dense_layers=tuple(dense),
        dense_width=need(text, "intermediate_size") if dense else 0,
        expert_weights_sum_to_one=bool(text["norm_topk_prob"]),
    )


def _mixes(text: Mapping[str, Any], index: int) -> bool:
    step = int(text.get("decoder_sparse_step") or 1)
    return index not in (text.get("mlp_only_layers") or ()) and not (index + 1) % step


def next_shapes(dims: ModelDims) -> Shapes:
    """Every tensor that a model of these dimensions needs, as this layout names it."""
    shapes: Shapes = {}
    for name, shape in one_by_one(checkpoint_shapes(dims), dims).items():
        prefix = name.partition("linear_attn.")[0]
        if name.endswith(_QKV):
            shapes[prefix + _QKVZ] = (shape[0] + dims.gdn_value_heads * dims.gdn_value_dim, dims.hidden)
        elif name.endswith(_B):
            shapes[prefix + _BA] = (2 * dims.gdn_value_heads, dims.hidden)
        elif not name.endswith((_Z, _A)):
            shapes[name] = shape
    return shapes


class NextWeights(Mapping[str, Tensor]):
    """The hybrid's tensors, cut and put together from this layout's as they are asked for."""

    def __init__(self, dims: ModelDims, stored: Mapping[str, Tensor]) -> None:
        self._dims = dims
        self._stored = StackedExperts(stored, dims.experts)
        self._names = checkpoint_shapes(dims)

    def __getitem__(self, name: str) -> Tensor:
        prefix = name.partition("linear_attn.")[0]
        if name.endswith((_QKV, _Z)):
            query, key, value, gate = self._qkvz(self._stored[prefix + _QKVZ])
            return gate if name.endswith(_Z) else torch.cat([query, key, value])
        if name.endswith((_B, _A)):
            return self._ba(self._stored[prefix + _BA], int(name.endswith(_A)))
        return self._stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _qkvz(self, rows: Tensor) -> list[Tensor]:
        """Queries, keys, values and gates, each [heads * width, H], all of a kind together."""
        dims = self._dims
        group = dims.gdn_value_heads // dims.gdn_key_heads * dims.gdn_value_dim
        parts = rows.unflatten(0, (dims.gdn_key_heads, -1)).split(
            [dims.gdn_key_dim, dims.gdn_key_dim, group, group], dim=1
        )
        return [part.flatten(0, 1) for part in parts]

    def _ba(self, rows: Tensor, part: int) -> Tensor:
        """[value heads, H]: beta (0) or decay (1)."""
        return rows.unflatten(0, (self._dims.gdn_key_heads, 2, -1))[:, part].flatten(0, 1)
