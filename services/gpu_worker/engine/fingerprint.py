"""The model fingerprint: two workers with one fingerprint compute the same bits."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import torch

from kernels.tiles import tile_table
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.probe import computed_bits


def numerics_fingerprint(loaded: LoadedModel, config: EngineConfig) -> str:
    """SHA-256, hex, over weights, model config, dtypes, backend, instruction set, threads, torch and kernel recipes.

    Last comes what a short forward really computes here (`probe`), under the configured threads. Pool sizes and batch
    limits are left out: they do not change a row's bits.
    """
    parts = {
        "weights": loaded.weights_digest,
        "config": asdict(loaded.dims) | loaded.traits,
        **loaded.model.placement.identity(),
        "threads": config.threads,
        "torch": torch.__version__,
        "matmul": loaded.model.recipe,
        "tiles": tile_table(),
        "computed": _computed(loaded, config.threads),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _computed(loaded: LoadedModel, threads: int) -> str:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return computed_bits(loaded.model)
    finally:
        torch.set_num_threads(before)
