"""What a drafter reads of the trunk, in every family: transformers' hidden states after the same layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.gpu_worker.engine.cache.kv_pool import KVPool
from services.gpu_worker.engine.cache.ring_pool import RingPool
from services.gpu_worker.engine.cache.state_pool import StatePool
from services.gpu_worker.engine.layers.local import local_prefill
from services.gpu_worker.engine.layers.steps import PrefillStep, Span, prefill_attention
from services.gpu_worker.engine.layers.taps import Taps
from services.gpu_worker.engine.models.loader import load_model
from services.gpu_worker.engine.models.random import write_random_model
from services.gpu_worker.engine.models.random_dense import dense_hf_config, write_random_dense
from services.gpu_worker.engine.models.random_latent import latent_hf_config, write_random_latent
from services.gpu_worker.engine.models.random_next import EXPERTS, next_hf_config, write_random_next
from tests.unit.services.gpu_worker.engine.models.oracle import relative
from tests.unit.services.gpu_worker.engine.rig import tokens

transformers = pytest.importorskip("transformers")

FOLDERS: dict[str, Callable[[Path], Path]] = {
    "hybrid": lambda at: write_random_model(at, with_mtp=False),
    "next": lambda at: write_random_next(at, next_hf_config(**EXPERTS), with_mtp=False),
    "gemma": lambda at: write_random_dense(at, dense_hf_config("gemma3_text")),
    "llama": lambda at: write_random_dense(at, dense_hf_config("llama")),
    "latent": lambda at: write_random_latent(at, latent_hf_config(), with_mtp=False),
}
LAYERS = (0, 2)
ROWS = 70


def _forward(folder: Path, ids: list[int], taps: Taps | None) -> Tensor:
    """Hidden of a prompt that is primed in one chunk."""
    model = load_model(folder).model
    dims = model.dims
    kv, states = KVPool(dims, 2), StatePool(dims, 1, 0, 1)
    ring = RingPool(dims, 1, 0, prefill_rows=128, max_verify=1)
    span = Span(0, len(ids), (0, 1))
    attention = prefill_attention(span, kv, model.rope)
    local = local_prefill(span, 0, ring, model.local_rope)
    padded = torch.tensor(ids + [0] * (attention.columns - len(ids)))
    step = PrefillStep(attention, states, 0, len(ids), local)
    return model.trunk(model.embed(padded), step, taps)[: len(ids)]


@torch.no_grad()
@pytest.mark.parametrize("family", FOLDERS)
def test_taps_are_the_outputs_of_named_layers(family: str, tmp_path: Path) -> None:
    """Id j is the residual stream after layer j; who taps changes no bit of what comes out."""
    folder, ids = FOLDERS[family](tmp_path), tokens(ROWS)
    taps = Taps(LAYERS)
    tapped = _forward(folder, ids, taps)
    assert torch.equal(tapped, _forward(folder, ids, None))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    states = oracle(torch.tensor([ids]), output_hidden_states=True).hidden_states
    seen = taps.rows()[:ROWS].split(tapped.shape[1], dim=1)
    for layer, rows in zip(LAYERS, seen, strict=True):
        assert relative(rows, states[layer + 1][0]) <= 1e-5
