"""Which variables a chosen model sets, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from services.gateway.config import GatewaySettings
from services.gpu_worker.config import WorkerSettings
from services.gpu_worker.engine.models.random import write_random_model
from services.gpu_worker.engine.models.random_dense import dense_hf_config, write_random_dense
from services.models.faults import ModelFault
from services.models.serving import serve, served
from shared.config import POCKET


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without our variables, put back afterwards."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BURSTLINE_")}
    monkeypatch.setattr(os, "environ", kept)


def test_a_folder_of_ones_own_is_served_under_its_name(tmp_path: Path) -> None:
    folder = write_random_dense(tmp_path / "my-model", dense_hf_config("llama"), seed=1)
    found = served(str(folder))
    assert found.name == "my-model"
    assert found.decisive == {
        "BURSTLINE_GATEWAY_MODELS": f"my-model={folder}",
        "BURSTLINE_WORKER_MODEL_FOLDER": str(folder),
        "BURSTLINE_WORKER_MODEL_NAME": "my-model",
    }
    assert found.suited["BURSTLINE_WORKER_DRAFTER"] == "ngram", "it has no MTP head"


def test_a_model_with_a_head_keeps_its_drafter(tmp_path: Path) -> None:
    assert "BURSTLINE_WORKER_DRAFTER" not in served(str(write_random_model(tmp_path / "hybrid"))).suited
    assert served("pocket").suited == {}
    assert served("pocket").folder == POCKET


def test_a_known_model_brings_what_suits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user set wins; the result is what the services' own settings accept."""
    write_random_dense(tmp_path / "smollm2", dense_hf_config("llama"), seed=1)
    os.environ.update({"BURSTLINE_MODELS_DIR": str(tmp_path), "BURSTLINE_WORKER_NUM_BLOCKS": "300"})
    os.environ["BURSTLINE_WORKER_MODEL_NAME"] = "what it was called before"
    assert serve("smollm2") == "smollm2"
    assert os.environ["BURSTLINE_WORKER_NUM_BLOCKS"] == "300"
    assert os.environ["BURSTLINE_WORKER_MODEL_NAME"] == "smollm2"
    assert os.environ["BURSTLINE_WORKER_DRAFTER"] == "ngram"


@pytest.mark.parametrize(
    ("config", "device", "context", "blocks"),
    [
        ({}, "cpu", "", 512),
        # 28 layers of 8 heads of 128: 224 KiB a row, 36 blocks.
        ({"num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28}, "cpu", "", 64),
        ({"num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28}, "cpu", "8192", 128),
        ({"num_key_value_heads": 3, "head_dim": 64, "num_hidden_layers": 30}, "cpu", "", 182),
        ({"num_key_value_heads": 3, "layer_types": ["linear_attention"] * 30}, "cpu", "", 64),
        ({"num_attention_heads": None, "num_key_value_heads": None}, "cpu", "", 64),
        ({}, "cuda", "", 0),
    ],
)
def test_keys_and_values_get_half_a_gibibyte_but_a_whole_window_at_least(
    tmp_path: Path, config: dict[str, object], device: str, context: str, blocks: int
) -> None:
    folder = write_random_dense(tmp_path / "m", dense_hf_config("llama"), seed=1)
    told = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(told))
    os.environ.update({"BURSTLINE_WORKER_DEVICE": device, "BURSTLINE_WORKER_MAX_CONTEXT": context})
    suited = served(str(folder)).suited
    assert suited["BURSTLINE_WORKER_NUM_BLOCKS"] == str(blocks)
    WorkerSettings(num_blocks=blocks, device=device, max_context=int(context or 4096))


def test_the_gateway_reads_what_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_random_dense(tmp_path / "m", dense_hf_config("llama"), seed=1)
    settings = GatewaySettings(models=(served(str(folder)).decisive["BURSTLINE_GATEWAY_MODELS"],))
    assert settings.model_folders() == {"m": folder}


def test_what_is_neither_is_told_with_the_names(tmp_path: Path) -> None:
    with pytest.raises(
        ModelFault, match=r"neither a model \(pocket, smollm2\) nor a folder with a config\.json"
    ):
        served(str(tmp_path))


def test_a_name_that_would_be_misread_is_refused(tmp_path: Path) -> None:
    for name in ("a,b", "a=b"):
        with pytest.raises(ModelFault, match="rename it"):
            served(str(write_random_dense(tmp_path / name, dense_hf_config("llama"), seed=1)))


def test_weights_that_are_not_there_are_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFault, match="its weights are not readable"):
        served(str(tmp_path))
