"""Random weights: a small model written as a Hugging Face folder, or one of any size drawn where it shall live."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from services.gpu_worker.engine.config import FULL, LINEAR, ModelDims
from services.gpu_worker.engine.models.hybrid import HybridModel, matmul_shapes
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.models.tensors import checkpoint_shapes
from services.gpu_worker.engine.placement import Placement

TINY = ModelDims(
    vocab=512,
    hidden=64,
    intermediate=128,
    layer_types=(LINEAR, LINEAR, LINEAR, FULL),
    heads=4,
    kv_heads=2,
    head_dim=32,
    rotary_dim=8,
    rope_theta=10_000.0,
    gdn_key_heads=2,
    gdn_value_heads=4,
    gdn_key_dim=16,
    gdn_value_dim=16,
    conv_kernel=4,
    eps=1e-6,
    tie_embeddings=False,
    max_positions=4096,
    has_mtp=True,
)
"""Runs a forward in about a millisecond."""


def write_random_model(folder: Path, dims: ModelDims = TINY, *, seed: int = 0, with_mtp: bool = True) -> Path:
    """Write config.json, generation_config.json and model.safetensors (float32) into `folder`; returns it.

    The same arguments give the same bytes. `with_mtp` overrides `dims.has_mtp`.
    """
    dims = replace(dims, has_mtp=with_mtp)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: draw(name, shape, generator) for name, shape in checkpoint_shapes(dims).items()}
    return write_folder(folder, hf_config(dims), weights)


def write_folder(folder: Path, config: Mapping[str, object], weights: Mapping[str, Tensor]) -> Path:
    """Write config.json, generation_config.json (id 2 ends a stream) and model.safetensors; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [2], "do_sample": false}\n', encoding="utf-8"
    )
    return folder


class DrawnWeights(Mapping[str, Tensor]):
    """Weights of these dimensions, drawn on the placement's device as they are asked for: no files, never whole twice.

    A tensor is a function of its name, so that asking again gives it again.
    """

    def __init__(self, dims: ModelDims, placement: Placement) -> None:
        self._shapes = checkpoint_shapes(dims)
        self._placement = placement

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        matrix = len(shape) == 2 or ".experts." in name
        dtype = self._placement.dtype if matrix else torch.float32
        generator = torch.Generator(self._placement.device).manual_seed(zlib.crc32(name.encode()))
        return draw(name, shape, generator, dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def drawn_model(dims: ModelDims, placement: Placement) -> LoadedModel:
    """A model of random weights in its place; nothing ends its streams. For benchmarks."""
    recipe = placement.recipe_for(matmul_shapes(dims))
    return LoadedModel(
        dims=dims,
        model=HybridModel(dims, DrawnWeights(dims, placement), recipe, placement),
        weights_digest="drawn",
        eos_ids=frozenset(),
        generation_defaults={},
    )


def hf_config(dims: ModelDims) -> dict[str, object]:
    """The `config.json` that `read_hybrid` reads back as `dims`."""
    family = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "intermediate_size": dims.intermediate,
    }
    if dims.experts:
        family = {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "shared_expert_intermediate_size": dims.intermediate,
            "num_experts": dims.experts,
            "num_experts_per_tok": dims.experts_per_row,
            "moe_intermediate_size": dims.expert_width,
        }
    return {
        **family,
        "dtype": "float32",
        "attention_bias": False,
        "eos_token_id": 2,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "hidden_size": dims.hidden,
        "layer_types": list(dims.layer_types),
        "linear_conv_kernel_dim": dims.conv_kernel,
        "linear_key_head_dim": dims.gdn_key_dim,
        "linear_num_key_heads": dims.gdn_key_heads,
        "linear_num_value_heads": dims.gdn_value_heads,
        "linear_value_head_dim": dims.gdn_value_dim,
        "max_position_embeddings": dims.max_positions,
        "mtp_num_hidden_layers": int(dims.has_mtp),
        "num_attention_heads": dims.heads,
        "num_hidden_layers": len(dims.layer_types),
        "num_key_value_heads": dims.kv_heads,
        "rms_norm_eps": dims.eps,
        "rope_parameters": {
            "partial_rotary_factor": dims.rotary_dim / dims.head_dim,
            "rope_theta": dims.rope_theta,
            "rope_type": "default",
        },
        "tie_word_embeddings": dims.tie_embeddings,
        "vocab_size": dims.vocab,
    }


def draw(
    name: str, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Norms near their neutral value, decays between slow and fast, products that keep the scale of their input."""
    noise = torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)
    if name.endswith("linear_attn.norm.weight"):
        return 1.0 + 0.1 * noise
    if name.endswith("A_log"):
        return noise.sigmoid() * 4.0 - 2.0
    if name.endswith("dt_bias"):
        return noise - 1.0
    if len(shape) == 1:
        return 0.1 * noise
    if "embed_tokens" in name:
        return noise
    return noise.mul_(shape[-1] ** -0.5)
