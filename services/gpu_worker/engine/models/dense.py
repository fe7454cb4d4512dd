"""Decoders with plain attention built from checkpoint tensors: llama, qwen3 and mistral; qwen3_moe, whose feed-forward layers
are mixtures; gemma3 with its sliding layers.

Everything that a forward would compute again from weights alone is prepared here, as in `hybrid`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from kernels import activation, experts, matmul, norm_rope
from services.gpu_worker.engine.config import FULL, SLIDING, ModelDims
from services.gpu_worker.engine.layers.attention import Attention
from services.gpu_worker.engine.layers.dense_block import DenseBlock, GeluMLP
from services.gpu_worker.engine.layers.mixture import Mixture
from services.gpu_worker.engine.layers.mlp import MLP
from services.gpu_worker.engine.layers.mtp_head import MTPHead
from services.gpu_worker.engine.layers.steps import Step
from services.gpu_worker.engine.layers.taps import Taps
from services.gpu_worker.engine.models.dense_config import DenseTraits
from services.gpu_worker.engine.models.expert_tensors import expert_shapes, stacked_experts
from services.gpu_worker.engine.models.rope import scaled_rope_table
from services.gpu_worker.engine.models.tensors import Shapes, mlp_shapes
from services.gpu_worker.engine.placement import CPU, Placement


class DenseModel:
    """The weights of one model in their place; stateless between calls."""

    mtp: MTPHead | None = None

    def __init__(
        self,
        dims: ModelDims,
        traits: DenseTraits,
        weights: Mapping[str, Tensor],
        recipe: matmul.Recipe,
        placement: Placement = CPU,
    ) -> None:
        """`weights` as `dense_shapes` names them, each read once or twice; `recipe` as for `HybridModel`."""
        self.dims = dims
        self.recipe = recipe
        self.placement = placement
        self.rope = placement.vector(
            scaled_rope_table(dims.rotary_dim, dims.rope_theta, dims.max_positions, traits.scaling)
        )
        self.local_rope = placement.vector(_local_table(dims, traits)) if dims.window_layers else None
        # Rounded as the embedding is, since the model was trained with the rounded one.
        self._embedding_scale = float(torch.tensor(traits.embedding_scale, dtype=placement.dtype))
        self._logit_cap = traits.logit_cap
        parts = _Parts(dims, traits, weights, recipe, placement)
        self._embedding = parts.weight("model.embed_tokens.weight")
        self._blocks = parts.trunk()
        self._final_scale = parts.norm("model.norm.weight")
        self._head = parts.pack(self._embedding if dims.tie_embeddings else parts.weight("lm_head.weight"))

    def embed(self, tokens: Tensor) -> Tensor:
        """[M] int64 -> [M, H]."""
        rows = self._embedding.index_select(0, tokens)
        return rows if self._embedding_scale == 1.0 else rows.mul_(self._embedding_scale)

    def trunk(self, x: Tensor, step: Step, taps: Taps | None = None) -> Tensor:
        """Embedded rows [M, H], overwritten -> hidden after the final norm."""
        for index, block in enumerate(self._blocks):
            x = block(x, step)
            if taps is not None:
                taps.see(index, x)
        return norm_rope.rms_norm(x, self._final_scale, self.dims.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] float32."""
        logits = matmul.linear(hidden, self._head, out_dtype=torch.float32)
        return logits if self._logit_cap is None else activation.soft_cap(logits, self._logit_cap)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] float32: drafts are made over all ids."""
        return self.logits(hidden)


class _Parts:
    """Builds blocks from tensors."""

    def __init__(
        self,
        dims: ModelDims,
        traits: DenseTraits,
        weights: Mapping[str, Tensor],
        recipe: matmul.Recipe,
        placement: Placement,
    ) -> None:
        self._dims = dims
        self._traits = traits
        self._weights = weights
        self._placement = placement
        self.pack = partial(matmul.pack, recipe=recipe)

    def trunk(self) -> list[DenseBlock]:
        planes = {FULL: 0, SLIDING: 0}
        blocks = []
        for index, kind in enumerate(self._dims.layer_types):
            prefix = f"model.layers.{index}."
            mlp = (self._mixture if self._dims.mixes(index) else self._mlp)(prefix + "mlp.")
            blocks.append(self._block(prefix, mlp, planes[kind], sliding=kind == SLIDING))
            planes[kind] += 1
        return blocks

    def weight(self, name: str) -> Tensor:
        """A tensor in its place."""
        weight = self._weights[name]
        return self._placement.matrix(weight) if weight.dim() == 2 else self._placement.vector(weight)

    def norm(self, name: str) -> Tensor:
        """The factor of a norm."""
        return 1.0 + self.weight(name) if self._traits.zero_centred else self.weight(name)

    def _block(self, prefix: str, mlp: MLP | GeluMLP | Mixture, plane: int, *, sliding: bool) -> DenseBlock:
        names = _norm_names(self._traits)
        before = tuple(self.norm(f"{prefix}{name}.weight") for name in names[:2])
        after = tuple(self.norm(f"{prefix}{name}.weight") for name in names[2:])
        return DenseBlock(
            self._attention(prefix + "self_attn.", plane, sliding=sliding),
            mlp,
            (before[0], before[1]),
            (after[0], after[1]) if after else None,
            self._dims.eps,
        )

    def _mlp(self, at: str) -> MLP | GeluMLP:
        gate_up = torch.cat([self.weight(at + "gate_proj.weight"), self.weight(at + "up_proj.weight")])
        down = self.pack(self.weight(at + "down_proj.weight"))
        return (
            GeluMLP(self.pack(gate_up), down)
            if self._traits.gelu
            else MLP(self.pack(gate_up, pairs=True), down)
        )

    def _mixture(self, at: str) -> Mixture:
        dims = self._dims
        router = self.pack(self.weight(at + "gate.weight"))
        gate_up, down = (
            self._placement.matrix(stacked_experts(self._weights, f"{at}experts.{part}", dims.experts))
            for part in ("gate_up_proj", "down_proj")
        )
        choose = partial(experts.route, k=dims.experts_per_row, renormalise=dims.expert_weights_sum_to_one)
        return Mixture(router, choose, experts.pack(gate_up, down, router.recipe), None)

    def _attention(self, at: str, plane: int, *, sliding: bool) -> Attention:
        projection = torch.cat([self.weight(f"{at}{name}_proj.weight") for name in "qkv"])
        return Attention(
            self._dims,
            plane,
            self.pack(projection),
            self.pack(self.weight(at + "o_proj.weight")),
            self._head_scale(at, projection.device),
            normed=self._traits.qk_norm,
            sliding=sliding,
        )

    def _head_scale(self, at: str, device: torch.device) -> Tensor:
        """See `Attention`."""
        query = key = torch.ones(self._dims.head_dim, device=device)
        if self._traits.qk_norm:
            query, key = self.norm(at + "q_norm.weight"), self.norm(at + "k_norm.weight")
        query = query * self._traits.query_scale
        return torch.cat([query.expand(self._dims.heads, -1), key.expand(self._dims.kv_heads, -1)])


def dense_shapes(dims: ModelDims, traits: DenseTraits) -> Shapes:
    """Every tensor that a model of these dimensions needs, as Hugging Face names it, in the order of the forward."""
    queries, keys = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    shapes: Shapes = {"model.embed_tokens.weight": (dims.vocab, dims.hidden)}
    for index in range(len(dims.layer_types)):
        prefix = f"model.layers.{index}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (queries, dims.hidden),
            prefix + "self_attn.k_proj.weight": (keys, dims.hidden),
            prefix + "self_attn.v_proj.weight": (keys, dims.hidden),
            prefix + "self_attn.o_proj.weight": (dims.hidden, queries),
            **_feed_forward(dims, index, prefix + "mlp."),
        }
        shapes |= {f"{prefix}{name}.weight": (dims.hidden,) for name in _norm_names(traits)}
        if traits.qk_norm:
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (dims.head_dim,) for name in "qk"}
    shapes["model.norm.weight"] = (dims.hidden,)
    if not dims.tie_embeddings:
        shapes["lm_head.weight"] = (dims.vocab, dims.hidden)
    return shapes


def _feed_forward(dims: ModelDims, index: int, at: str) -> Shapes:
    if not dims.mixes(index):
        return mlp_shapes(dims.hidden, dims.dense_width or dims.intermediate, at)
    return {at + "gate.weight": (dims.experts, dims.hidden), **expert_shapes(at + "experts.", dims)}


def dense_products(dims: ModelDims) -> set[tuple[int, int]]:
    """(N, K) of every packed product, for the self-test."""
    queries = dims.heads * dims.head_dim
    widths = {dims.intermediate, dims.dense_width, dims.expert_width} - {0}
    return {
        (dims.vocab, dims.hidden),
        *((2 * width, dims.hidden) for width in widths),
        *((dims.hidden, width) for width in widths),
        *({(dims.experts, dims.hidden)} if dims.experts else ()),
        (queries + 2 * dims.kv_heads * dims.head_dim, dims.hidden),
        (dims.hidden, queries),
    }


def _norm_names(traits: DenseTraits) -> tuple[str, ...]:
    """Before attention, before the mlp; in a sandwich also after the one and after the other."""
    if traits.sandwich:
        return (
            "input_layernorm",
            "pre_feedforward_layernorm",
            "post_attention_layernorm",
            "post_feedforward_layernorm",
        )
    return "input_layernorm", "post_attention_layernorm"


def _local_table(dims: ModelDims, traits: DenseTraits) -> Tensor:
    return scaled_rope_table(dims.rotary_dim, traits.local_theta, dims.max_positions, traits.local_scaling)
