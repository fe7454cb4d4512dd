"""A runner over poisoned pools, with one method a thing that a session does. No engine, no scheduler."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.testing import poison
from services.gpu_worker.engine.batch import DraftRows, PrefillChunk, VerifyRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import BLOCK_ROWS, EngineConfig, ModelDims
from services.gpu_worker.engine.models.loader import LoadedModel, load_model
from services.gpu_worker.engine.models.random import TINY, write_random_model
from services.gpu_worker.engine.runner import ModelRunner

ODD = replace(
    TINY, hidden=80, intermediate=136, vocab=300, heads=6, kv_heads=2, gdn_key_heads=1, gdn_value_heads=3
)
"""Widths off the multiples of 32, and head groups of three."""

POCKET_SHAPE = replace(
    TINY,
    vocab=4096,
    hidden=320,
    intermediate=960,
    head_dim=64,
    rotary_dim=16,
    gdn_key_dim=64,
    gdn_value_dim=64,
    tie_embeddings=True,
)
"""The dimensions of models/pocket."""


@cache
def loaded(dims: ModelDims = TINY, *, with_mtp: bool = True, seed: int = 0) -> LoadedModel:
    """A random model, once a process."""
    with tempfile.TemporaryDirectory() as folder:
        return load_model(write_random_model(Path(folder), dims, with_mtp=with_mtp, seed=seed))


def tokens(count: int, seed: int = 0, vocab: int = 300) -> list[int]:
    """Reproducible ids."""
    draw = random.Random(seed)
    return [draw.randrange(vocab) for _ in range(count)]


@dataclass
class Rig:
    """Pools of a model; every KV row that no one wrote is NaN, every state that no one reset too."""

    model: LoadedModel
    blocks: int = 128
    slots: int = 9
    snapshots: int = 3
    max_verify: int = 8
    prefill_chunk: int = 512
    kv: KVPool = field(init=False)
    states: StatePool = field(init=False)
    runner: ModelRunner = field(init=False)

    def __post_init__(self) -> None:
        config = EngineConfig(
            num_blocks=self.blocks,
            num_slots=self.slots,
            num_snapshots=self.snapshots,
            max_verify=self.max_verify,
            prefill_chunk=self.prefill_chunk,
            max_context=4096,
            threads=torch.get_num_threads(),
        )
        dims = self.model.dims
        self.kv = KVPool(dims, self.blocks)
        self.states = StatePool(dims, self.slots, self.snapshots, self.max_verify)
        poison(self.kv.k, self.kv.v, self.states.state, self.states.windows, self.states.store[:, :-1])
        self.runner = ModelRunner(self.model.model, self.kv, self.states, config)

    def start(self, slot: int, table: Sequence[int]) -> Line:
        """A sequence on a fresh slot."""
        self.states.reset(slot)
        return Line(self, slot, list(table))


@dataclass
class Line:
    """One sequence: where it is and what it needs for the next call."""

    rig: Rig
    slot: int
    table: list[int]
    length: int = 0
    last_hidden: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.last_hidden = torch.zeros(self.rig.model.dims.hidden)

    def prefill(self, ids: Sequence[int], cuts: Sequence[int] | None = None) -> Tensor:
        """Prime `ids` in chunks of these sizes; hidden of all rows."""
        out, first = [], 0
        for count in cuts or (len(ids),):
            chunk = PrefillChunk(
                slot=self.slot,
                start=self.length,
                tokens=ids[first : first + count],
                block_table=self.table,
                previous_hidden=self.last_hidden,
            )
            out.append(self.rig.runner.prefill([chunk])[0])
            self.last_hidden = out[-1][-1]
            self.length, first = self.length + count, first + count
        return torch.cat(out)

    def rows(self, ids: Sequence[int]) -> VerifyRows:
        return VerifyRows(slot=self.slot, start=self.length, tokens=ids, block_table=self.table)

    def accept(self, rows: int) -> None:
        self.rig.runner.accept(self.slot, rows)
        self.length += rows

    def verify(self, ids: Sequence[int], accept: int | None = None) -> Tensor:
        """One verify, alone; accepts all columns unless told otherwise."""
        hidden = self.rig.runner.verify([self.rows(ids)])[0]
        self.accept(len(ids) if accept is None else accept)
        return hidden

    def decode(self, ids: Sequence[int]) -> Tensor:
        """Column by column."""
        return torch.cat([self.verify([token]) for token in ids])

    def draft(self, start: int, ids: Sequence[int], hiddens: Tensor) -> Tensor:
        rows = DraftRows(start=start, tokens=ids, hiddens=hiddens, block_table=self.table)
        return self.rig.runner.draft([rows])[0]

    def kv(self, stop: int | None = None, trunk_only: bool = False) -> Tensor:
        """KV rows 0..stop-1, without the draft plane if asked."""
        rows = self.rig.kv.read_rows(self.table, 0, self.length if stop is None else stop)
        return rows[:, : self.rig.model.dims.attention_layers] if trunk_only else rows

    def digest(self) -> bytes:
        self.rig.runner.flush(self.slot)
        return self.rig.states.digest(self.slot)


def table_of(number: int, blocks: int = 12) -> list[int]:
    """Blocks of the n-th sequence, scattered."""
    return [number + BLOCK_ROWS // 8 * i for i in range(blocks)]
