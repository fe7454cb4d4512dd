"""What a `config.json` of a decoder with plain attention says: llama, qwen3, qwen3_moe, mistral and gemma3 text models, as
Hugging Face writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from services.gpu_worker.engine.config import FULL, SLIDING, ModelDims
from services.gpu_worker.engine.models.fields import listed, need, optional, refuse
from services.gpu_worker.engine.models.rope import RopeScaling

LLAMA: Final = "llama"
MISTRAL: Final = "mistral"
QWEN3: Final = "qwen3"
QWEN3_MOE: Final = "qwen3_moe"
GEMMA3: Final = "gemma3_text"

_GELU: Final = "gelu_pytorch_tanh"

_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    GEMMA3: {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    MISTRAL: {"sliding_window": 4096},
}
"""What public folders leave out of their config, since transformers 5.24 has it as a default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseTraits:
    """How a family computes, beyond the dimensions."""

    model_type: str
    qk_norm: bool = False
    """Queries and keys are normed, head by head."""
    zero_centred: bool = False
    """Norms multiply by 1 + w instead of by w."""
    sandwich: bool = False
    """What attention and mlp give is normed before it is added."""
    gelu: bool = False
    query_scale: float
    embedding_scale: float = 1.0
    logit_cap: float | None = None
    """Logits become cap * tanh(logits / cap)."""
    scaling: RopeScaling
    """Of the full-attention layers' positions."""
    local_theta: float
    """RoPE base of the sliding layers."""
    local_scaling: RopeScaling
    """Of their positions."""


def read_dense(config: Mapping[str, Any]) -> tuple[ModelDims, DenseTraits]:
    """Parse a `config.json` (a nested `text_config` is followed). Raises `EngineFault` naming the field that is missing
    or outside what this engine computes."""
    kind = GEMMA3 if str(config.get("model_type")).startswith("gemma3") else str(config.get("model_type"))
    text = {**_DEFAULTS.get(kind, {}), **config.get("text_config", config)}
    gemma = kind == GEMMA3
    hidden, heads = need(text, "hidden_size"), need(text, "num_attention_heads")
    head_dim = optional(text, "head_dim") or hidden // heads
    kv_heads = optional(text, "num_key_value_heads") or heads
    _refuse(kind, text, heads, kv_heads, head_dim)
    full, local = _rope(text, gemma)
    layer_types = _layer_types(text, kind)
    dims = ModelDims(
        vocab=need(text, "vocab_size"),
        hidden=hidden,
        intermediate=0 if kind == QWEN3_MOE else need(text, "intermediate_size"),
        layer_types=layer_types,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        rope_theta=float(full.get("rope_theta", 1_000_000.0 if gemma else 10_000.0)),
        eps=float(text.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", gemma))),
        max_positions=need(text, "max_position_embeddings"),
        has_mtp=False,
        window=need(text, "sliding_window") if SLIDING in layer_types else 0,
    )
    traits = DenseTraits(
        model_type=kind,
        qk_norm=kind in (QWEN3, QWEN3_MOE, GEMMA3),
        zero_centred=gemma,
        sandwich=gemma,
        gelu=gemma,
        query_scale=float(text["query_pre_attn_scalar"] if gemma else head_dim) ** -0.5,
        embedding_scale=float(hidden) ** 0.5 if gemma else 1.0,
        logit_cap=text.get("final_logit_softcapping") if gemma else None,
        scaling=RopeScaling.from_hf(full),
        local_theta=float(local.get("rope_theta", 10_000.0)),
        local_scaling=RopeScaling.from_hf(local),
    )
    return _with_experts(dims, text) if kind == QWEN3_MOE else dims, traits


def _with_experts(dims: ModelDims, text: Mapping[str, Any]) -> ModelDims:
    """A mixture in every n-th layer, but where the config wants a plain one."""
    step, plain = int(text.get("decoder_sparse_step") or 1), text.get("mlp_only_layers") or ()
    layers = range(len(dims.layer_types))
    return replace(
        dims,
        experts=optional(text, "num_experts") or need(text, "num_local_experts"),
        experts_per_row=need(text, "num_experts_per_tok"),
        expert_width=need(text, "moe_intermediate_size"),
        expert_weights_sum_to_one=bool(text.get("norm_topk_prob", False)),
        dense_layers=tuple(index for index in layers if index in plain or (index + 1) % step),
        dense_width=need(text, "intermediate_size"),
    )


def _refuse(kind: str, text: Mapping[str, Any], heads: int, kv_heads: int, head_dim: int) -> None:
    activation = text.get("hidden_activation" if kind == GEMMA3 else "hidden_act", None)
    wanted = _GELU if kind == GEMMA3 else "silu"
    faults = {
        f"hidden activation {activation!r}: only {wanted!r} is computed": activation not in (None, wanted),
        "attention_bias: projections with a bias are not computed": bool(text.get("attention_bias")),
        "mlp_bias: projections with a bias are not computed": bool(text.get("mlp_bias")),
        f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}": bool(
            heads % kv_heads
        ),
        f"head_dim {head_dim} is odd": bool(head_dim % 2),
        "attn_logit_softcapping: capped attention scores are not computed": bool(
            text.get("attn_logit_softcapping")
        ),
        "use_bidirectional_attention: only causal attention is computed": bool(
            text.get("use_bidirectional_attention")
        ),
    }
    refuse(faults)


def _rope(text: Mapping[str, Any], gemma: bool) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Parameters of full-attention and of sliding layers, in the form of today or in that of older folders."""
    rope = text.get("rope_parameters") or {}
    if FULL in rope or SLIDING in rope:
        return rope.get(FULL) or {}, rope.get(SLIDING) or {}
    full = {**(text.get("rope_scaling") or {}), **rope}
    if text.get("rope_theta") is not None:
        full.setdefault("rope_theta", text["rope_theta"])
    if not gemma:
        return full, full
    local = text.get("rope_local_base_freq")
    return full, {} if local is None else {"rope_theta": local}


def _layer_types(text: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    layers = need(text, "num_hidden_layers")
    types = text.get("layer_types")
    if types is None:
        types = [_layer_type(text, kind, index) for index in range(layers)]
    return listed(types, layers, (FULL, SLIDING))


def _layer_type(text: Mapping[str, Any], kind: str, index: int) -> str:
    """Where `layer_types` is not said: every n-th layer of a gemma is full, all layers of a mistral with a window slide."""
    if kind == GEMMA3:
        return SLIDING if (index + 1) % int(text.get("sliding_window_pattern") or 6) else FULL
    windowed = text.get("sliding_window") if kind == MISTRAL else None
    if kind in (QWEN3, QWEN3_MOE) and text.get("use_sliding_window"):
        windowed = text.get("sliding_window") if index >= int(text.get("max_window_layers", 28)) else None
    return SLIDING if windowed else FULL
