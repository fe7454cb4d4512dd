"""Which family reads a folder, by the `model_type` of its config. A new family is one more line here.

A family answers a blueprint: the dimensions, the tensors that it needs, and how a model is built from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from kernels import matmul
from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.models.checkpoint import Checkpoint
from services.gpu_worker.engine.models.dense import DenseModel, dense_products, dense_shapes
from services.gpu_worker.engine.models.dense_config import read_dense
from services.gpu_worker.engine.models.expert_tensors import StackedExperts, one_by_one
from services.gpu_worker.engine.models.family import Model
from services.gpu_worker.engine.models.fields import need
from services.gpu_worker.engine.models.hybrid import HybridModel, matmul_shapes
from services.gpu_worker.engine.models.hybrid_config import read_hybrid
from services.gpu_worker.engine.models.latent import LatentModel, latent_products
from services.gpu_worker.engine.models.latent_config import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_DSA,
    GLM_LITE,
    read_latent,
)
from services.gpu_worker.engine.models.latent_tensors import head_copies, latent_shapes
from services.gpu_worker.engine.models.qwen3_next import NextWeights, next_shapes, read_next
from services.gpu_worker.engine.models.tensors import Shapes, checkpoint_shapes
from services.gpu_worker.engine.placement import Placement
from shared.errors import EngineFault

Build = Callable[[Mapping[str, Tensor], matmul.Recipe, Placement], Model]
"""(weights by name, the products' recipe, where they go) -> a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blueprint:
    """What a folder's config and tensor names say, before a weight is read."""

    dims: ModelDims
    tensors: Shapes
    products: set[tuple[int, int]]
    """(N, K) of every packed product, for the matmul self-test."""
    build: Build
    unused: tuple[str, ...] = ()
    """Patterns of tensors that a checkpoint of the family may hold besides."""
    traits: dict[str, object] = field(default_factory=dict)
    """What the family computes beyond the dimensions, for the fingerprint."""


Family = Callable[[Mapping[str, Any], Checkpoint], Blueprint]
"""Raises `EngineFault` naming the field or tensor that is wrong."""


def _hybrid(config: Mapping[str, Any], checkpoint: Checkpoint) -> Blueprint:
    dims = read_hybrid(config, has_mtp=_has_mtp(checkpoint))
    shapes = checkpoint_shapes(dims)
    # Published folders hold experts stacked, those that transformers writes one by one.
    each = one_by_one(shapes, dims, lambda name: name in checkpoint)
    return Blueprint(
        dims=dims,
        unused=_tied(dims),
        tensors=each if any(name in checkpoint for name in set(each) - set(shapes)) else shapes,
        products=matmul_shapes(dims),
        build=lambda weights, recipe, placement: HybridModel(
            dims, StackedExperts(weights, dims.experts), recipe, placement
        ),
    )


def _next(config: Mapping[str, Any], checkpoint: Checkpoint) -> Blueprint:
    mixes = "mtp.layers.0.mlp.gate.weight" in checkpoint
    dims = read_next(config, has_mtp=_has_mtp(checkpoint), mtp_mixes=mixes)
    return Blueprint(
        dims=dims,
        unused=_tied(dims),
        tensors=next_shapes(dims),
        products=matmul_shapes(dims),
        build=lambda weights, recipe, placement: HybridModel(
            dims, NextWeights(dims, weights), recipe, placement
        ),
    )


def _latent(config: Mapping[str, Any], checkpoint: Checkpoint) -> Blueprint:
    layers = need(config, "num_hidden_layers")
    dims, traits = read_latent(config, has_mtp=_has_layer(checkpoint, layers))
    copies = head_copies(dims) if dims.has_mtp else {}
    for copy, original in copies.items():
        if copy in checkpoint and original in checkpoint and not checkpoint.same(copy, original):
            raise EngineFault(
                f"{checkpoint.folder}: tensor {copy} differs from {original}: an MTP head shares embedding and head"
            )
    return Blueprint(
        dims=dims,
        unused=(*_tied(dims), *map(re.escape, copies)),
        tensors=latent_shapes(dims),
        products=latent_products(dims),
        build=partial(LatentModel, dims, traits),
        traits=asdict(traits),
    )


def _dense(config: Mapping[str, Any], checkpoint: Checkpoint) -> Blueprint:
    dims, traits = read_dense(config)
    return Blueprint(
        dims=dims,
        unused=_tied(dims),
        tensors=dense_shapes(dims, traits),
        products=dense_products(dims),
        build=partial(DenseModel, dims, traits),
        traits=asdict(traits),
    )


FAMILIES: Final[Mapping[str, Family]] = {
    "qwen3_next": _next,
    "qwen3_5": _hybrid,
    "qwen3_5_moe": _hybrid,
    "qwen3_5_moe_text": _hybrid,
    "qwen3_5_text": _hybrid,
    "gemma3": _dense,
    "gemma3_text": _dense,
    DEEPSEEK_V3: _latent,
    DEEPSEEK_V32: _latent,
    GLM_DSA: _latent,
    GLM_LITE: _latent,
    "llama": _dense,
    "mistral": _dense,
    "qwen3": _dense,
    "qwen3_moe": _dense,
}


def blueprint(folder: Path, config: Mapping[str, Any], checkpoint: Checkpoint) -> Blueprint:
    """Raises `EngineFault` for a family that nobody reads, and what the family raises."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise EngineFault(f"{folder}: model_type {config.get('model_type')!r} is none of {sorted(FAMILIES)}")
    return family(config, checkpoint)


def _tied(dims: ModelDims) -> tuple[str, ...]:
    """A head that is the embedding may be stored once more."""
    return (r"lm_head\.weight",) if dims.tie_embeddings else ()


def _has_layer(checkpoint: Checkpoint, index: int) -> bool:
    """Whether there is a layer after the last, the MTP head. Raises `EngineFault` when there are two."""
    deeper = sorted(name for name in checkpoint.names() if name.startswith(f"model.layers.{index + 1}."))
    if deeper:
        raise EngineFault(f"{checkpoint.folder}: an MTP head of one layer is expected, found {deeper[0]}")
    return any(name.startswith(f"model.layers.{index}.") for name in checkpoint.names())


def _has_mtp(checkpoint: Checkpoint) -> bool:
    names = [name for name in checkpoint.names() if name.startswith("mtp.")]
    deeper = sorted(
        name for name in names if name.startswith("mtp.layers.") and not name.startswith("mtp.layers.0.")
    )
    if deeper:
        raise EngineFault(f"{checkpoint.folder}: an MTP head of one layer is expected, found {deeper[0]}")
    return bool(names)
