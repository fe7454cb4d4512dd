"""Latent-attention decoders (GLM-5 and DeepSeek-V3 class) and their MTP head, built from checkpoint tensors.

Everything that a forward would compute again from weights alone is prepared here, as in `hybrid`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from kernels import experts, matmul, norm_rope, paged_attention
from services.gpu_worker.engine.config import KeyIndex, Latent, ModelDims
from services.gpu_worker.engine.layers.block import Block
from services.gpu_worker.engine.layers.key_index import Index, IndexWeights
from services.gpu_worker.engine.layers.latent_attention import HeadProducts, LatentAttention, LatentWeights
from services.gpu_worker.engine.layers.mixture import Mixture
from services.gpu_worker.engine.layers.mlp import MLP
from services.gpu_worker.engine.layers.mtp_head import MTPHead
from services.gpu_worker.engine.layers.steps import Step
from services.gpu_worker.engine.layers.taps import Taps
from services.gpu_worker.engine.models.expert_tensors import stacked_experts
from services.gpu_worker.engine.models.hybrid import mlp_of
from services.gpu_worker.engine.models.latent_config import LatentTraits
from services.gpu_worker.engine.models.latent_tensors import head_prefix
from services.gpu_worker.engine.models.placed import Placed
from services.gpu_worker.engine.models.rope import scaled_rope_table
from services.gpu_worker.engine.placement import CPU, Placement
from shared.errors import EngineFault


class LatentModel:
    """The weights of one model in their place; stateless between calls."""

    local_rope: Tensor | None = None

    def __init__(
        self,
        dims: ModelDims,
        traits: LatentTraits,
        weights: Mapping[str, Tensor],
        recipe: matmul.Recipe,
        placement: Placement = CPU,
    ) -> None:
        """`weights` as `latent_shapes` names them; `recipe` as for `HybridModel`. Raises EngineFault
        for rows that a card cannot read."""
        self.dims = dims
        self.recipe = recipe
        self.placement = placement
        if placement.on_card:
            _check_rows(dims, placement)
        table = scaled_rope_table(dims.rotary_dim, dims.rope_theta, dims.max_positions, traits.scaling)
        self.rope = placement.vector(table)
        parts = _Parts(dims, traits, Placed(weights, placement), recipe)
        self._embedding = parts.weights["model.embed_tokens.weight"]
        self._blocks = [parts.block(index) for index in range(len(dims.layer_types))]
        self._final_scale = parts.weights["model.norm.weight"]
        head = self._embedding if dims.tie_embeddings else parts.weights["lm_head.weight"]
        self._head = parts.pack(head)
        self.mtp = _mtp_head(dims, parts) if dims.has_mtp else None

    def embed(self, tokens: Tensor) -> Tensor:
        """[M] int64 -> [M, H]."""
        return self._embedding.index_select(0, tokens)

    def trunk(self, x: Tensor, step: Step, taps: Taps | None = None) -> Tensor:
        """Embedded rows [M, H], overwritten -> hidden after the final norm; `taps` see the layers on the way."""
        delta = None
        for index, block in enumerate(self._blocks):
            delta = block(x, delta, step)
            if taps is not None:
                taps.see(index, x, delta)
        assert delta is not None  # a config has at least one layer
        return norm_rope.add_rms_norm(x, delta, self._final_scale, self.dims.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] float32."""
        return matmul.linear(hidden, self._head, out_dtype=torch.float32)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] float32: drafts are made over all ids."""
        return self.logits(hidden)


def _check_rows(dims: ModelDims, placement: Placement) -> None:
    """EngineFault for rows that a card cannot read."""
    assert dims.latent is not None
    widths = dims.latent
    try:
        paged_attention.check_latent(widths.rank, widths.rope_dim, widths.row, placement.dtype)
    except ValueError as fault:
        raise EngineFault(f"model config: kv_lora_rank, qk_rope_head_dim: {fault}") from fault


def _mtp_head(dims: ModelDims, parts: _Parts) -> MTPHead:
    at, weights = head_prefix(dims), parts.weights
    return MTPHead(
        embedding_scale=weights[at + "enorm.weight"],
        hidden_scale=weights[at + "hnorm.weight"],
        projection=parts.pack(weights[at + "eh_proj.weight"]),
        block=parts.block(dims.draft_plane),
        final_scale=weights[at + "shared_head.norm.weight"],
        eps=dims.eps,
    )


class _Parts:
    """Builds blocks from tensors."""

    def __init__(
        self, dims: ModelDims, traits: LatentTraits, weights: Mapping[str, Tensor], recipe: matmul.Recipe
    ) -> None:
        assert dims.latent is not None
        self._dims = dims
        self._widths: Latent = dims.latent
        self._traits = traits
        self.weights = weights
        self.pack = partial(matmul.pack, recipe=recipe)
        self._index: Index | None = None
        """Of the newest layer that has one."""

    def block(self, index: int) -> Block:
        """A layer, or with the number after the last the MTP head's; its plane is its number."""
        prefix, weights = f"model.layers.{index}.", self.weights
        at = prefix + "mlp."
        return Block(
            self._attention(prefix + "self_attn.", index),
            self._mixture(at) if self._dims.mixes(index) else mlp_of(weights, at, self.pack, in_parts=True),
            weights[prefix + "input_layernorm.weight"],
            weights[prefix + "post_attention_layernorm.weight"],
            self._dims.eps,
        )

    def _mixture(self, at: str) -> Mixture:
        dims, traits, weights = self._dims, self._traits, self.weights
        choose = partial(
            experts.route_grouped,
            bias=weights[at + "gate.e_score_correction_bias"],
            k=dims.experts_per_row,
            groups=traits.groups,
            best_groups=traits.best_groups,
            renormalise=dims.expert_weights_sum_to_one,
            factor=traits.routed_factor,
        )
        router = self.pack(weights[at + "gate.weight"])
        gate_up, down = (
            stacked_experts(weights, f"{at}experts.{part}", dims.experts)
            for part in ("gate_up_proj", "down_proj")
        )
        shared: MLP = mlp_of(weights, at + "shared_experts.", self.pack)
        return Mixture(router, choose, experts.pack(gate_up, down, router.recipe), shared)

    def _attention(self, at: str, plane: int) -> LatentAttention:
        widths, heads, weights = self._widths, self._dims.heads, self.weights
        latent, shared = weights[at + "kv_a_proj_with_mqa.weight"].split([widths.rank, widths.rope_dim])
        per_head = weights[at + "kv_b_proj.weight"].unflatten(0, (heads, -1))
        keys, values = per_head.split([widths.nope_dim, widths.value_dim], dim=1)
        name = "q_b_proj.weight" if widths.query_rank else "q_proj.weight"
        queries = self._query_rows(weights[at + name])
        first = weights[at + "q_a_proj.weight"] if widths.query_rank else queries
        packed = LatentWeights(
            down=self.pack(torch.cat([first, latent, self._paired(shared)])),
            query_norm=weights[at + "q_a_layernorm.weight"] if widths.query_rank else None,
            query=self.pack(queries) if widths.query_rank else None,
            latent_norm=weights[at + "kv_a_layernorm.weight"],
            keys=HeadProducts([self.pack(own.t().contiguous()) for own in keys]),
            values=HeadProducts([self.pack(own.contiguous()) for own in values]),
            output=self.pack(weights[at + "o_proj.weight"]),
        )
        owns = widths.index is not None and plane not in widths.index.shared
        if widths.index is not None and owns:
            self._index = self._new_index(widths.index, at + "indexer.")
        return LatentAttention(
            widths, heads, plane, packed, self._traits.softmax_scale, self._index, owns_index=owns
        )

    def _new_index(self, widths: KeyIndex, at: str) -> Index:
        weights = self.weights
        keys = self._turned_first(weights[at + "wk.weight"])
        heads = weights[at + "wq_b.weight"].unflatten(0, (widths.heads, -1))
        queries = torch.cat([self._turned_first(head) for head in heads])
        packed = IndexWeights(
            down=self.pack(torch.cat([keys, weights[at + "weights_proj.weight"]])),
            query=self.pack(queries),
            norm=self._turned_first(weights[at + "k_norm.weight"]),
            bias=self._turned_first(weights[at + "k_norm.bias"]),
        )
        return Index(widths, packed)

    def _turned_first(self, rows: Tensor) -> Tensor:
        """Of an index head, whose first elements RoPE turns."""
        rope = self._widths.rope_dim
        return torch.cat([self._paired(rows[:rope]), rows[rope:]]) if self._traits.index_interleaved else rows

    def _query_rows(self, rows: Tensor) -> Tensor:
        """The checkpoint has, a head at a time, its plain and its turned part; here all turned parts come first."""
        widths, heads = self._widths, self._dims.heads
        plain, turned = rows.unflatten(0, (heads, -1)).split([widths.nope_dim, widths.rope_dim], dim=1)
        paired = torch.stack([self._paired(own) for own in turned])
        return torch.cat([paired.flatten(0, 1), plain.flatten(0, 1)])

    def _paired(self, rows: Tensor) -> Tensor:
        """Rows [rope_dim, ...] in an order in which halves pair, which is that of RoPE's kernel."""
        return torch.cat([rows[0::2], rows[1::2]]) if self._traits.interleaved else rows


def latent_products(dims: ModelDims) -> set[tuple[int, int]]:
    """(N, K) of every packed product, for the self-test."""
    assert dims.latent is not None
    widths, heads, hidden = dims.latent, dims.heads, dims.hidden
    queries = heads * (widths.nope_dim + widths.rope_dim)
    shapes = {
        (dims.vocab, hidden),
        ((widths.query_rank or queries) + widths.rank + widths.rope_dim, hidden),
        (widths.rank, widths.nope_dim),
        (widths.value_dim, widths.rank),
        (hidden, heads * widths.value_dim),
        (dims.experts, hidden),
    }
    if widths.query_rank:
        shapes.add((queries, widths.query_rank))
    if widths.index is not None:
        index = widths.index
        shapes |= {(index.width + index.heads, hidden), (index.heads * index.width, widths.query_rank)}
    if dims.has_mtp:
        shapes.add((hidden, 2 * hidden))
    for width in (dims.dense_width, dims.intermediate, dims.expert_width):
        shapes |= {(2 * width, hidden), (hidden, width)}
    return shapes
