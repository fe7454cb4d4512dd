"""Folders as transformers writes them: its names of tensors, its way to store experts, its config fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.gpu_worker.engine.models.latent_config import DEEPSEEK_V3, DEEPSEEK_V32, GLM_DSA, GLM_LITE
from services.gpu_worker.engine.models.loader import load_model
from services.gpu_worker.engine.models.random import TINY, hf_config
from services.gpu_worker.engine.models.random_dense import dense_hf_config
from services.gpu_worker.engine.models.random_latent import latent_hf_config
from services.gpu_worker.engine.models.random_next import EXPERTS, next_hf_config
from shared.errors import EngineFault
from tests.unit.services.gpu_worker.engine.models.oracle import relative
from tests.unit.services.gpu_worker.engine.rig import Rig, table_of, tokens

transformers = pytest.importorskip("transformers")

MIXTURE = replace(TINY, intermediate=32, experts=8, experts_per_row=3, expert_width=24, has_mtp=False)
CONFIGS: dict[str, Mapping[str, Any]] = {
    "qwen3_5": hf_config(replace(TINY, has_mtp=False)),
    "qwen3_5_moe": hf_config(MIXTURE),
    "qwen3_next": next_hf_config(**EXPERTS),
    "gemma3": dense_hf_config("gemma3_text"),
    "qwen3_moe": dense_hf_config("qwen3_moe"),
    "llama": dense_hf_config("llama"),
    "glm_moe_dsa": latent_hf_config(GLM_DSA),
    "glm4_moe_lite": latent_hf_config(GLM_LITE),
    "deepseek_v32": latent_hf_config(DEEPSEEK_V32),
    "deepseek_v3": latent_hf_config(DEEPSEEK_V3),
}


def _written(folder: Path, name: str) -> Any:
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    oracle = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    oracle.save_pretrained(folder, max_shard_size="100KB")
    return oracle


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_that_transformers_wrote_is_the_model_that_it_was(name: str, tmp_path: Path) -> None:
    """Several shards; the logits of a prompt."""
    oracle = _written(tmp_path, name)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    line = Rig(load_model(tmp_path)).start(2, table_of(2))
    prompt = tokens(100)
    logits = line.rig.runner.logits(line.prefill(prompt))
    assert relative(logits, oracle(torch.tensor([prompt])).logits[0]) <= 1e-5


def test_a_missing_one_of_experts_that_are_stored_one_by_one_is_named(tmp_path: Path) -> None:
    _written(tmp_path, "qwen3_5_moe")
    weights = {}
    for file in tmp_path.glob("*.safetensors"):
        weights |= load_file(file)
        file.unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    del weights["model.layers.2.mlp.experts.4.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(EngineFault, match=r"the first is model\.layers\.2\.mlp\.experts\.4\.up_proj\.weight"):
        load_model(tmp_path)
