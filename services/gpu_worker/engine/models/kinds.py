"""What kind of value a field of a `config.json` holds, whoever reads it: a wrong one is told by its name before any family
computes with it. What the values mean, and which of them are served, is each family's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeGuard

from shared.errors import EngineFault

MOST_COUNT: Final = 1 << 24
"""Of any size or number of things: more than public models have of anything, and less than would be mistaken for a place in
memory."""
_MOST_NUMBER: Final = 1e12

_OBJECTS: Final = frozenset(
    {
        "text_config", "rope_parameters", "rope_scaling", "quantization_config", "compression_config",
        "dflash_config", "dspark_config", "full_attention", "sliding_attention",
    }
)  # fmt: skip
_LISTS: Final = frozenset(
    {
        "architectures", "layer_types", "mlp_layer_types", "indexer_types", "mlp_only_layers", "target_layer_ids",
    }
)  # fmt: skip
_NUMBERS: Final = frozenset(
    {
        "rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "final_logit_softcapping",
        "routed_scaling_factor", "output_multiplier", "factor",
    }
)  # fmt: skip
_PARTS: Final = frozenset({"partial_rotary_factor"})
_COUNTS: Final = frozenset(
    {
        "decoder_sparse_step", "max_window_layers", "first_k_dense_replace", "index_topk_freq",
        "index_skip_topk_offset", "moe_layer_freq",
    }
)  # fmt: skip
_INTERVALS: Final = frozenset(
    {"full_attention_interval", "sliding_window_pattern", "original_max_position_embeddings"}
)
_FLAGS: Final = frozenset(
    {
        "tie_word_embeddings", "norm_topk_prob", "attention_bias", "mlp_bias", "rope_interleave", "is_causal",
        "sample_from_anchor", "sliding_window_non_causal", "use_sliding_window", "enable_confidence_head",
        "confidence_head_with_markov",
    }
)  # fmt: skip


def is_count(value: object, *, least: int = 1) -> TypeGuard[int]:
    """Whether `value` is an integer from `least` to MOST_COUNT; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_COUNT


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MOST_NUMBER


_KINDS: Final[tuple[tuple[frozenset[str], Callable[[Any], bool], str], ...]] = (
    (_OBJECTS, lambda value: isinstance(value, Mapping), "an object"),
    (_LISTS, lambda value: isinstance(value, list), "a list"),
    (_NUMBERS, _is_number, f"a number over 0 and at most {_MOST_NUMBER:g}"),
    (_PARTS, lambda value: _is_number(value) and value <= 1, "a number over 0 and at most 1"),
    (_COUNTS, lambda value: is_count(value, least=0), f"an integer from 0 to {MOST_COUNT}"),
    (_INTERVALS, is_count, f"an integer from 1 to {MOST_COUNT}"),
    (_FLAGS, lambda value: isinstance(value, bool), "true or false"),
)
_KIND_OF: Final = {name: (fits, words) for names, fits, words in _KINDS for name in names}


def checked(config: Mapping[str, Any], *, at: str = "") -> dict[str, Any]:
    """`config` without the nulls of the fields that are known here, since a null says what an absent field says.

    Raises:
        EngineFault: names the field by its path (`rope_parameters.rope_theta`), what it must be and what it is.
    """
    kept: dict[str, Any] = {}
    for name, value in config.items():
        kind = _KIND_OF.get(name)
        if kind is None:
            kept[name] = value
        elif value is not None:
            fits, words = kind
            if not fits(value):
                raise EngineFault(f"model config: {at}{name} must be {words}, not {_short(value)}")
            kept[name] = checked(value, at=f"{at}{name}.") if name in _OBJECTS else value
    return kept


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
