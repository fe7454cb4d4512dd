"""Small qwen3_next models with random weights, written as Hugging Face folders: for tests and `prove`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.models.qwen3_next import next_shapes, read_next
from services.gpu_worker.engine.models.random import TINY, draw, hf_config, write_folder

EXPERTS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 32,
}
"""A small mixture with one plain layer."""


def next_hf_config(dims: ModelDims = TINY, **changes: Any) -> dict[str, Any]:
    """A small `config.json`, with fields changed; dense unless they say otherwise."""
    kind = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": 0}
    return {**hf_config(dims), **kind, **changes}


def write_random_next(
    folder: Path, config: Mapping[str, Any], *, seed: int = 0, with_mtp: bool = True, mtp_mixes: bool = True
) -> Path:
    """Write a folder of `config`; returns it. The same arguments give the same bytes."""
    generator = torch.Generator().manual_seed(seed)
    dims = read_next(config, has_mtp=with_mtp, mtp_mixes=mtp_mixes)
    weights = {name: draw(name, shape, generator) for name, shape in next_shapes(dims).items()}
    return write_folder(folder, config, weights)
