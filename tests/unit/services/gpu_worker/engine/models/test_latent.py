"""Latent-attention families against transformers' own, their MTP head against a plain one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.gpu_worker.engine.models.latent_config import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_DSA,
    GLM_LITE,
    read_latent,
)
from services.gpu_worker.engine.models.loader import load_model
from services.gpu_worker.engine.models.random_latent import latent_hf_config, write_random_latent
from shared.errors import EngineFault
from tests.unit.services.gpu_worker.engine.models.oracle import assert_the_oracles_logits_and_ids, relative
from tests.unit.services.gpu_worker.engine.models.plain_latent import PlainLatentMTP
from tests.unit.services.gpu_worker.engine.rig import Rig, table_of, tokens

transformers = pytest.importorskip("transformers")

VARIANTS: dict[str, dict[str, Any]] = {
    "glm-dsa": latent_hf_config(GLM_DSA),
    "glm-dsa-index-of-every-layer": latent_hf_config(GLM_DSA, indexer_types=None, index_topk=150),
    "glm-dsa-pattern": latent_hf_config(GLM_DSA, indexer_types=None, index_topk_pattern="FSSF"),
    "glm-lite": latent_hf_config(GLM_LITE),
    "glm-lite-halves-tied-no-query-latent": latent_hf_config(
        GLM_LITE, rope_interleave=False, tie_word_embeddings=True, q_lora_rank=None, norm_topk_prob=False
    ),
    "deepseek-sparse": latent_hf_config(DEEPSEEK_V32),
    "deepseek-groups": latent_hf_config(DEEPSEEK_V3),
    "deepseek-yarn": latent_hf_config(
        DEEPSEEK_V3,
        rope_scaling=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 16.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 256,
        },
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_ids_of_transformers(name: str, tmp_path: Path) -> None:
    folder = write_random_latent(tmp_path, VARIANTS[name], seed=3, with_mtp=False)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompt = tokens(300)
    line = Rig(load_model(folder)).start(2, table_of(2))
    assert_the_oracles_logits_and_ids(line, oracle, prompt, (128, len(prompt) - 128))


@torch.no_grad()
@pytest.mark.parametrize("family", [GLM_DSA, GLM_LITE])
def test_mtp_rows_are_the_plain_head(family: str, tmp_path: Path) -> None:
    """Some rows written by prefill, the others by draft calls, one of them twice."""
    config = latent_hf_config(family)
    folder = write_random_latent(tmp_path, config, seed=4)
    model = load_model(folder)
    ids, line = tokens(110, seed=2), Rig(model).start(2, table_of(2))
    hidden = torch.cat([line.prefill(ids[:100], (64, 36)), line.verify(ids[100:105]), line.verify(ids[105:])])
    line.draft(100, ids[100:103], torch.randn(3, model.dims.hidden))
    got = line.draft(100, ids[100:], hidden[99:109])
    expected = PlainLatentMTP(folder, *read_latent(config, has_mtp=True))(ids, hidden)[100:]
    assert relative(got, expected) <= 1e-5


@torch.no_grad()
def test_c1_rows_do_not_know_their_company(tmp_path: Path) -> None:
    """Alone, in wider verifies, beside longer sequences, in prefills cut elsewhere: the same bits, in the cache too."""
    rig = Rig(load_model(write_random_latent(tmp_path, latent_hf_config(GLM_DSA), seed=4)))
    prompt, ids = tokens(200), tokens(8, seed=9)
    lines = [rig.start(slot, table_of(slot)) for slot in range(4)]
    alone, wide, beside, long = lines
    first = alone.prefill(prompt)
    assert torch.equal(first, wide.prefill(prompt, (64, 136)))
    assert torch.equal(first, beside.prefill(prompt, (128, 64, 8)))
    long.prefill(tokens(500, seed=3))
    single = torch.cat([alone.verify([token]) for token in ids])
    assert torch.equal(single, wide.verify(ids))
    rows = rig.runner.verify([long.rows(tokens(3)), beside.rows(ids)])[1]
    beside.accept(8)
    assert torch.equal(single, rows)
    assert torch.equal(alone.kv(trunk_only=True), wide.kv(trunk_only=True))
    assert torch.equal(alone.kv(trunk_only=True), beside.kv(trunk_only=True))


def test_a_row_is_one_latent_a_layer(tmp_path: Path) -> None:
    """kv_lora_rank + qk_rope_head_dim elements in each layer's plane and in the head's."""
    rig = Rig(load_model(write_random_latent(tmp_path, latent_hf_config())))
    assert rig.kv.row_bytes == (4 + 1) * (32 + 8) * 4
    line = rig.start(0, table_of(0))
    line.prefill(tokens(70))
    assert line.kv().shape == (1, 5, 1, 70, 40)


@torch.no_grad()
def test_c1_chosen_keys_do_not_know_their_company(tmp_path: Path) -> None:
    """Sparse attention over rows far beyond `index_topk`, in verifies with rejected drafts, beside shorter sequences."""
    config = latent_hf_config(GLM_DSA, index_topk=70)
    rig = Rig(load_model(write_random_latent(tmp_path, config, seed=5)))
    prompt, ids = tokens(260), tokens(12, seed=9)
    alone, other, short = (rig.start(slot, table_of(slot)) for slot in range(3))
    assert torch.equal(alone.prefill(prompt), other.prefill(prompt, (192, 68)))
    short.prefill(prompt[:20])
    single = torch.cat([alone.verify([token]) for token in ids])
    rows = []
    for right in (1, 4, 2, 5):
        at = other.length - 260
        drafts = [*ids[at : at + right], *tokens(8 - right, seed=right)]
        rows.append(rig.runner.verify([short.rows([1, 2, 3]), other.rows(drafts)])[1][:right])
        other.accept(right)
        short.accept(3)
    assert torch.equal(single, torch.cat(rows))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank must be a positive integer"),
        ({"index_topk": 0}, "index_topk must be a positive integer"),
        ({"index_head_dim": 4}, "index_head_dim is below qk_rope_head_dim 8"),
        ({"q_lora_rank": None}, "q_lora_rank must be a positive integer"),
        (
            {"indexer_types": ["shared"] * 4},
            "indexer_types must hold 4 of 'full' and 'shared', the first full",
        ),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"n_group": 3}, "n_routed_experts 8 is no multiple of n_group 3"),
        ({"n_group": 8}, "groups of one expert"),
        ({"topk_group": 2}, "topk_group 2 exceeds n_group 1"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must hold 4"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
    ],
)
def test_wrong_configs_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_random_latent(tmp_path, latent_hf_config(GLM_DSA))
    (folder / "config.json").write_text(json.dumps(latent_hf_config(GLM_DSA, **change)))
    with pytest.raises(EngineFault, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.kv_b_proj.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias",
        "model.layers.4.eh_proj.weight",
        "model.layers.4.shared_head.norm.weight",
    ],
)
def test_missing_tensors_are_named(name: str, tmp_path: Path) -> None:
    folder = write_random_latent(tmp_path, latent_hf_config())
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(EngineFault, match=f"missing, the first is {name}"):
        load_model(folder)


def test_two_mtp_layers_are_refused(tmp_path: Path) -> None:
    folder = write_random_latent(tmp_path, latent_hf_config())
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.layers.5.enorm.weight": torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(EngineFault, match=r"one layer is expected, found model\.layers\.5\.enorm"):
        load_model(folder)
