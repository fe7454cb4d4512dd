"""qwen3_next against transformers' own, its MTP head against a plain one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.gpu_worker.engine.models.loader import load_model
from services.gpu_worker.engine.models.random_next import EXPERTS, next_hf_config, write_random_next
from shared.errors import EngineFault
from tests.unit.services.gpu_worker.engine.models.oracle import assert_the_oracles_logits_and_ids, relative
from tests.unit.services.gpu_worker.engine.models.plain_mtp import PlainMTP
from tests.unit.services.gpu_worker.engine.rig import ODD, Rig, table_of, tokens

transformers = pytest.importorskip("transformers")

VARIANTS: dict[str, dict[str, Any]] = {
    "dense": next_hf_config(),
    "odd": next_hf_config(ODD),
    "mixture": next_hf_config(**EXPERTS),
    "sparse-step": next_hf_config(
        **EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False}
    ),
    "tied-default-rope": next_hf_config(
        tie_word_embeddings=True, rope_parameters=None, rope_theta=5e4, partial_rotary_factor=0.5
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_ids_of_transformers(name: str, tmp_path: Path) -> None:
    folder = write_random_next(tmp_path, VARIANTS[name], seed=3)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokens(300)
    line = Rig(load_model(folder)).start(2, table_of(2))
    assert_the_oracles_logits_and_ids(line, oracle, prompt, (128, len(prompt) - 128))


@torch.no_grad()
@pytest.mark.parametrize(("name", "mixes"), [("dense", False), ("mixture", True), ("mixture", False)])
def test_mtp_rows_are_the_plain_head(name: str, mixes: bool, tmp_path: Path) -> None:
    """Some rows written by prefill, the others by draft calls; the head's layer is a mixture or a plain one."""
    folder = write_random_next(tmp_path, VARIANTS[name], seed=4, mtp_mixes=mixes)
    model = load_model(folder)
    assert model.dims.mixes(len(model.dims.layer_types)) == mixes
    ids, line = tokens(110, seed=2), Rig(model).start(2, table_of(2))
    hidden = torch.cat([line.prefill(ids[:100], (64, 36)), line.verify(ids[100:105]), line.verify(ids[105:])])
    got = line.draft(100, ids[100:], hidden[99:109])
    expected = PlainMTP(folder, model.dims)(ids, hidden)[100:]
    assert relative(got, expected) <= 1e-5


@torch.no_grad()
def test_c1_a_mixtures_rows_do_not_know_their_company(tmp_path: Path) -> None:
    model = load_model(write_random_next(tmp_path, VARIANTS["mixture"], seed=4))
    rig = Rig(model)
    alone, wide = rig.start(1, table_of(1)), rig.start(2, table_of(2))
    for line in (alone, wide):
        line.prefill(tokens(100))
    ids = tokens(8, seed=9)
    assert torch.equal(torch.cat([alone.verify([token]) for token in ids]), wide.verify(ids))


def test_a_plain_layers_width_is_asked_for(tmp_path: Path) -> None:
    folder = write_random_next(tmp_path, VARIANTS["mixture"])
    (folder / "config.json").write_text(json.dumps(VARIANTS["mixture"] | {"intermediate_size": None}))
    with pytest.raises(EngineFault, match="intermediate_size must be a positive integer"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.linear_attn.in_proj_ba.weight", r"in_proj_ba\.weight has shape \(3,\)"),
        ("model.layers.2.mlp.experts.5.up_proj.weight", r"experts\.5\.up_proj\.weight has shape"),
    ],
)
def test_wrong_tensors_are_named(name: str, message: str, tmp_path: Path) -> None:
    folder = write_random_next(tmp_path, VARIANTS["mixture"])
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {name: torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(EngineFault, match=message):
        load_model(folder)
    del weights[name]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(EngineFault, match=f"the first is {name}"):
        load_model(folder)
