"""Helpers for tests of block drafters: random ones of each published family, beside a tiny target."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.models.block import BlockDrafter
from services.gpu_worker.engine.models.block_loader import load_block
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.models.random_block import block_hf_config, write_random_block
from tests.engine_kit import tiny_model

VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "dflash2": {},
    "dflash2 causal": {"is_causal": True},
    "dflash": {"architectures": ["DFlashDraftModel"], "dflash_config": {}},
    "dspark": {
        "architectures": ["Qwen3DSparkModel"],
        "dflash_config": {},
        "markov_rank": 8,
        "enable_confidence_head": True,
    },
}
"""Fields over `block_hf_config`'s."""


def drafter_of(
    target: LoadedModel, variant: str = "dflash2", *, seed: int = 0, **fields: Any
) -> BlockDrafter:
    """A random drafter of a family for a target."""
    config = block_hf_config(target.dims, **(dict(VARIANTS[variant]) | fields))
    with tempfile.TemporaryDirectory() as folder:
        return load_block(write_random_block(Path(folder), config, seed=seed), target.model)


@cache
def block_model(variant: str = "dflash2", *, with_mtp: bool = True) -> LoadedModel:
    """The tiny model with a random drafter beside it, once a process."""
    target = tiny_model(with_mtp)
    return replace(target, drafter=drafter_of(target, variant))


def config_of(dims: ModelDims, variant: str = "dflash2", **fields: Any) -> dict[str, Any]:
    """The config of such a drafter."""
    return block_hf_config(dims, **(dict(VARIANTS[variant]) | fields))
