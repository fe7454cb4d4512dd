"""Dimensions of the hybrid read from a `config.json`, and fields that are wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.gpu_worker.engine.config import FULL, LINEAR
from services.gpu_worker.engine.models.hybrid_config import read_hybrid
from services.gpu_worker.engine.models.random import TINY, hf_config
from shared.errors import EngineFault


def test_dims_survive_the_config_file() -> None:
    for dims in (TINY, replace(TINY, tie_embeddings=True, has_mtp=False, eps=1e-5, rope_theta=1e7)):
        assert read_hybrid(hf_config(dims), has_mtp=dims.has_mtp) == dims


def test_layer_types_follow_the_interval_when_not_listed() -> None:
    config = {name: value for name, value in hf_config(TINY).items() if name != "layer_types"}
    assert read_hybrid(config, has_mtp=True).layer_types == (LINEAR, LINEAR, LINEAR, FULL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size must be a positive integer, not None"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, not 0"),
        ({"layer_types": [FULL]}, "layer_types must hold 4 of 'linear_attention' and 'full_attention'"),
        ({"layer_types": 4}, "layer_types must hold 4 of"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu': only 'silu' is computed"),
        ({"attention_bias": True, "hidden_act": "gelu"}, "gelu.*; attention_bias"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineFault, match=message):
        read_hybrid(hf_config(TINY) | change, has_mtp=True)
