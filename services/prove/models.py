"""What `prove` asks: the pocket model that ships, and tiny random ones with its vocabulary, a hybrid and one with windows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from services.gpu_worker.engine.config import FULL, LINEAR, ModelDims
from services.gpu_worker.engine.models.dense_config import GEMMA3
from services.gpu_worker.engine.models.loader import LoadedModel, load_model
from services.gpu_worker.engine.models.random import TINY, write_random_model
from services.gpu_worker.engine.models.random_dense import dense_hf_config, write_random_dense
from services.gpu_worker.engine.placement import Placement, place
from shared.config import POCKET

DEVICE, DTYPE = "BURSTLINE_PROVE_DEVICE", "BURSTLINE_PROVE_DTYPE"
"""Where the models are loaded and in which type; variables, so that the processes of a run agree."""

RANDOM_SEED: Final = 11
VOCAB: Final = 4096
"""The pocket tokenizer's size, so that one set of prompts serves both models."""


@cache
def tiny() -> LoadedModel:
    """Random weights, about a millisecond a forward."""
    return _random(replace(TINY, vocab=VOCAB))


@cache
def smallest() -> LoadedModel:
    """Random weights, one layer of each kind and few ids: for runs of which the model is not the point."""
    return _random(replace(TINY, layer_types=(LINEAR, FULL)))


def _random(dims: ModelDims) -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        return load_model(
            write_random_model(Path(folder) / "model", dims, seed=RANDOM_SEED), placement=_placement()
        )


def _placement() -> Placement:
    return place(os.environ.get(DEVICE, "cpu"), os.environ.get(DTYPE))


@cache
def pocket() -> LoadedModel:
    """The model that ships. Raises EngineFault when its folder is not whole."""
    return load_model(POCKET, placement=_placement())


@cache
def windowed() -> LoadedModel:
    """Random weights, three sliding layers and a full one, a window of a block and a half."""
    config = dense_hf_config(GEMMA3, vocab_size=VOCAB)
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_dense(Path(folder) / "model", config, seed=RANDOM_SEED)
        return load_model(path, placement=_placement())


MODELS: Final[Mapping[str, Callable[[], LoadedModel]]] = {
    "tiny": tiny,
    "pocket": pocket,
    "window": windowed,
}
