"""The hybrid trunk (gated delta net and gated attention) and its MTP head, built from checkpoint tensors.

Everything that a forward would compute again from weights alone is prepared here: fused and packed projections, 1 + w
of the zero-centred norms, softmax scales, exp(A_log), the RoPE table.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kernels import experts, matmul, norm_rope
from services.gpu_worker.engine.config import LINEAR, ModelDims
from services.gpu_worker.engine.layers.block import Block
from services.gpu_worker.engine.layers.gated_attention import GatedAttention
from services.gpu_worker.engine.layers.gated_delta import DeltaWeights, GatedDeltaNet
from services.gpu_worker.engine.layers.mixture import Mixture
from services.gpu_worker.engine.layers.mlp import MLP
from services.gpu_worker.engine.layers.mtp_head import MTPHead
from services.gpu_worker.engine.layers.steps import Step
from services.gpu_worker.engine.layers.taps import Taps
from services.gpu_worker.engine.models.placed import Placed
from services.gpu_worker.engine.placement import CPU, Placement


class Pack(Protocol):
    """`matmul.pack` for the model's recipe."""

    def __call__(self, weight: Tensor, *, pairs: bool = False) -> matmul.Packed: ...


class HybridModel:
    """The weights of one model in their place; stateless between calls."""

    def __init__(
        self,
        dims: ModelDims,
        weights: Mapping[str, Tensor],
        recipe: matmul.Recipe,
        placement: Placement = CPU,
    ) -> None:
        """`weights` as `checkpoint_shapes` names them, each read once or twice; `recipe` as the placement names it or as
        the matmul self-test chose it."""
        weights = Placed(weights, placement)

        pack = partial(matmul.pack, recipe=recipe)

        self.dims = dims
        self.recipe = recipe
        self.local_rope: Tensor | None = None
        self.placement = placement
        table = norm_rope.rope_table(dims.rotary_dim, dims.rope_theta, dims.max_positions)
        self.rope = placement.vector(table)
        self._embedding = weights["model.embed_tokens.weight"]
        self._blocks = _trunk(dims, weights, pack)
        self._final_scale = 1.0 + weights["model.norm.weight"]
        head = self._embedding if dims.tie_embeddings else weights["lm_head.weight"]
        self._head = pack(head)
        narrow = 0 < placement.draft_vocab < dims.vocab and dims.has_mtp
        self._draft_head = pack(head[: placement.draft_vocab]) if narrow else self._head
        self.mtp = _mtp_head(dims, weights, pack) if dims.has_mtp else None

    def embed(self, tokens: Tensor) -> Tensor:
        """[M] int64 -> [M, H]."""
        return self._embedding.index_select(0, tokens)

    def trunk(self, x: Tensor, step: Step, taps: Taps | None = None) -> Tensor:
        """Embedded rows [M, H], overwritten -> hidden after the final norm."""
        delta = None
        for index, block in enumerate(self._blocks):
            delta = block(x, delta, step)
            if taps is not None:
                taps.see(index, x, delta)
        if delta is None:
            return norm_rope.rms_norm(x, self._final_scale, self.dims.eps)
        return norm_rope.add_rms_norm(x, delta, self._final_scale, self.dims.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] float32."""
        return matmul.linear(hidden, self._head, out_dtype=torch.float32)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """[R, H] of the draft plane -> [R, V'] float32 over the ids that drafts are picked from."""
        return matmul.linear(hidden, self._draft_head, out_dtype=torch.float32)


def matmul_shapes(dims: ModelDims) -> set[tuple[int, int]]:
    """(N, K) of every packed product, for the self-test."""
    values, queries = dims.gdn_value_heads * dims.gdn_value_dim, dims.heads * dims.head_dim
    shapes = {
        (dims.vocab, dims.hidden),
        (2 * dims.intermediate, dims.hidden),
        (dims.hidden, dims.intermediate),
    }
    if dims.gdn_layers:
        shapes |= {
            (dims.conv_channels + values + 2 * dims.gdn_value_heads, dims.hidden),
            (dims.hidden, values),
        }
    if dims.planes:
        shapes |= {(2 * queries + 2 * dims.kv_heads * dims.head_dim, dims.hidden), (dims.hidden, queries)}
    if dims.has_mtp:
        shapes.add((dims.hidden, 2 * dims.hidden))
    if dims.experts:
        shapes |= {
            (dims.experts + 1, dims.hidden),
            (2 * dims.expert_width, dims.hidden),
            (dims.hidden, dims.expert_width),
        }
    if dims.dense_layers:
        shapes |= {(2 * dims.dense_width, dims.hidden), (dims.hidden, dims.dense_width)}
    return shapes


def _trunk(dims: ModelDims, weights: Mapping[str, Tensor], pack: Pack) -> list[Block]:
    blocks, planes, deltas = [], 0, 0
    for index, kind in enumerate(dims.layer_types):
        prefix = f"model.layers.{index}."
        mixer: GatedAttention | GatedDeltaNet
        if kind == LINEAR:
            mixer, deltas = _delta(dims, weights, prefix, deltas, pack), deltas + 1
        else:
            mixer, planes = _attention(dims, weights, prefix, planes, pack), planes + 1
        mlp = _feed_forward(dims, weights, prefix + "mlp.", index, pack)
        blocks.append(_block(dims, weights, prefix, mixer, mlp))
    return blocks


def _mtp_head(dims: ModelDims, weights: Mapping[str, Tensor], pack: Pack) -> MTPHead:
    at = "mtp.layers.0."
    return MTPHead(
        embedding_scale=1.0 + weights["mtp.pre_fc_norm_embedding.weight"],
        hidden_scale=1.0 + weights["mtp.pre_fc_norm_hidden.weight"],
        projection=pack(weights["mtp.fc.weight"]),
        block=_block(
            dims,
            weights,
            at,
            _attention(dims, weights, at, dims.draft_plane, pack),
            _feed_forward(dims, weights, at + "mlp.", len(dims.layer_types), pack),
        ),
        final_scale=1.0 + weights["mtp.norm.weight"],
        eps=dims.eps,
    )


def _block(
    dims: ModelDims,
    weights: Mapping[str, Tensor],
    prefix: str,
    mixer: GatedAttention | GatedDeltaNet,
    mlp: MLP | Mixture,
) -> Block:
    return Block(
        mixer,
        mlp,
        1.0 + weights[prefix + "input_layernorm.weight"],
        1.0 + weights[prefix + "post_attention_layernorm.weight"],
        dims.eps,
    )


def _feed_forward(
    dims: ModelDims, weights: Mapping[str, Tensor], at: str, layer: int, pack: Pack
) -> MLP | Mixture:
    return (
        _mixture(dims, weights, at, pack) if dims.mixes(layer) else mlp_of(weights, at, pack, in_parts=True)
    )


def mlp_of(weights: Mapping[str, Tensor], at: str, pack: Pack, *, in_parts: bool = False) -> MLP:
    """A SwiGLU layer, its name ending in a dot."""
    gate_up = torch.cat([weights[at + "gate_proj.weight"], weights[at + "up_proj.weight"]])
    down = pack(weights[at + "down_proj.weight"])
    return MLP(pack(gate_up, pairs=True), down, in_parts=in_parts)


def _mixture(dims: ModelDims, weights: Mapping[str, Tensor], at: str, pack: Pack) -> Mixture:
    router = pack(torch.cat([weights[at + "gate.weight"], weights[at + "shared_expert_gate.weight"]]))
    packed = experts.pack(
        weights[at + "experts.gate_up_proj"], weights[at + "experts.down_proj"], router.recipe
    )
    shared = mlp_of(weights, at + "shared_expert.", pack)
    choose = partial(experts.route, k=dims.experts_per_row, renormalise=dims.expert_weights_sum_to_one)
    return Mixture(router, choose, packed, shared, gated=True)


def _delta(
    dims: ModelDims, weights: Mapping[str, Tensor], prefix: str, layer: int, pack: Pack
) -> GatedDeltaNet:
    at = prefix + "linear_attn."
    names = ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z")
    return GatedDeltaNet(
        dims,
        layer,
        DeltaWeights(
            projection=pack(torch.cat([weights[f"{at}{name}.weight"] for name in names])),
            conv=weights[at + "conv1d.weight"][:, 0].t().contiguous(),
            rate=weights[at + "A_log"].exp(),
            dt_bias=weights[at + "dt_bias"],
            norm=weights[at + "norm.weight"],
            output=pack(weights[at + "out_proj.weight"]),
        ),
    )


def _attention(
    dims: ModelDims, weights: Mapping[str, Tensor], prefix: str, plane: int, pack: Pack
) -> GatedAttention:
    """The checkpoint interleaves query and gate per head; here all queries come first, next to the keys."""
    at = prefix + "self_attn."
    query, gate = weights[at + "q_proj.weight"].view(dims.heads, 2, dims.head_dim, dims.hidden).unbind(1)
    rows = [
        query.reshape(-1, dims.hidden),
        weights[at + "k_proj.weight"],
        gate.reshape(-1, dims.hidden),
        weights[at + "v_proj.weight"],
    ]
    scale = torch.cat(
        [
            ((1.0 + weights[at + "q_norm.weight"]) * dims.head_dim**-0.5).expand(dims.heads, -1),
            (1.0 + weights[at + "k_norm.weight"]).expand(dims.kv_heads, -1),
        ]
    )
    return GatedAttention(dims, plane, pack(torch.cat(rows)), pack(weights[at + "o_proj.weight"]), scale)
