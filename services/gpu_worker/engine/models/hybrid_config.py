"""What the `config.json` of a qwen3_5 text model says, dense or a mixture; `qwen3_next` adds fields of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gpu_worker.engine.config import FULL, LINEAR, ModelDims
from services.gpu_worker.engine.models.fields import listed, need, refuse


def read_hybrid(config: Mapping[str, Any], *, has_mtp: bool) -> ModelDims:
    """Parse a `config.json` (a nested `text_config` is followed).

    `has_mtp` says whether the checkpoint holds `mtp.*` tensors. Raises `EngineFault` naming the field that is missing or
    outside what this engine computes.
    """
    text = config.get("text_config", config)
    rope = text.get("rope_parameters") or {}
    head_dim = need(text, "head_dim")
    factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    mixture = bool(text.get("num_experts"))
    dims = ModelDims(
        vocab=need(text, "vocab_size"),
        hidden=need(text, "hidden_size"),
        intermediate=need(text, "shared_expert_intermediate_size" if mixture else "intermediate_size"),
        experts=need(text, "num_experts") if mixture else 0,
        experts_per_row=need(text, "num_experts_per_tok") if mixture else 0,
        expert_width=need(text, "moe_intermediate_size") if mixture else 0,
        layer_types=_layer_types(text),
        heads=need(text, "num_attention_heads"),
        kv_heads=need(text, "num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * factor),
        rope_theta=float(rope.get("rope_theta", text.get("rope_theta", 10_000.0))),
        gdn_key_heads=need(text, "linear_num_key_heads"),
        gdn_value_heads=need(text, "linear_num_value_heads"),
        gdn_key_dim=need(text, "linear_key_head_dim"),
        gdn_value_dim=need(text, "linear_value_head_dim"),
        conv_kernel=need(text, "linear_conv_kernel_dim"),
        eps=float(text.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        max_positions=need(text, "max_position_embeddings"),
        has_mtp=has_mtp,
    )
    _check(dims, text, rope.get("rope_type", "default"))
    return dims


def _check(dims: ModelDims, text: Mapping[str, Any], rope_type: str) -> None:
    activation = text.get("hidden_act", "silu")
    refuse(
        {
            f"rope_type {rope_type!r}: only 'default' is computed": rope_type != "default",
            f"hidden_act {activation!r}: only 'silu' is computed": activation != "silu",
            "attention_bias: projections with a bias are not computed": bool(text.get("attention_bias")),
            f"num_attention_heads {dims.heads} is no multiple of num_key_value_heads {dims.kv_heads}": bool(
                dims.heads % dims.kv_heads
            ),
            f"linear_num_value_heads {dims.gdn_value_heads} is no multiple of linear_num_key_heads "
            f"{dims.gdn_key_heads}": bool(dims.gdn_value_heads % dims.gdn_key_heads),
            f"rotary dimension {dims.rotary_dim} is odd": bool(dims.rotary_dim % 2),
        }
    )


def _layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    layers = need(text, "num_hidden_layers")
    types = text.get("layer_types")
    if types is None:
        interval = int(text.get("full_attention_interval", 4))
        types = [LINEAR if (i + 1) % interval else FULL for i in range(layers)]
    return listed(types, layers, (LINEAR, FULL))
