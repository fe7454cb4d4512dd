"""From a Hugging Face folder (config.json, safetensors) to a model in float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.gpu_worker.engine.config import ModelDims


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model ready to run, and what its folder says about generation."""

    dims: ModelDims
    model: object
    """What `ModelRunner` takes."""
    weights_digest: str
    """SHA-256, hex, over the names, shapes, dtypes and bytes of all tensors used."""
    eos_ids: frozenset[int]
    generation_defaults: dict[str, float | int | bool]
    """do_sample, temperature, top_k, top_p, min_p, repetition_penalty, as far as the folder names them."""


def load_model(folder: Path, *, threads: int = 1) -> LoadedModel:
    """Stream the folder's safetensors (one file or an index) into a model.

    Sets torch's intra-op threads. Accepts the `model.language_model.` prefix; without `mtp.*` tensors `dims.has_mtp` is
    false. Raises `EngineFault` naming the file, tensor, expected and actual shape.
    """
    raise NotImplementedError
