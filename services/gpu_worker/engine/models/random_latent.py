"""Small latent-attention models with random weights, written as Hugging Face folders: for tests and `prove`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from services.gpu_worker.engine.models.latent_config import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_DSA,
    GLM_LITE,
    read_latent,
)
from services.gpu_worker.engine.models.latent_tensors import latent_shapes
from services.gpu_worker.engine.models.random import write_folder

_COMMON: Final[Mapping[str, Any]] = {
    "dtype": "float32",
    "attention_bias": False,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "kv_lora_rank": 32,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 16,
    "vocab_size": 512,
}

_FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    DEEPSEEK_V3: {
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    },
    DEEPSEEK_V32: {
        "architectures": ["DeepseekV32ForCausalLM"],
        "first_k_dense_replace": 1,
        "index_head_dim": 16,
        "index_n_heads": 16,
        "index_topk": 96,
        "n_group": 4,
        "topk_group": 2,
    },
    GLM_DSA: {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "index_head_dim": 16,
        "index_n_heads": 16,
        "index_topk": 96,
        "indexer_types": ["full", "full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    GLM_LITE: {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
}


def latent_hf_config(family: str = GLM_LITE, **changes: Any) -> dict[str, Any]:
    """A small `config.json` of a family, with fields changed."""
    return {**_COMMON, "model_type": family, **_FAMILIES[family], **changes}


def write_random_latent(
    folder: Path, config: Mapping[str, Any], *, seed: int = 0, with_mtp: bool = True
) -> Path:
    """Write a folder of `config`, with an MTP head as the layer after the last; returns it.

    The same arguments give the same bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    dims, _ = read_latent(config, has_mtp=with_mtp)
    weights = {name: _draw(name, shape, generator) for name, shape in latent_shapes(dims).items()}
    return write_folder(folder, config, weights)


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norms near one, the router's bias large enough to change choices, products that keep the scale of their input."""
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 0.1 * noise if name.endswith("bias") else 1.0 + 0.1 * noise
    return noise if "embed_tokens" in name else noise * shape[-1] ** -0.5
