"""A block drafter of random weights, written as a folder of the published layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from services.gpu_worker.engine.config import SLIDING, ModelDims
from services.gpu_worker.engine.models.block_config import BlockDims
from services.gpu_worker.engine.models.block_tensors import block_shapes

LAYERS = 2


def block_hf_config(target: ModelDims, **fields: Any) -> dict[str, Any]:
    """A DFlash2 config that fits the target: two sliding layers, a window of 40, blocks of 5; `fields` override."""
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_act": "silu",
        "is_causal": False,
        "block_size": 5,
        "mask_token_id": 1,
        "target_layer_ids": sorted({0, len(target.layer_types) - 1}),
        "num_target_layers": len(target.layer_types),
        "hidden_size": target.hidden,
        "intermediate_size": 2 * target.hidden,
        "num_hidden_layers": LAYERS,
        "layer_types": [SLIDING] * LAYERS,
        "sliding_window": 40,
        "use_sliding_window": True,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": target.vocab,
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "dflash_config": {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 8,
            "selector_top_k": 16,
        },
    } | fields


def write_random_block(
    folder: Path, config: Mapping[str, Any], *, seed: int = 0, extra: Mapping[str, Tensor] | None = None
) -> Path:
    """Write config.json and model.safetensors (float32) into `folder`; returns it. `extra` = more tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    shapes = block_shapes(BlockDims.from_hf(config))
    weights = {name: _draw(name, shape, generator) for name, shape in shapes.items()} | dict(extra or {})
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    return folder


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norms near one, convolutions near the identity, products that keep the scale of their input."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("base_kernel"):
        noise = 0.1 * noise
        noise[:, 0] += 1.0
        return noise
    if len(shape) == 1:
        return 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
    return noise.mul_(shape[-1] ** -0.5)
