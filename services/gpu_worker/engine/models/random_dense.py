"""Small dense models with random weights, written as Hugging Face folders: for tests, `prove` and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from services.gpu_worker.engine.config import FULL, SLIDING
from services.gpu_worker.engine.models.dense import dense_shapes
from services.gpu_worker.engine.models.dense_config import (
    GEMMA3,
    LLAMA,
    MISTRAL,
    QWEN3,
    QWEN3_MOE,
    read_dense,
)
from services.gpu_worker.engine.models.random import write_folder

WINDOW: Final = 100
"""Of the sliding layers: off the grid, so that windows begin inside of blocks."""

_COMMON: Final[Mapping[str, Any]] = {
    "dtype": "float32",
    "attention_bias": False,
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 512,
}

_PLAIN_ROPE: Final = {"rope_type": "default", "rope_theta": 10_000.0}

_FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    GEMMA3: {
        "architectures": ["Gemma3ForCausalLM"],
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            SLIDING: _PLAIN_ROPE,
        },
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
    },
    LLAMA: {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        "tie_word_embeddings": False,
    },
    MISTRAL: {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "rope_parameters": _PLAIN_ROPE,
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
    },
    QWEN3_MOE: {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "mlp_only_layers": [1],
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "rope_parameters": _PLAIN_ROPE,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    QWEN3: {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "rope_parameters": _PLAIN_ROPE,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
}


def dense_hf_config(family: str, **changes: Any) -> dict[str, Any]:
    """A small `config.json` of a family, with fields changed."""
    return {**_COMMON, "model_type": family, **_FAMILIES[family], **changes}


def write_random_dense(folder: Path, config: Mapping[str, Any], *, seed: int = 0) -> Path:
    """Write config.json, generation_config.json and model.safetensors (float32) into `folder`; returns it.

    The same arguments give the same bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    dims, traits = read_dense(config)
    centre = 0.0 if traits.zero_centred else 1.0
    weights = {
        name: _draw(name, shape, centre, generator) for name, shape in dense_shapes(dims, traits).items()
    }
    return write_folder(folder, config, weights)


def _draw(name: str, shape: tuple[int, ...], centre: float, generator: torch.Generator) -> Tensor:
    """Norms near their neutral value, products that keep the scale of their input."""
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return centre + 0.1 * noise
    return noise * (shape[-1] ** -0.5)
