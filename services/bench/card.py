"""What every benchmark on a card starts from: a model of a shape with random weights, pools filled with noise, the ceilings
of the card measured in the same run, and medians of timed launches."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import BLOCK_ROWS, LINEAR, EngineConfig, ModelDims
from services.gpu_worker.engine.models.hybrid_config import read_hybrid
from services.gpu_worker.engine.models.loader import LoadedModel
from services.gpu_worker.engine.models.random import drawn_model
from services.gpu_worker.engine.models.tensors import checkpoint_shapes
from services.gpu_worker.engine.placement import CARD_FOLD_ROWS, Placement, place

SHAPES: Final = Path(__file__).resolve().parents[2] / "models" / "shapes"

_COPY_BYTES: Final = 4 << 30
"""Of the copy that tells the bandwidth: many times the L2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """What the card can do, measured."""

    copy_bytes_per_s: float
    """Read and written together."""
    host_to_card_bytes_per_s: float
    """From pinned memory."""


def shape(name: str, *, layers: int | None = None, mtp: bool = True) -> ModelDims:
    """Dimensions of `models/shapes/<name>`; `layers` cuts the model short, for a quick look."""
    config = json.loads((SHAPES / name / "config.json").read_text(encoding="utf-8"))
    dims = read_hybrid(config, has_mtp=mtp)
    return replace(dims, layer_types=dims.layer_types[:layers]) if layers else dims


def model(dims: ModelDims, recipe: str | None = None, *, draft_vocab: int = 0) -> LoadedModel:
    """Random weights, made on the card."""
    placement: Placement = replace(place("cuda"), draft_vocab=draft_vocab)
    if recipe is not None:
        placement = replace(placement, recipe=recipe)  # type: ignore[arg-type]
    return drawn_model(dims, placement)


def pools(loaded: LoadedModel, config: EngineConfig) -> tuple[KVPool, StatePool]:
    """Pools of noise: zeros run faster than data does."""
    placement = loaded.model.placement
    kv = KVPool(loaded.dims, config.num_blocks, placement)
    states = StatePool(loaded.dims, config.num_slots, config.num_snapshots, config.max_verify, placement)
    for plane in (*kv.k, *kv.v, *states.state, *states.windows, *states.store):
        plane.normal_(std=0.5)
    return kv, states


def ceilings() -> Ceilings:
    """Medians of large copies, by the copy engine or by a kernel, whichever is faster."""
    source = torch.empty(_COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    engine = timed(lambda: target.copy_(source), repeats=20, warm=5)
    kernel = timed(lambda: torch.neg(source, out=target), repeats=20, warm=5)
    pinned = torch.empty(_COPY_BYTES // 8, dtype=torch.bfloat16, pin_memory=True)
    host = timed(lambda: target[: len(pinned)].copy_(pinned, non_blocking=True), repeats=5)
    return Ceilings(
        copy_bytes_per_s=2 * _COPY_BYTES / min(engine, kernel),
        host_to_card_bytes_per_s=_COPY_BYTES / 4 / host,
    )


def timed(launch: Callable[[], object], *, repeats: int, warm: int = 2) -> float:
    """Median seconds of a launch, by the device's own clock."""
    for _ in range(warm):
        launch()
    marks = [(_mark(), _mark()) for _ in range(repeats)]
    for start, end in marks:
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in marks)) / 1e3


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def weight_bytes(dims: ModelDims, *, rows: int = 1, item: int = 2) -> int:
    """Bytes of the weights that a step of `rows` reads: all but the embedding table, of which a row is gathered, and of a
    mixture no more experts than its rows can go to."""
    total = 0.0
    for name, elements, matrix in _weights(dims):
        share = min(1.0, rows * dims.experts_per_row / dims.experts) if ".experts." in name else 1.0
        total += elements * share * (item if matrix else 4)
    return int(total)


def weight_item(recipe: str) -> int:
    """Bytes of a matrix's element as the recipe keeps it."""
    return 1 if recipe == "card-fp8" else 2


def step_bytes(dims: ModelDims, batch: int, context: int, columns: int = 1, *, weight_item: int = 2) -> int:
    """Bytes that one verify of `batch` sequences must move: weights, states read (and written every `CARD_FOLD_ROWS`), KV."""
    item, cell = 2, dims.gdn_value_heads * dims.gdn_key_dim * dims.gdn_value_dim * 4
    read = batch * dims.gdn_layers * cell
    states = read + read * columns // max(CARD_FOLD_ROWS, columns)
    rows = batch * dims.attention_layers * 2 * dims.kv_heads * dims.head_dim * item * (context + columns)
    return weight_bytes(dims, rows=batch * columns, item=weight_item) + states + rows


def prompt_flops(dims: ModelDims, tokens: int) -> float:
    """Floating-point operations of the products and attention of a cold prompt."""
    products = 0.0
    for name, elements, matrix in _weights(dims):
        if matrix and "embed_tokens" not in name and "lm_head" not in name:
            share = dims.experts_per_row / dims.experts if ".experts." in name else 1.0
            products += 2.0 * elements * share
    pairs = 2.0 * dims.attention_layers * dims.heads * dims.head_dim * tokens * tokens
    return products * tokens + pairs


def _weights(dims: ModelDims) -> Iterator[tuple[str, int, bool]]:
    """(name, elements, whether it is a matrix) of what the trunk and the head read."""
    for name, size in checkpoint_shapes(dims).items():
        gathered = "embed_tokens" in name and not dims.tie_embeddings
        if not gathered and not name.startswith("mtp."):
            yield name, torch.Size(size).numel(), len(size) == 2 or ".experts." in name


def describe(dims: ModelDims) -> dict[str, Any]:
    """The shape in words, for the evidence."""
    return {
        "layers": len(dims.layer_types),
        "gated_delta_layers": dims.layer_types.count(LINEAR),
        "hidden": dims.hidden,
        "vocab": dims.vocab,
        "weights": "random, drawn on the card",
    }


def tables(batch: int, blocks: int) -> Sequence[Sequence[int]]:
    """Block tables of sequences that share nothing, their blocks interleaved."""
    return [[sequence + batch * block for block in range(blocks)] for sequence in range(batch)]


def blocks_for(rows: int) -> int:
    """Blocks that hold so many rows."""
    return -(-rows // BLOCK_ROWS)
