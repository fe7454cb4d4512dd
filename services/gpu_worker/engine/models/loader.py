"""From a Hugging Face folder (config.json, safetensors) to a model in its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.models.block import BlockDrafter
from services.gpu_worker.engine.models.checkpoint import Checkpoint, read_json
from services.gpu_worker.engine.models.family import Model
from services.gpu_worker.engine.models.registry import blueprint
from services.gpu_worker.engine.placement import CPU, Placement
from shared.errors import EngineFault

_GENERATION = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model ready to run, and what its folder says about generation."""

    dims: ModelDims
    model: Model
    """What `ModelRunner` takes."""
    weights_digest: str
    """SHA-256, hex, over the names, shapes, dtypes and bytes of all tensors used."""
    eos_ids: frozenset[int]
    generation_defaults: dict[str, float | int | bool]
    """do_sample, temperature, top_k, top_p, min_p, repetition_penalty, as far as the folder names them."""
    traits: dict[str, object] = field(default_factory=dict)
    """What the family computes beyond the dimensions."""
    drafter: BlockDrafter | None = None
    """A block drafter that was loaded beside it."""


def load_model(folder: Path, *, threads: int = 1, placement: Placement = CPU) -> LoadedModel:
    """Read the folder's safetensors (one file or an index) tensor by tensor into a model.

    The family is that of the config's `model_type` (`registry`). Sets torch's intra-op threads, then takes the placement's
    matmul recipe for these shapes. Accepts the prefixes of vision-language checkpoints; without `mtp.*` tensors
    `dims.has_mtp` is false. Raises `EngineFault` naming the file, tensor, expected and actual shape.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    checkpoint = Checkpoint(folder)
    plan = blueprint(folder, config, checkpoint)
    weights, digest = checkpoint.load(plan.tensors)
    torch.set_num_threads(threads)
    recipe = placement.recipe_for(plan.products)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return LoadedModel(
        dims=plan.dims,
        model=plan.build(weights, recipe, placement),
        weights_digest=digest,
        eos_ids=_eos(generation.get("eos_token_id", config.get("eos_token_id")), folder),
        generation_defaults={
            name: value
            for name in _GENERATION
            if isinstance(value := generation.get(name), (bool, int, float))
        },
        traits=plan.traits,
    )


def _eos(value: object, folder: Path) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise EngineFault(f"{folder}: eos_token_id must be an id or a list of ids, not {value!r}")
    return frozenset(ids)
