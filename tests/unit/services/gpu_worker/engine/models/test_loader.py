"""Folders as Hugging Face writes them, and every way in which they can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.gpu_worker.engine.models.loader import load_model
from services.gpu_worker.engine.models.random import TINY, write_random_model
from shared.errors import EngineFault
from tests.unit.services.gpu_worker.engine.rig import Rig, table_of, tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "model")


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | changes))


def _rewrite(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors")


def _hidden(folder: Path) -> torch.Tensor:
    return Rig(load_model(folder)).start(0, table_of(0)).prefill(tokens(70))


def test_what_a_folder_says(folder: Path) -> None:
    generation = {"eos_token_id": [2, 0], "do_sample": True, "temperature": 0.7, "top_k": 20, "note": "x"}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    model = load_model(folder)
    assert model.dims == TINY
    assert model.eos_ids == {0, 2}
    assert model.generation_defaults == {"do_sample": True, "temperature": 0.7, "top_k": 20}
    (folder / "generation_config.json").unlink()
    assert load_model(folder).eos_ids == {2}


def test_the_same_arguments_write_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = write_random_model(tmp_path / "again")
    other = write_random_model(tmp_path / "other", seed=1)
    content = [(path / "model.safetensors").read_bytes() for path in (folder, again, other)]
    assert content[0] == content[1] != content[2]


def test_sharded_and_prefixed_checkpoints_are_the_same_model(folder: Path) -> None:
    expected, digest = _hidden(folder), load_model(folder).weights_digest
    weights = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in weights.items()
    }
    renamed["model.visual.patch.weight"] = torch.zeros(3)
    names = sorted(renamed)
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: renamed[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    text_config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text_config}))
    assert torch.equal(_hidden(folder), expected)
    assert load_model(folder).weights_digest == digest


def test_bfloat16_weights_are_widened_exactly(folder: Path, tmp_path: Path) -> None:
    _rewrite(folder, lambda w: {name: tensor.to(torch.bfloat16) for name, tensor in w.items()})
    narrow = load_model(folder)
    hidden = _hidden(folder)
    _rewrite(folder, lambda w: {name: tensor.to(torch.float32) for name, tensor in w.items()})
    assert torch.equal(_hidden(folder), hidden)
    assert load_model(folder).weights_digest != narrow.weights_digest


def test_a_single_changed_weight_changes_the_digest(folder: Path) -> None:
    before = load_model(folder).weights_digest

    def nudge(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights["model.layers.1.linear_attn.dt_bias"][2] += 1e-3
        return weights

    _rewrite(folder, nudge)
    assert load_model(folder).weights_digest != before


def test_missing_mtp_tensors_mean_no_head(tmp_path: Path) -> None:
    model = load_model(write_random_model(tmp_path, with_mtp=False))
    assert not model.dims.has_mtp
    assert model.model.mtp is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: {k: v for k, v in w.items() if k != "model.norm.weight"},
            r"missing, the first is model\.norm\.weight",
        ),
        (
            lambda w: w | {"model.norm.weight": torch.zeros(3)},
            r"model\.norm\.weight has shape \(3,\), expected \(64,\)",
        ),
        (
            lambda w: w | {"model.norm.weight": torch.zeros(64, dtype=torch.int32)},
            "expected a float of 32, 16 or 8 bits",
        ),
        (lambda w: w | {"mtp.layers.1.x": torch.zeros(1)}, r"one layer is expected, found mtp\.layers\.1\.x"),
        (lambda w: {k: v for k, v in w.items() if k != "mtp.norm.weight"}, r"the first is mtp\.norm\.weight"),
    ],
)
def test_wrong_tensors_are_named(folder: Path, change: Any, message: str) -> None:
    _rewrite(folder, change)
    with pytest.raises(EngineFault, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"hidden_size": None}, "hidden_size must be a positive integer"),
        ({"layer_types": ["full_attention"]}, "layer_types must hold 4"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_attention_heads": 3}, "no multiple of num_key_value_heads"),
        ({"linear_num_key_heads": 3}, "no multiple of linear_num_key_heads"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
    ],
)
def test_wrong_configs_are_named(folder: Path, change: dict[str, Any], message: str) -> None:
    _edit(folder, **change)
    with pytest.raises(EngineFault, match=message):
        load_model(folder)


def test_unreadable_files_are_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(EngineFault, match=r"model\.safetensors: not readable"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineFault, match="neither"):
        load_model(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(EngineFault, match=r"config\.json: a JSON object"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(EngineFault, match=r"config\.json: not readable"):
        load_model(folder)
