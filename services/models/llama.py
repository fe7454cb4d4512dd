"""A GGUF file of the `llama` architecture as a Hugging Face model: its config, and which tensor becomes which.

GGUF stores the rows of attn_q and attn_k so that the two halves of a rotated pair lie side by side; Hugging Face keeps the
first halves of a head before the second ones. Rows are put back here, head by head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from services.models.faults import ModelFault
from services.models.gguf import GgufFile

Floats = NDArray[np.float32]

_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Of a layer: blk.N.<key>.weight -> model.layers.N.<value>.weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaLayout:
    """What a file holds, in Hugging Face's words."""

    config: dict[str, Any]
    """For config.json."""
    shapes: dict[str, tuple[int, ...]]
    """Of every tensor, in the order of the file to be written."""
    read: Callable[[str], Floats]
    """A tensor by its Hugging Face name."""


def layout(file: GgufFile) -> LlamaLayout:
    """Raises ModelFault naming the field or tensor that is missing, of another shape, or unknown."""
    if file.text("general.architecture") != "llama":
        raise ModelFault(f"{file.path}: architecture {file.text('general.architecture')!r}; read is 'llama'")
    tied = "output.weight" not in file.tensors
    config = _config(file, tied=tied)
    sources = _sources(config["num_hidden_layers"], tied=tied)
    unknown = sorted(file.tensors.keys() - set(sources.values()))
    if unknown:
        raise ModelFault(f"{file.path}: tensor {unknown[0]} is none of a llama model's")
    shapes = _shapes(config, sources)
    for name, source in sources.items():
        found = file.tensors[source].shape if source in file.tensors else None
        if found != shapes[name]:
            raise ModelFault(f"{file.path}: tensor {source} has shape {found}, expected {shapes[name]}")
    heads = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}

    def read(name: str) -> Floats:
        values = file.read(sources[name])
        count = heads.get(".".join(name.split(".")[-2:]))
        return values if count is None else unpermuted(values, count)

    return LlamaLayout(config=config, shapes=shapes, read=read)


def unpermuted(weight: Floats, heads: int) -> Floats:
    """Rows [heads * d, in] from GGUF's order to Hugging Face's: (d/2, 2) -> (2, d/2) in every head."""
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def _config(file: GgufFile, *, tied: bool) -> dict[str, Any]:
    hidden, heads = file.integer("llama.embedding_length"), file.integer("llama.attention.head_count")
    head_dim = file.integer("llama.rope.dimension_count")
    if heads <= 0 or head_dim * heads != hidden:
        raise ModelFault(f"{file.path}: {heads} heads of {head_dim} are no {hidden} channels")
    ids = {name: file.fields.get(f"tokenizer.ggml.{name}") for name in ("bos_token_id", "eos_token_id")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        **ids,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": file.integer("llama.feed_forward_length"),
        "max_position_embeddings": file.integer("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": file.integer("llama.block_count"),
        "num_key_value_heads": file.integer("llama.attention.head_count_kv"),
        "rms_norm_eps": file.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number("llama.rope.freq_base"),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": len(file.strings("tokenizer.ggml.tokens")),
    }


def _sources(layers: int, *, tied: bool) -> dict[str, str]:
    """Hugging Face name -> name in the file."""
    sources = {"model.embed_tokens.weight": "token_embd.weight"}
    for index in range(layers):
        for ours, theirs in _LAYER.items():
            sources[f"model.layers.{index}.{theirs}.weight"] = f"blk.{index}.{ours}.weight"
    sources["model.norm.weight"] = "output_norm.weight"
    if not tied:
        sources["lm_head.weight"] = "output.weight"
    return sources


def _shapes(config: dict[str, Any], sources: dict[str, str]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    by_kind = {
        "embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "norm": (hidden,), "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,), "q_proj": (hidden, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden),
        "o_proj": (hidden, hidden), "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
    }  # fmt: skip
    return {name: by_kind[name.split(".")[-2]] for name in sources}
