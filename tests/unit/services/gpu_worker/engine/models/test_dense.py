"""Dense families against transformers' own, on small random weights, several windows deep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.gpu_worker.engine.config import FULL, SLIDING
from services.gpu_worker.engine.models.dense_config import read_dense
from services.gpu_worker.engine.models.loader import load_model
from services.gpu_worker.engine.models.random_dense import WINDOW, dense_hf_config, write_random_dense
from services.gpu_worker.engine.models.rope import RopeScaling
from shared.errors import EngineFault
from tests.unit.services.gpu_worker.engine.models.oracle import assert_the_oracles_logits_and_ids, relative
from tests.unit.services.gpu_worker.engine.rig import Rig, table_of, tokens

transformers = pytest.importorskip("transformers")

GEMMA, LLAMA, MISTRAL, QWEN3, QWEN3_MOE = "gemma3_text", "llama", "mistral", "qwen3", "qwen3_moe"

VARIANTS = {
    "gemma": dense_hf_config(GEMMA),
    "gemma-untied-whole-blocks": dense_hf_config(
        GEMMA,
        tie_word_embeddings=False,
        sliding_window=128,
        final_logit_softcapping=None,
        num_key_value_heads=1,
    ),
    "gemma-all-slide": dense_hf_config(GEMMA, layer_types=[SLIDING] * 4, sliding_window=65),
    "llama": dense_hf_config(LLAMA),
    "llama-tied": dense_hf_config(LLAMA, tie_word_embeddings=True, rope_parameters={"rope_theta": 5e4}),
    "mistral": dense_hf_config(MISTRAL),
    "mistral-no-window": dense_hf_config(MISTRAL, sliding_window=None),
    "qwen3": dense_hf_config(QWEN3),
    "qwen3-moe": dense_hf_config(QWEN3_MOE),
    "qwen3-moe-every-second": dense_hf_config(
        QWEN3_MOE, decoder_sparse_step=2, mlp_only_layers=[], norm_topk_prob=False, tie_word_embeddings=True
    ),
    "qwen3-yarn": dense_hf_config(
        QWEN3,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "qwen3-half-slides": dense_hf_config(
        QWEN3, use_sliding_window=True, sliding_window=70, layer_types=[FULL, FULL, SLIDING, SLIDING]
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_ids_of_transformers(name: str, tmp_path: Path) -> None:
    """Prefill logits within 1e-5 over seven windows, then 64 greedy ids, ours by verifies of one column."""
    folder = write_random_dense(tmp_path, VARIANTS[name], seed=3)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompt = tokens(7 * WINDOW + 11)
    line = Rig(load_model(folder)).start(2, table_of(2, 13))
    assert_the_oracles_logits_and_ids(line, oracle, prompt, (128, 512, len(prompt) - 640))


@torch.no_grad()
def test_verified_rows_with_rejected_drafts_between(tmp_path: Path) -> None:
    """What a rejected draft wrote into a ring is never seen, though it overwrote the oldest rows there."""
    folder = write_random_dense(tmp_path, dense_hf_config(GEMMA), seed=5)
    ids = tokens(330, seed=1)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = oracle(torch.tensor([ids])).logits[0]
    line = Rig(load_model(folder), prefill_chunk=64).start(2, table_of(2))
    line.prefill(ids[:100], (64, 36))
    for right in (1, 3, 8, 5, 2) * 12:
        at = line.length
        out = line.verify([*ids[at : at + right], *tokens(8 - right, seed=at)], accept=right)
        assert relative(line.rig.runner.logits(out[:right]), expected[at : at + right]) <= 1e-5
    assert line.length > 3 * WINDOW


def test_older_spellings_of_a_gemma_are_read() -> None:
    """`rope_theta`, `rope_local_base_freq`, `rope_scaling` and `sliding_window_pattern`, as public folders have them."""
    now = dense_hf_config(GEMMA, num_hidden_layers=6, layer_types=[SLIDING] * 5 + [FULL])
    old = {name: value for name, value in now.items() if name not in ("layer_types", "rope_parameters")}
    old |= {
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    }
    assert read_dense(old) == read_dense(now)
    nested = {"model_type": "gemma3", "text_config": old}
    assert read_dense(nested) == read_dense(now)


def test_what_public_folders_leave_out_is_what_transformers_takes() -> None:
    """The text part of a vision-language gemma says little more than its sizes."""
    short = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    theirs = transformers.Gemma3TextConfig(**short)
    dims, traits = read_dense({"model_type": "gemma3", "text_config": short})
    assert (dims.vocab, dims.heads, dims.kv_heads, dims.head_dim) == (262_208, 8, 4, 256)
    assert (dims.vocab, dims.heads, dims.kv_heads, dims.head_dim) == (
        theirs.vocab_size,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.head_dim,
    )
    assert list(dims.layer_types) == theirs.layer_types
    assert (dims.window, dims.max_positions) == (theirs.sliding_window, theirs.max_position_embeddings)
    assert dims.tie_embeddings == theirs.tie_word_embeddings
    assert traits.query_scale == theirs.query_pre_attn_scalar**-0.5
    assert dims.rope_theta == theirs.rope_parameters["full_attention"]["rope_theta"]
    assert traits.scaling.factor == theirs.rope_parameters["full_attention"]["factor"]
    assert traits.local_theta == theirs.rope_parameters["sliding_attention"]["rope_theta"]
    assert traits.local_scaling == RopeScaling()


def test_prefixed_checkpoints_are_the_same_model(tmp_path: Path) -> None:
    folder = write_random_dense(tmp_path, dense_hf_config(GEMMA), seed=1)
    expected = load_model(folder).weights_digest
    weights = load_file(folder / "model.safetensors")
    for prefix in ("model.language_model.", "language_model.model."):
        renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in weights.items()}
        save_file(renamed | {"vision_tower.x": torch.zeros(1)}, folder / "model.safetensors")
        assert load_model(folder).weights_digest == expected


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (GEMMA, {"layer_types": ["full_attention"]}, "layer_types must hold 4"),
        (GEMMA, {"sliding_window": None}, "sliding_window must be a positive integer"),
        (GEMMA, {"hidden_activation": "relu"}, "hidden activation 'relu'"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (LLAMA, {"attention_bias": True}, "attention_bias"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden activation 'gelu'"),
        (LLAMA, {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type 'dynamic'"),
        (LLAMA, {"rope_parameters": {"rope_type": "yarn"}}, "factor of rope must be a positive number"),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor of rope must be"),
        (LLAMA, {"num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
        (LLAMA, {"vocab_size": 0}, "vocab_size must be a positive integer"),
        (
            LLAMA,
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config: quant_method 'gptq'",
        ),
        (LLAMA, {"model_type": "mamba"}, "model_type 'mamba' is none of"),
    ],
)
def test_wrong_configs_are_named(family: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_random_dense(tmp_path, dense_hf_config(family))
    config = dense_hf_config(family, **change)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineFault, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: {k: v for k, v in w.items() if "layers.2.self_attn.q_norm" not in k},
            r"missing, the first is model\.layers\.2\.self_attn\.q_norm\.weight",
        ),
        (
            lambda w: w | {"model.layers.1.pre_feedforward_layernorm.weight": torch.zeros(3)},
            r"pre_feedforward_layernorm\.weight has shape \(3,\), expected \(64,\)",
        ),
    ],
)
def test_wrong_tensors_are_named(change: Any, message: str, tmp_path: Path) -> None:
    folder = write_random_dense(tmp_path, dense_hf_config(GEMMA))
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(EngineFault, match=message):
        load_model(folder)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    folder = write_random_dense(tmp_path, dense_hf_config(GEMMA))
    (folder / "config.json").write_text(json.dumps(dense_hf_config(GEMMA, tie_word_embeddings=False)))
    with pytest.raises(EngineFault, match=r"the first is lm_head\.weight"):
        load_model(folder)
