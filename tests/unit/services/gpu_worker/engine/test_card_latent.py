"""Latent attention and its MTP head on the card's side of the engine, on triton's interpreter: against the twin, bit by bit."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import dispatch
from kernels.paged_attention import card_chosen
from services.gpu_worker.engine.batch import DraftRows, PrefillChunk, VerifyRows
from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.models.latent_config import GLM_DSA
from services.gpu_worker.engine.models.loader import LoadedModel, load_model
from services.gpu_worker.engine.models.random_latent import latent_hf_config, write_random_latent
from services.gpu_worker.engine.placement import CPU, Placement
from services.gpu_worker.engine.runner import ModelRunner
from shared.errors import EngineFault

CARD = Placement(device=torch.device("cpu"), dtype=torch.float32, on_card=True, fold_rows=1, recipe="card")
SMALL = dict(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=32,
    kv_lora_rank=24,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_attention_heads=2,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    q_lora_rank=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
    mlp_layer_types=["dense", "sparse"],
)
CONFIGS = {
    "latent": latent_hf_config(**SMALL),
    "sparse": latent_hf_config(GLM_DSA, **SMALL | {"index_topk": 24, "indexer_types": ["full", "shared"]}),
}
"""Attention to all rows before, and to the 24 that an index chooses."""
TABLE = (3, 1, 0)
PROMPT = {
    kind: [(number * 7919 + 13) % 32 for number in range(rows)]
    for kind, rows in (("latent", 62), ("sparse", 66))
}
"""Over a block; with an index in two chunks, of which the interpreter runs each in full."""


@cache
def _model(placement: Placement, kind: str) -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        return load_model(write_random_latent(Path(folder), CONFIGS[kind], seed=2), placement=placement)


@cache
def _primed_on_card(kind: str) -> Bench:
    """The interpreter takes seconds for a prompt: primed once, and taken over by every bench on the card."""
    with pytest.MonkeyPatch.context() as patch:
        bench = Bench(CARD, patch, kind)
        bench.prime(PROMPT[kind])
    return bench


class Bench:
    """One sequence on slot 1 over rows that no one wrote before."""

    def __init__(self, placement: Placement, patch: pytest.MonkeyPatch, kind: str) -> None:
        patch.setattr(dispatch, "INTERPRETED", placement.on_card)
        config = EngineConfig(
            num_blocks=4,
            num_slots=2,
            num_snapshots=1,
            max_verify=3,
            max_batch=2,
            prefill_chunk=64,
            max_context=192,
        )
        model = _model(placement, kind).model
        self.kv = KVPool(model.dims, config.num_blocks, placement)
        self.kv.k.fill_(torch.nan)
        self.states = StatePool(model.dims, 2, 1, config.max_verify, placement)
        self.states.reset(1)
        self.runner = ModelRunner(model, self.kv, self.states, config)
        self.last = torch.zeros(model.dims.hidden)

    def prime(self, prompt: list[int]) -> Bench:
        out = []
        for first in range(0, len(prompt), 64):
            out.append(self._prefill(first, prompt[first : first + 64]))
            self.last = out[-1][-1]
        self.primed, self.length = torch.cat(out), len(prompt)
        return self

    def take(self, other: Bench) -> Bench:
        """Stand where another bench stands."""
        self.primed, self.length, self.last = other.primed, other.length, other.last
        self.kv.k.copy_(other.kv.k)
        self.states.advanced(1, other.length)
        return self

    def _prefill(self, first: int, ids: list[int]) -> Tensor:
        chunk = PrefillChunk(slot=1, start=first, tokens=ids, block_table=TABLE, previous_hidden=self.last)
        return self.runner.prefill([chunk])[0]

    def decode(self, rounds: list[tuple[int, int]]) -> Tensor:
        """(columns, accepted) a round, over ids that do not depend on the cuts; hidden of the accepted rows."""
        out = []
        for columns, accepted in rounds:
            ids = [(self.length + i) * 5 % 32 for i in range(columns)]
            rows = VerifyRows(slot=1, start=self.length, tokens=ids, block_table=TABLE)
            (hidden,) = self.runner.verify([rows])
            self.runner.accept(1, accepted)
            self.length += accepted
            out.append(hidden[:accepted])
        return torch.cat(out)

    def draft(self) -> Tensor:
        """Two rows of the head after the prompt."""
        hiddens = torch.stack([self.last, self.last.flip(0)])
        rows = DraftRows(start=self.length, tokens=[3, 4], hiddens=hiddens, block_table=TABLE)
        return self.runner.draft([rows])[0]

    def rows(self) -> Tensor:
        return self.kv.read_rows(TABLE, 0, self.length)


def _card(kind: str, patch: pytest.MonkeyPatch) -> Bench:
    return Bench(CARD, patch, kind).take(_primed_on_card(kind))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_card_computes_what_the_twin_defines(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for make in (lambda: Bench(CPU, monkeypatch, kind).prime(PROMPT[kind]), lambda: _card(kind, monkeypatch)):
        bench = make()
        seen.append([bench.primed, bench.rows(), bench.draft(), bench.decode([(1, 1), (3, 2)])])
    for expected, got in zip(*seen, strict=True):
        assert (got - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", CONFIGS)
def test_c1_columns_and_rejected_drafts_change_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = _card(kind, monkeypatch), _card(kind, monkeypatch)
    assert torch.equal(one.decode([(1, 1)] * 3), other.decode([(3, 2), (1, 1)]))
    assert torch.equal(one.rows()[:, :2], other.rows()[:, :2])


def test_a_sparse_card_attends_to_what_its_index_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights that see every row answer otherwise: the marks are read, from the row on that has more before it."""
    chosen = _card("sparse", monkeypatch).primed
    monkeypatch.setattr(card_chosen, "narrowed", lambda query, weights, keys, plan, most: plan)
    every = Bench(CARD, monkeypatch, "sparse").prime(PROMPT["sparse"][:30]).primed
    assert (every[:24] - chosen[:24]).norm() < 1e-5 * every[:24].norm()
    assert (every[24:] - chosen[24:30]).norm() > 1e-3 * every[24:].norm()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kv_lora_rank": 1056}, "latents of 1056 elements"),
        ({"kv_lora_rank": 22}, "do not begin on 16 bytes"),
    ],
)
def test_rows_that_no_card_can_read_are_refused_at_load(
    fields: dict[str, int], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = latent_hf_config(**SMALL | fields)
    folder = write_random_latent(tmp_path, config, with_mtp=False)
    load_model(folder)
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    with pytest.raises(EngineFault, match=told):
        load_model(folder, placement=CARD)
