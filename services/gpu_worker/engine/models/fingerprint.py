"""The model fingerprint: two workers with one fingerprint compute the same bits."""

from __future__ import annotations

from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.models.loader import LoadedModel


def numerics_fingerprint(loaded: LoadedModel, config: EngineConfig) -> str:
    """SHA-256, hex, over weights, model config, dtypes, backend, instruction set, threads, torch and kernel recipes."""
    raise NotImplementedError
