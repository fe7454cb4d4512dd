"""What the `config.json` of a latent-attention decoder says: glm_moe_dsa, glm4_moe_lite, deepseek_v3 and deepseek_v32.

Attention of glm_moe_dsa and deepseek_v32 is sparse: a row sees the `index_topk` keys that a small indexer scores highest,
or all when there are no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from services.gpu_worker.engine.config import FULL, KeyIndex, Latent, ModelDims
from services.gpu_worker.engine.models.fields import need, optional, refuse
from services.gpu_worker.engine.models.rope import RopeScaling, yarn_magnitude
from shared.errors import EngineFault

GLM_DSA: Final = "glm_moe_dsa"
GLM_LITE: Final = "glm4_moe_lite"
DEEPSEEK_V3: Final = "deepseek_v3"
DEEPSEEK_V32: Final = "deepseek_v32"

_INDEXED: Final = (GLM_DSA, DEEPSEEK_V32)

_DENSE_FIRST: Final[Mapping[str, int]] = {GLM_DSA: 3, GLM_LITE: 1, DEEPSEEK_V3: 3, DEEPSEEK_V32: 3}
"""Plain layers at the bottom where the config does not say how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentTraits:
    """How a family computes, beyond the dimensions."""

    model_type: str
    interleaved: bool
    """RoPE turns neighbours, (x0, x1), (x2, x3), .., instead of halves."""
    index_interleaved: bool
    """The same in the index of sparse attention."""
    scaling: RopeScaling
    softmax_scale: float
    groups: int
    """Of experts; a row chooses from `best_groups` of them."""
    best_groups: int
    routed_factor: float
    """What the routed experts' weights are multiplied by."""


def read_latent(config: Mapping[str, Any], *, has_mtp: bool) -> tuple[ModelDims, LatentTraits]:
    """Parse a `config.json`. Raises `EngineFault` naming the field that is missing or outside what is computed."""
    kind = str(config.get("model_type"))
    layers, width = need(config, "num_hidden_layers"), need(config, "moe_intermediate_size")
    widths = _widths(config, layers, indexed=kind in _INDEXED)
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    experts = optional(config, "n_routed_experts") or need(config, "num_experts")
    groups = optional(config, "n_group") or 1
    best = optional(config, "topk_group") or 1
    _refuse(config, widths, rope, experts, (groups, best))
    dims = ModelDims(
        vocab=need(config, "vocab_size"),
        hidden=need(config, "hidden_size"),
        intermediate=width * need(config, "n_shared_experts"),
        layer_types=(FULL,) * layers,
        heads=need(config, "num_attention_heads"),
        kv_heads=1,
        head_dim=widths.row,
        rotary_dim=widths.rope_dim,
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        eps=float(config.get("rms_norm_eps", 1e-6 if kind in (DEEPSEEK_V3, DEEPSEEK_V32) else 1e-5)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_positions=need(config, "max_position_embeddings"),
        has_mtp=has_mtp,
        experts=experts,
        experts_per_row=need(config, "num_experts_per_tok"),
        expert_width=width,
        expert_weights_sum_to_one=bool(config.get("norm_topk_prob", True)),
        dense_layers=_dense_layers(config, kind, layers),
        dense_width=need(config, "intermediate_size"),
        latent=widths,
    )
    return dims, LatentTraits(
        model_type=kind,
        interleaved=bool(config.get("rope_interleave", True)),
        index_interleaved=kind == GLM_DSA,
        scaling=(scaling := RopeScaling.from_hf(rope)),
        softmax_scale=_softmax_scale(widths, scaling, rope),
        groups=groups,
        best_groups=best,
        routed_factor=float(config.get("routed_scaling_factor", 1.0)),
    )


def _widths(config: Mapping[str, Any], layers: int, *, indexed: bool) -> Latent:
    return Latent(
        rank=need(config, "kv_lora_rank"),
        rope_dim=need(config, "qk_rope_head_dim"),
        nope_dim=need(config, "qk_nope_head_dim"),
        value_dim=need(config, "v_head_dim"),
        query_rank=(need if indexed else optional)(config, "q_lora_rank") or 0,
        index=_index(config, layers) if indexed else None,
    )


def _index(config: Mapping[str, Any], layers: int) -> KeyIndex:
    types = config.get("indexer_types") or _indexer_types(config, layers)
    if len(types) != layers or not set(types) <= {"full", "shared"} or types[0] != "full":
        raise EngineFault(
            f"model config: indexer_types must hold {layers} of 'full' and 'shared', the first full, not {types!r}"
        )
    return KeyIndex(
        heads=need(config, "index_n_heads"),
        width=need(config, "index_head_dim"),
        most=need(config, "index_topk"),
        shared=tuple(number for number, kind in enumerate(types) if kind == "shared"),
    )


def _indexer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """A pattern of letters or words, or every so many layers from some layer on."""
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    every, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
    return ["full" if max(number - offset + 1, 0) % every == 0 else "shared" for number in range(layers)]


def _softmax_scale(widths: Latent, scaling: RopeScaling, rope: Mapping[str, Any]) -> float:
    """Over a stretched context scores are sharpened by the square of a magnitude."""
    scale: float = (widths.nope_dim + widths.rope_dim) ** -0.5
    if scaling.kind != "default" and rope.get("mscale_all_dim"):
        scale *= yarn_magnitude(scaling.factor, float(rope["mscale_all_dim"])) ** 2
    return scale


def _dense_layers(config: Mapping[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    types = config.get("mlp_layer_types")
    if types is None:
        first = config.get("first_k_dense_replace")
        return tuple(range(min(layers, _DENSE_FIRST[kind] if first is None else int(first))))
    if len(types) != layers or not set(types) <= {"dense", "sparse"}:
        raise EngineFault(
            f"model config: mlp_layer_types must hold {layers} of 'dense' and 'sparse', not {types!r}"
        )
    return tuple(index for index, of in enumerate(types) if of == "dense")


def _refuse(
    config: Mapping[str, Any],
    widths: Latent,
    rope: Mapping[str, Any],
    experts: int,
    groups: tuple[int, int],
) -> None:
    activation = config.get("hidden_act", "silu")
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    faults = {
        f"hidden_act {activation!r}: only 'silu' is computed": activation != "silu",
        "attention_bias: projections with a bias are not computed": bool(config.get("attention_bias")),
        "mlp_bias: projections with a bias are not computed": bool(config.get("mlp_bias")),
        f"partial_rotary_factor {factor}: only 1.0 is computed": factor != 1.0,
        f"qk_rope_head_dim {widths.rope_dim} is odd": bool(widths.rope_dim % 2),
        f"index_head_dim is below qk_rope_head_dim {widths.rope_dim}": bool(
            widths.index and widths.index.width < widths.rope_dim
        ),
        f"n_routed_experts {experts} is no multiple of n_group {groups[0]}": bool(experts % groups[0]),
        f"n_group {groups[0]}: groups of one expert are not computed": groups[0] > 1
        and experts < 2 * groups[0],
        f"topk_group {groups[1]} exceeds n_group {groups[0]}": groups[1] > groups[0],
        f"moe_layer_freq {config.get('moe_layer_freq')}: only 1 is computed": config.get("moe_layer_freq", 1)
        != 1,
    }
    refuse(faults)
