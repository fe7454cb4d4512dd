"""A small model with random weights, written as a Hugging Face folder: for tests and benchmarks."""

from __future__ import annotations

from pathlib import Path

from services.gpu_worker.engine.config import ModelDims

TINY = ModelDims(
    vocab=512,
    hidden=64,
    intermediate=128,
    layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention"),
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


def write_random_model(folder: Path, dims: ModelDims = TINY, *, seed: int = 0, with_mtp: bool = True) -> Path:
    """Write config.json, generation_config.json and model.safetensors (float32) into `folder`; returns it.

    The same arguments give the same bytes. `with_mtp` overrides `dims.has_mtp`.
    """
    raise NotImplementedError
