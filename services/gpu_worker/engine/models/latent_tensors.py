"""Names and shapes of a latent-attention checkpoint's tensors, as Hugging Face stores them; its MTP head is one layer more."""

from __future__ import annotations

from services.gpu_worker.engine.config import KeyIndex, Latent, ModelDims
from services.gpu_worker.engine.models.expert_tensors import expert_shapes
from services.gpu_worker.engine.models.tensors import Shapes, mlp_shapes


def latent_shapes(dims: ModelDims) -> Shapes:
    """Every tensor that a model of these dimensions needs, in the order of the forward."""
    shapes: Shapes = {"model.embed_tokens.weight": (dims.vocab, dims.hidden)}
    layers = len(dims.layer_types)
    for index in range(layers):
        shapes |= _layer(dims, index)
    shapes["model.norm.weight"] = (dims.hidden,)
    if not dims.tie_embeddings:
        shapes["lm_head.weight"] = (dims.vocab, dims.hidden)
    if dims.has_mtp:
        at = head_prefix(dims)
        shapes |= {
            at + "enorm.weight": (dims.hidden,),
            at + "hnorm.weight": (dims.hidden,),
            at + "eh_proj.weight": (dims.hidden, 2 * dims.hidden),
            **_layer(dims, layers),
            at + "shared_head.norm.weight": (dims.hidden,),
        }
    return shapes


def head_prefix(dims: ModelDims) -> str:
    """Of the MTP head's tensors."""
    return f"model.layers.{len(dims.layer_types)}."


def head_copies(dims: ModelDims) -> dict[str, str]:
    """What an MTP head may hold of the trunk's tensors once more, and which tensor that is."""
    at, embedding = head_prefix(dims), "model.embed_tokens.weight"
    return {
        at + "embed_tokens.weight": embedding,
        at + "shared_head.head.weight": embedding if dims.tie_embeddings else "lm_head.weight",
    }


def _layer(dims: ModelDims, index: int) -> Shapes:
    assert dims.latent is not None
    prefix = f"model.layers.{index}."
    shapes = {
        prefix + "input_layernorm.weight": (dims.hidden,),
        **_attention(dims, dims.latent, prefix + "self_attn."),
        **_indexer(dims, dims.latent, index),
        prefix + "post_attention_layernorm.weight": (dims.hidden,),
    }
    at = prefix + "mlp."
    if not dims.mixes(index):
        return shapes | mlp_shapes(dims.hidden, dims.dense_width, at)
    return shapes | {
        at + "gate.weight": (dims.experts, dims.hidden),
        at + "gate.e_score_correction_bias": (dims.experts,),
        **expert_shapes(at + "experts.", dims),
        **mlp_shapes(dims.hidden, dims.intermediate, at + "shared_experts."),
    }


def _indexer(dims: ModelDims, widths: Latent, layer: int) -> Shapes:
    index: KeyIndex | None = widths.index
    if index is None or layer in index.shared:
        return {}
    at = f"model.layers.{layer}.self_attn.indexer."
    return {
        at + "wq_b.weight": (index.heads * index.width, widths.query_rank),
        at + "wk.weight": (index.width, dims.hidden),
        at + "k_norm.weight": (index.width,),
        at + "k_norm.bias": (index.width,),
        at + "weights_proj.weight": (index.heads, dims.hidden),
    }


def _attention(dims: ModelDims, widths: Latent, at: str) -> Shapes:
    queries = dims.heads * (widths.nope_dim + widths.rope_dim)
    shapes: Shapes = {at + "q_proj.weight": (queries, dims.hidden)}
    if widths.query_rank:
        shapes = {
            at + "q_a_proj.weight": (widths.query_rank, dims.hidden),
            at + "q_a_layernorm.weight": (widths.query_rank,),
            at + "q_b_proj.weight": (queries, widths.query_rank),
        }
    return shapes | {
        at + "kv_a_proj_with_mqa.weight": (widths.rank + widths.rope_dim, dims.hidden),
        at + "kv_a_layernorm.weight": (widths.rank,),
        at + "kv_b_proj.weight": (dims.heads * (widths.nope_dim + widths.value_dim), widths.rank),
        at + "o_proj.weight": (dims.hidden, dims.heads * widths.value_dim),
    }
