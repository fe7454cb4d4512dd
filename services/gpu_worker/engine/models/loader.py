"""From a Hugging Face folder (config.json, safetensors) to a model in its place."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.models.block import BlockDrafter
from services.gpu_worker.engine.models.checkpoint import Checkpoint, Progress, read_json
from services.gpu_worker.engine.models.family import Model
from services.gpu_worker.engine.models.kinds import checked
from services.gpu_worker.engine.models.quantised import read_block
from services.gpu_worker.engine.models.registry import blueprint
from services.gpu_worker.engine.placement import CPU, Placement
from shared.errors import EngineFault

log = logging.getLogger(__name__)

_WORTH_TELLING: Final = 1 << 28
"""Bytes of a model whose loading is told in steps."""

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


def load_model(
    folder: Path, *, threads: int = 1, placement: Placement = CPU, progress: Progress | None = None
) -> LoadedModel:
    """Read the folder's safetensors (one file or an index) tensor by tensor into a model.

    The family is that of the config's `model_type` (`registry`). Sets torch's intra-op threads, then takes the placement's
    matmul recipe for these shapes. Accepts the prefixes of vision-language checkpoints; without tensors of an MTP head
    `dims.has_mtp` is false. A layer's tensors lie twice in memory while it is packed, others never do. `progress` = who is
    told of every tensor; null: the log, now and then. Raises `EngineFault` naming the file, tensor, expected and actual
    shape.
    """
    folder = Path(folder)
    config = checked(read_json(folder / "config.json"))
    checkpoint = Checkpoint(folder)
    plan = blueprint(folder, config, checkpoint)
    torch.set_num_threads(threads)
    block = read_block(config)
    told = progress or LoggedProgress(folder.name)
    with checkpoint.open(plan.tensors, unused=plan.unused, block=block, progress=told) as weights:
        # After the shapes are checked: the recipe is tried on products of these sizes.
        recipe = placement.recipe_for(plan.products)
        model = plan.build(weights, recipe, placement)
        digest = weights.digest()
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return LoadedModel(
        dims=model.dims,
        model=model,
        weights_digest=digest,
        eos_ids=_eos(generation.get("eos_token_id", config.get("eos_token_id")), folder),
        generation_defaults={
            name: value
            for name in _GENERATION
            if isinstance(value := generation.get(name), (bool, int, float))
        },
        traits=plan.traits,
    )


class LoggedProgress:
    """A line in the log for each tenth of a model that takes a while."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._next = 1

    def __call__(self, read: int, total: int) -> None:
        if total >= _WORTH_TELLING and 10 * read >= self._next * total:
            self._next = 10 * read // total + 1
            log.info("loading %s: %d %% of %.1f GiB", self._name, 100 * read // total, total / 2**30)


def _eos(value: object, folder: Path) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise EngineFault(f"{folder}: eos_token_id must be an id or a list of ids, not {value!r}")
    return frozenset(ids)
