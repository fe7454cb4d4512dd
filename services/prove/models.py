"""What `prove` asks: the pocket model that ships, and tiny random ones of every family with its vocabulary."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from services.gpu_worker.config import BLOCK_FOLDER
from services.gpu_worker.engine.config import FULL, LINEAR, ModelDims
from services.gpu_worker.engine.models.block_loader import load_block
from services.gpu_worker.engine.models.dense_config import GEMMA3, LLAMA, QWEN3_MOE
from services.gpu_worker.engine.models.latent_config import GLM_DSA, GLM_LITE
from services.gpu_worker.engine.models.loader import LoadedModel, load_model
from services.gpu_worker.engine.models.random import TINY, write_random_model
from services.gpu_worker.engine.models.random_block import block_hf_config, write_random_block
from services.gpu_worker.engine.models.random_dense import dense_hf_config, write_random_dense
from services.gpu_worker.engine.models.random_latent import latent_hf_config, write_random_latent
from services.gpu_worker.engine.models.random_next import EXPERTS, next_hf_config, write_random_next
from services.prove.device import chosen
from shared.config import POCKET

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
    return _written(lambda path: write_random_model(path, dims, seed=RANDOM_SEED))


def _written(write: Callable[[Path], Path]) -> LoadedModel:
    """What a builder writes into an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        return load_model(write(Path(folder) / "model"), placement=chosen().placement())


@cache
def pocket() -> LoadedModel:
    """The model that ships. Raises EngineFault when its folder is not whole."""
    return load_model(POCKET, placement=chosen().placement())


@cache
def windowed() -> LoadedModel:
    """Random weights, three sliding layers and a full one, a window of a block and a half."""
    config = dense_hf_config(GEMMA3, vocab_size=VOCAB)
    return _written(lambda path: write_random_dense(path, config, seed=RANDOM_SEED))


@cache
def llama() -> LoadedModel:
    """Random weights: what most people run, dense attention and nothing else."""
    config = dense_hf_config(LLAMA, vocab_size=VOCAB)
    return _written(lambda path: write_random_dense(path, config, seed=RANDOM_SEED))


@cache
def qwen3_next() -> LoadedModel:
    """Random weights: a hybrid whose feed-forward layers are mixtures, with an MTP head."""
    config = next_hf_config(replace(TINY, vocab=VOCAB), **EXPERTS)
    return _written(lambda path: write_random_next(path, config, seed=RANDOM_SEED))


@cache
def latent() -> LoadedModel:
    """Random weights: latent attention, mixtures with a biased router, an MTP head."""
    config = latent_hf_config(GLM_LITE, vocab_size=VOCAB)
    return _written(lambda path: write_random_latent(path, config, seed=RANDOM_SEED))


@cache
def sparse() -> LoadedModel:
    """As `latent`, and every layer's attention sees few of a prompt's keys, which an index chooses."""
    config = latent_hf_config(GLM_DSA, vocab_size=VOCAB, index_topk=48)
    return _written(lambda path: write_random_latent(path, config, seed=RANDOM_SEED))


@cache
def dense_mixture() -> LoadedModel:
    """Random weights: dense attention, feed-forward layers of experts."""
    config = dense_hf_config(QWEN3_MOE, vocab_size=VOCAB)
    return _written(lambda path: write_random_dense(path, config, seed=RANDOM_SEED))


@cache
def with_block(name: str) -> LoadedModel:
    """One of `EVERY` with a block drafter beside it: the trained one of the model that ships, else one of random
    weights."""
    loaded = EVERY[name]()
    if name == "pocket":
        return replace(loaded, drafter=load_block(POCKET / BLOCK_FOLDER, loaded.model))
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_block(Path(folder) / "drafter", block_hf_config(loaded.dims), seed=RANDOM_SEED)
        return replace(loaded, drafter=load_block(path, loaded.model))


MODELS: Final[Mapping[str, Callable[[], LoadedModel]]] = {
    "tiny": tiny,
    "pocket": pocket,
    "window": windowed,
    "with a block drafter": lambda: with_block("tiny"),
}
"""Those that are a value of the axis."""

EVERY: Final[Mapping[str, Callable[[], LoadedModel]]] = {
    "tiny": tiny,
    "pocket": pocket,
    "window": windowed,
    "llama": llama,
    "qwen3-next": qwen3_next,
    "qwen3-moe": dense_mixture,
    "latent": latent,
    "sparse": sparse,
}
"""A model of each family."""

HAS: Final[Mapping[str, tuple[str, ...]]] = {
    "tiny": ("mtp", "ngram", "block", "auto"),
    "pocket": ("mtp", "ngram", "block", "auto"),
    "window": ("ngram", "block", "auto"),
    "llama": ("ngram", "block", "auto"),
    "qwen3-next": ("mtp", "ngram", "block", "auto"),
    "qwen3-moe": ("ngram", "block", "auto"),
    "latent": ("mtp", "ngram", "block", "auto"),
    "sparse": ("mtp", "ngram", "block", "auto"),
}
"""The kinds of drafters that there are for each."""
