"""Dense and sliding layers on the card's side of the engine, on triton's interpreter: against the twin, and bit by bit."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import dispatch
from services.gpu_worker.engine.batch import PrefillChunk, VerifyRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.cache.slots import SlotMemory
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import FULL, SLIDING, EngineConfig
from services.gpu_worker.engine.models.loader import LoadedModel, load_model
from services.gpu_worker.engine.models.random_dense import dense_hf_config, write_random_dense
from services.gpu_worker.engine.placement import CPU, Placement
from services.gpu_worker.engine.runner import ModelRunner

CARD = Placement(device=torch.device("cpu"), dtype=torch.float32, on_card=True, fold_rows=1, recipe="card")
SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {**SMALL, "layer_types": [SLIDING, FULL], "sliding_window": 20},
    "llama": SMALL,
}
TABLE = (3, 1, 0)
MOST, CHUNK = 3, 64
PROMPT = [(number * 7919 + 13) % 32 for number in range(131)]
"""Over two blocks, so that a ring of two wraps."""


@cache
def _model(family: str, placement: Placement) -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        config = dense_hf_config(family, **FAMILIES[family])
        return load_model(write_random_dense(Path(folder), config, seed=2), placement=placement)


class Bench:
    """One sequence on slot 1, its prompt primed in chunks that overwrite the ring's oldest block."""

    def __init__(
        self, family: str, placement: Placement, patch: pytest.MonkeyPatch, prompt: list[int] = PROMPT
    ) -> None:
        patch.setattr(dispatch, "INTERPRETED", placement.on_card)
        config = EngineConfig(
            num_blocks=4,
            num_slots=2,
            num_snapshots=1,
            max_verify=MOST,
            max_batch=2,
            prefill_chunk=CHUNK,
            max_context=192,
        )
        model = _model(family, placement).model
        self.kv = KVPool(model.dims, config.num_blocks, placement)
        self.states = StatePool(model.dims, 2, 1, MOST, placement)
        self.ring = RingPool(model.dims, 2, 1, prefill_rows=CHUNK, max_verify=MOST)
        for pool in (self.kv, self.ring):
            pool.k.fill_(torch.nan)
            pool.v.fill_(torch.nan)
        self.memory = SlotMemory(self.states, self.ring)
        self.runner = ModelRunner(model, self.kv, self.states, config, self.ring)
        self.memory.reset(1)
        self.primed = torch.cat(
            [self._prefill(first, prompt[first : first + CHUNK]) for first in range(0, len(prompt), CHUNK)]
        )
        self.length, self.slot = len(prompt), 1

    def _prefill(self, first: int, ids: list[int]) -> Tensor:
        nothing = torch.zeros(self.runner.dims.hidden)
        chunk = PrefillChunk(slot=1, start=first, tokens=ids, block_table=TABLE, previous_hidden=nothing)
        return self.runner.prefill([chunk])[0]

    def decode(self, rounds: list[tuple[int, int]]) -> Tensor:
        """(columns, accepted) a round, over ids that do not depend on the cuts; hidden of the accepted rows."""
        out = []
        for columns, accepted in rounds:
            ids = [(self.length + i) * 5 % 32 for i in range(columns)]
            rows = VerifyRows(slot=self.slot, start=self.length, tokens=ids, block_table=TABLE)
            (hidden,) = self.runner.verify([rows])
            self.runner.accept(self.slot, accepted)
            self.length += accepted
            out.append(hidden[:accepted])
        return torch.cat(out)


@pytest.mark.parametrize(("family", "rows"), [("gemma3_text", 131), ("llama", 10)])
def test_a_card_computes_what_the_twin_defines(
    family: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = [(1, 1), (3, 2)]
    twin = Bench(family, CPU, monkeypatch, PROMPT[:rows])
    expected = twin.decode(cuts)
    card = Bench(family, CARD, monkeypatch, PROMPT[:rows])
    got = card.decode(cuts)
    assert (card.primed - twin.primed).norm() < 1e-5 * twin.primed.norm()
    assert (got - expected).norm() < 1e-5 * expected.norm()


def test_columns_rejected_drafts_and_a_restored_tail_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """C1.1 on a card: the same rows one by one, by drafts of which some are rejected, and in another slot's ring."""
    card = Bench("gemma3_text", CARD, monkeypatch)
    card.runner.flush(1)
    card.memory.take_snapshot(1, 0)
    expected = card.decode([(1, 1)] * 3)
    card.ring.v[:, : card.ring.blocks_each].fill_(0.0)
    card.memory.reset(0)
    card.memory.restore(0, 0)
    card.slot, card.length = 0, len(PROMPT)
    assert torch.equal(card.decode([(3, 2), (1, 1)]), expected)
