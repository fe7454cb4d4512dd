"""Drafters' configs as they are published, and every way in which they can be wrong or contradict themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.gpu_worker.engine.models.block_config import BlockDims, Harvest
from services.gpu_worker.engine.models.block_loader import load_block
from services.gpu_worker.engine.models.block_tensors import block_shapes
from services.gpu_worker.engine.models.random import TINY
from services.gpu_worker.engine.models.random_block import write_random_block
from shared.errors import EngineFault
from tests.block_kit import config_of
from tests.engine_kit import tiny_model

PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "attention_bias": False,
    "is_causal": False,
    "dflash_config": {
        "block_size": 16,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "final_logit_softcapping": 20.0,
        "mask_token_id": 201818,
        "output_multiplier": 0.19611613513818404,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": [1, 13, 25, 37, 49],
    },
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "layer_types": ["sliding_attention"] * 5,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 52,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 202048,
}
"""The fields of a published DFlash2 drafter for a trunk of 52 layers."""


def test_a_published_config_is_read() -> None:
    dims = BlockDims.from_hf(PUBLISHED)
    assert dims.harvest is Harvest.DFLASH
    assert (dims.block, dims.drafts, dims.window, dims.causal) == (16, 15, 2048, False)
    assert dims.taps == (1, 13, 25, 37, 49)
    assert (dims.conv_taps, dims.selector_rank, dims.logit_cap) == (2, 256, 20.0)
    shapes = block_shapes(dims)
    assert shapes["fc.weight"] == (6656, 33280)
    assert shapes["layers.4.mlp_conv.kernel_projection.weight"] == (1664, 6656)
    assert shapes["layers.0.attention_conv.base_kernel"] == (2, 2, 6656)
    assert shapes["candidate_selector.predecessor_codebook"] == (202048, 256)
    assert len(shapes) == 81


def test_r_d2_the_tail_has_the_window_and_a_block_by_the_golden_numbers() -> None:
    """5 layers x (2,048 + 16) rows x 8 heads x 128 x 4 bytes x 2 = 84.5 MB."""
    dims = BlockDims.from_hf(PUBLISHED)
    assert dims.tail_rows == 2064
    assert dims.tail_elements * 4 == 5 * (2048 + 16) * 8 * 128 * 4 * 2 == 84_541_440


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"layer_types": None}, "layer_types"),
        ({"layer_types": ["sliding_attention"]}, "layer_types names 1 of 2"),
        ({"sliding_window": None}, "sliding_window"),
        ({"use_sliding_window": False}, "use_sliding_window"),
        ({"target_layer_ids": None}, "target_layer_ids"),
        ({"target_layer_ids": [3, 0]}, "target_layer_ids"),
        ({"target_layer_ids": [-1, 0]}, "target_layer_ids"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"block_size": 1}, "block_size"),
        ({"block_size": 41}, "block_size"),
        ({"architectures": ["Unknown"]}, "sample_from_anchor is not said"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"architectures": ["Qwen3DSparkModel"]}, "selector_rank"),
        ({"markov_rank": 4}, "markov_rank"),
        ({"enable_confidence_head": True}, "enable_confidence_head"),
        ({"is_causal": True, "sliding_window_non_causal": True}, "is_causal"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"dflash_config": {"block_size": 4}}, "block_size"),
        ({"draft_vocab_size": 100}, "draft_vocab_size"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_r_d2_what_is_not_computed_or_contradicts_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(EngineFault, match=named):
        BlockDims.from_hf(config_of(TINY, **fields))


@pytest.mark.parametrize(
    ("architecture", "anchor", "harvest"),
    [
        ("DFlashDraftModel", None, Harvest.DFLASH),
        ("DFlashDraftModel", False, Harvest.DFLASH),
        ("Qwen3DSparkModel", None, Harvest.DSPARK),
        ("DSparkDraftModel", True, Harvest.DSPARK),
        ("Another", True, Harvest.DSPARK),
    ],
)
def test_the_harvest_is_the_familys(architecture: str, anchor: bool | None, harvest: Harvest) -> None:
    fields = {"architectures": [architecture], "dflash_config": {}, "sample_from_anchor": anchor}
    dims = BlockDims.from_hf(config_of(TINY, **fields))
    assert dims.harvest is harvest
    assert dims.drafts == dims.block - (harvest is Harvest.DFLASH)


def test_a_sliding_layer_is_causal_unless_it_is_told_otherwise() -> None:
    assert BlockDims.from_hf(config_of(TINY, is_causal=None)).causal
    assert not BlockDims.from_hf(config_of(TINY, is_causal=None, sliding_window_non_causal=True)).causal


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": 32}, "hidden_size"),
        ({"vocab_size": 100}, "vocab_size"),
        ({"mask_token_id": 512}, "mask_token_id"),
        ({"target_layer_ids": [1, 9]}, "target_layer_ids"),
        ({"num_target_layers": 9}, "num_target_layers"),
    ],
)
def test_a_drafter_of_another_target_is_refused(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = write_random_block(tmp_path, config_of(TINY, **fields))
    with pytest.raises(EngineFault, match=named):
        load_block(folder, tiny_model().model)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    folder = write_random_block(tmp_path, config_of(TINY))
    weights = load_file(folder / "model.safetensors")

    def refused(changed: dict[str, torch.Tensor], named: str) -> None:
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(EngineFault, match=named):
            load_block(folder, tiny_model().model)

    refused({name: w for name, w in weights.items() if name != "fc.weight"}, "fc.weight")
    refused(weights | {"hidden_norm.weight": torch.ones(3)}, "hidden_norm.weight")
    refused(weights | {"markov_head.markov_w1.weight": torch.ones(3, 3)}, "markov_head.markov_w1.weight")


def test_an_id_map_names_other_ids_of_the_target(tmp_path: Path) -> None:
    config = config_of(TINY, "dflash", draft_vocab_size=100)
    offsets = torch.arange(100) + 3
    folder = write_random_block(tmp_path, config, extra={"d2t": offsets})
    ids = load_block(folder, tiny_model().model).ids
    assert ids is not None
    assert ids.tolist() == [2 * index + 3 for index in range(100)]
    for wrong in (offsets.float(), offsets[:50], torch.zeros(100, dtype=torch.int64) - torch.arange(100)):
        write_random_block(tmp_path, config, extra={"d2t": wrong})
        with pytest.raises(EngineFault, match="d2t"):
            load_block(folder, tiny_model().model)
    write_random_block(tmp_path, config)
    with pytest.raises(EngineFault, match="d2t"):
        load_block(folder, tiny_model().model)


def test_an_embedding_of_its_own_for_masks(tmp_path: Path) -> None:
    folder = write_random_block(tmp_path, config_of(TINY))
    torch.save(torch.arange(TINY.hidden, dtype=torch.float32), folder / "mask_embedding.pt")
    row = load_block(folder, tiny_model().model).mask_row
    assert row is not None
    assert row.tolist() == list(range(TINY.hidden))
    torch.save(torch.zeros(3), folder / "mask_embedding.pt")
    with pytest.raises(EngineFault, match=r"mask_embedding\.pt"):
        load_block(folder, tiny_model().model)
    (folder / "mask_embedding.pt").write_bytes(json.dumps({}).encode())
    with pytest.raises(EngineFault, match=r"mask_embedding\.pt"):
        load_block(folder, tiny_model().model)
