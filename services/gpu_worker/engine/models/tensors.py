"""Names and shapes of a hybrid checkpoint's tensors, as Hugging Face stores them. The loader and the writer of random
models share this table, so neither can drift from the other."""

from __future__ import annotations

from services.gpu_worker.engine.config import LINEAR, ModelDims

Shapes = dict[str, tuple[int, ...]]


def checkpoint_shapes(dims: ModelDims) -> Shapes:
    """Every tensor that a model of these dimensions needs, in the order of the forward."""
    shapes: Shapes = {"model.embed_tokens.weight": (dims.vocab, dims.hidden)}
    for index, kind in enumerate(dims.layer_types):
        prefix = f"model.layers.{index}."
        shapes |= _delta(dims, prefix) if kind == LINEAR else _attention(dims, prefix)
        shapes |= _feed_forward(dims, prefix, index)
    shapes["model.norm.weight"] = (dims.hidden,)
    if not dims.tie_embeddings:
        shapes["lm_head.weight"] = (dims.vocab, dims.hidden)
    if dims.has_mtp:
        shapes |= {
            "mtp.fc.weight": (dims.hidden, 2 * dims.hidden),
            "mtp.pre_fc_norm_embedding.weight": (dims.hidden,),
            "mtp.pre_fc_norm_hidden.weight": (dims.hidden,),
            **_attention(dims, "mtp.layers.0."),
            **_feed_forward(dims, "mtp.layers.0.", len(dims.layer_types)),
            "mtp.norm.weight": (dims.hidden,),
        }
    return shapes


def _delta(dims: ModelDims, prefix: str) -> Shapes:
    at = prefix + "linear_attn."
    heads, values = dims.gdn_value_heads, dims.gdn_value_heads * dims.gdn_value_dim
    return {
        at + "in_proj_qkv.weight": (dims.conv_channels, dims.hidden),
        at + "in_proj_z.weight": (values, dims.hidden),
        at + "in_proj_b.weight": (heads, dims.hidden),
        at + "in_proj_a.weight": (heads, dims.hidden),
        at + "conv1d.weight": (dims.conv_channels, 1, dims.conv_kernel),
        at + "dt_bias": (heads,),
        at + "A_log": (heads,),
        at + "norm.weight": (dims.gdn_value_dim,),
        at + "out_proj.weight": (dims.hidden, values),
    }


def _attention(dims: ModelDims, prefix: str) -> Shapes:
    at = prefix + "self_attn."
    queries, keys = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    return {
        at + "q_proj.weight": (2 * queries, dims.hidden),
        at + "k_proj.weight": (keys, dims.hidden),
        at + "v_proj.weight": (keys, dims.hidden),
        at + "o_proj.weight": (dims.hidden, queries),
        at + "q_norm.weight": (dims.head_dim,),
        at + "k_norm.weight": (dims.head_dim,),
    }


def _feed_forward(dims: ModelDims, prefix: str, layer: int) -> Shapes:
    norms = {
        prefix + "input_layernorm.weight": (dims.hidden,),
        prefix + "post_attention_layernorm.weight": (dims.hidden,),
    }
    at = prefix + "mlp."
    if dims.mixes(layer):
        return norms | _mixture(dims, at)
    return norms | mlp_shapes(dims.hidden, dims.dense_width or dims.intermediate, at)


def mlp_shapes(hidden: int, width: int, at: str) -> Shapes:
    """A SwiGLU layer, its name ending in a dot."""
    return {
        at + "gate_proj.weight": (width, hidden),
        at + "up_proj.weight": (width, hidden),
        at + "down_proj.weight": (hidden, width),
    }


def _mixture(dims: ModelDims, at: str) -> Shapes:
    return {
        at + "gate.weight": (dims.experts, dims.hidden),
        at + "experts.gate_up_proj": (dims.experts, 2 * dims.expert_width, dims.hidden),
        at + "experts.down_proj": (dims.experts, dims.hidden, dims.expert_width),
        at + "shared_expert_gate.weight": (1, dims.hidden),
        **mlp_shapes(dims.hidden, dims.intermediate, at + "shared_expert."),
    }
