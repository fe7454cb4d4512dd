"""The tensors of a block drafter by their published names; what they mean is told in `block_config`."""

from __future__ import annotations

from pathlib import Path

from services.gpu_worker.engine.models.block_config import BlockDims
from services.gpu_worker.engine.models.tensors import Shapes
from shared.errors import EngineFault


def block_shapes(dims: BlockDims) -> Shapes:
    """Every tensor that such a drafter needs, by its published name."""
    hidden, queries, keys = dims.hidden, dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    shapes: Shapes = {"fc.weight": (hidden, len(dims.taps) * hidden), "hidden_norm.weight": (hidden,)}
    for index in range(dims.layers):
        at = f"layers.{index}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (queries, hidden),
            at + "self_attn.k_proj.weight": (keys, hidden),
            at + "self_attn.v_proj.weight": (keys, hidden),
            at + "self_attn.o_proj.weight": (hidden, queries),
            at + "self_attn.q_norm.weight": (dims.head_dim,),
            at + "self_attn.k_norm.weight": (dims.head_dim,),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "mlp.gate_proj.weight": (dims.intermediate, hidden),
            at + "mlp.up_proj.weight": (dims.intermediate, hidden),
            at + "mlp.down_proj.weight": (hidden, dims.intermediate),
        }
        for conv in ("attention_conv", "mlp_conv") if dims.conv_taps else ():
            groups = hidden // dims.conv_group
            shapes[f"{at}{conv}.base_kernel"] = (2, dims.conv_taps, hidden)
            shapes[f"{at}{conv}.kernel_projection.weight"] = (2 * dims.conv_taps * groups, hidden)
    shapes["norm.weight"] = (hidden,)
    return shapes | _head_shapes(dims)


def _head_shapes(dims: BlockDims) -> Shapes:
    shapes: Shapes = {}
    if dims.selector_rank:
        for name in ("predecessor_codebook", "successor_codebook"):
            shapes["candidate_selector." + name] = (dims.vocab, dims.selector_rank)
        shapes["candidate_selector.hidden_projection.weight"] = (dims.selector_rank, dims.hidden)
    if dims.markov_rank:
        shapes["markov_head.markov_w1.weight"] = (dims.vocab, dims.markov_rank)
        shapes["markov_head.markov_w2.weight"] = (dims.draft_vocab, dims.markov_rank)
    if dims.confidence:
        width = dims.hidden + dims.markov_rank * dims.confidence_with_markov
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def check_names(dims: BlockDims, names: frozenset[str], folder: Path) -> None:
    """Raises EngineFault when tensors are there that the config does not speak of: what they would add is not computed.

    The target's embedding and head, which some exports repeat, are let pass.
    """
    known = set(block_shapes(dims)) | {"d2t", "t2d", "embed_tokens.weight", "lm_head.weight"}
    extra = sorted(names - known)
    if extra:
        raise EngineFault(f"{folder}: the drafter's config says nothing of tensor {extra[0]}")
