"""The folder is a Hugging Face checkpoint of at most 16 MiB, and its card and results hold what they must."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

FOLDER = Path(__file__).parents[4] / "models" / "pocket"


def config() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "config.json").read_text())
    return loaded


def shapes() -> dict[str, tuple[int, ...]]:
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def test_folder_is_at_most_16_mib() -> None:
    """The model and its recipe; the block drafter beside it has a bound of its own."""
    shipped = [p for p in FOLDER.rglob("*") if p.is_file() and not {".work", "__pycache__"} & set(p.parts)]
    sizes = {p: p.stat().st_size for p in shipped}
    drafter = sum(size for p, size in sizes.items() if (FOLDER / "block") in p.parents)
    assert sum(sizes.values()) - drafter <= 16 * 2**20
    assert drafter <= 8 * 2**20


def test_config_names_the_family_and_the_shape() -> None:
    loaded = config()
    assert loaded["model_type"] == "qwen3_5_text"
    assert loaded["architectures"] == ["Qwen3_5ForCausalLM"]
    assert loaded["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert loaded["tie_word_embeddings"] is True
    assert loaded["vocab_size"] % 64 == loaded["hidden_size"] % 64 == loaded["intermediate_size"] % 64 == 0


def expected_shapes(loaded: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, from config.json alone."""
    h, inner, hd = loaded["hidden_size"], loaded["intermediate_size"], loaded["head_dim"]
    keys = loaded["linear_num_key_heads"] * loaded["linear_key_head_dim"]
    heads, dv = loaded["linear_num_value_heads"], loaded["linear_value_head_dim"]
    mlp = {"mlp.gate_proj": (inner, h), "mlp.up_proj": (inner, h), "mlp.down_proj": (h, inner)}
    norms = {"input_layernorm": (h,), "post_attention_layernorm": (h,)}
    full = {
        "self_attn.q_proj": (2 * loaded["num_attention_heads"] * hd, h),
        "self_attn.k_proj": (loaded["num_key_value_heads"] * hd, h),
        "self_attn.v_proj": (loaded["num_key_value_heads"] * hd, h),
        "self_attn.o_proj": (h, loaded["num_attention_heads"] * hd),
        "self_attn.q_norm": (hd,), "self_attn.k_norm": (hd,), **mlp, **norms,
    }  # fmt: skip
    linear = {
        "linear_attn.in_proj_qkv": (2 * keys + heads * dv, h), "linear_attn.in_proj_z": (heads * dv, h),
        "linear_attn.in_proj_a": (heads, h), "linear_attn.in_proj_b": (heads, h), "linear_attn.norm": (dv,),
        "linear_attn.conv1d": (2 * keys + heads * dv, 1, loaded["linear_conv_kernel_dim"]),
        "linear_attn.out_proj": (h, heads * dv), **mlp, **norms,
    }  # fmt: skip
    result: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (loaded["vocab_size"], h),
        "model.norm.weight": (h,),
    }
    for at, kind in enumerate(loaded["layer_types"]):
        block = full if kind == "full_attention" else linear
        result |= {f"model.layers.{at}.{name}.weight": shape for name, shape in block.items()}
        if kind == "linear_attention":
            result |= {f"model.layers.{at}.linear_attn.{name}": (heads,) for name in ("A_log", "dt_bias")}
    result |= {f"mtp.layers.0.{name}.weight": shape for name, shape in full.items()}
    head = {"fc": (h, 2 * h), "pre_fc_norm_embedding": (h,), "pre_fc_norm_hidden": (h,), "norm": (h,)}
    return result | {f"mtp.{name}.weight": shape for name, shape in head.items()}


def test_weights_have_exactly_the_tensors_that_config_implies() -> None:
    assert shapes() == expected_shapes(config())


def test_weights_are_bfloat16_and_finite() -> None:
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            assert str(tensor.dtype) == "torch.bfloat16", name
            assert bool(tensor.isfinite().all()), name


def test_the_draft_head_was_retrained_without_touching_the_trunk() -> None:
    digest = hashlib.sha256()
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            if not name.startswith("mtp."):
                digest.update(name.encode())
                digest.update(file.get_tensor(name).view(torch.int16).numpy().tobytes())
    recorded = json.loads((FOLDER / "results" / "training.json").read_text())["trunk_sha256"]
    assert digest.hexdigest() == recorded


def test_card_names_every_source_with_its_licence() -> None:
    card = (FOLDER / "MODEL_CARD.md").read_text()
    for source in json.loads((FOLDER / "results" / "corpus.json").read_text()):
        assert source["package"] in card
        assert source["version"] in card
        assert source["licence"] in card


@pytest.fixture
def figures() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "results" / "evaluation.json").read_text())
    return loaded


def test_recorded_acceptance_is_above_the_floor(figures: dict[str, Any]) -> None:
    for part in ("held_out_dialogues", "held_out_text"):
        for which in ("all", "without_loops"):
            assert figures[part]["acceptance"][which]["tokens_per_verify"] >= 1.8, (part, which)


def test_recorded_tool_calls_are_valid(figures: dict[str, Any]) -> None:
    assert figures["held_out_dialogues"]["tool_calls"] >= 300
    assert figures["held_out_dialogues"]["valid_tool_calls"] >= 0.95


@pytest.fixture
def drafters() -> dict[str, Any]:
    """drafter -> kind of text -> tokens a verify; `before` = the draft head that shipped before."""
    loaded = json.loads((FOLDER / "results" / "drafters.json").read_text())

    def rates(found: dict[str, Any]) -> dict[str, Any]:
        return {
            name: {kind: figures["tokens_per_verify"] for kind, figures in kinds.items()}
            for name, kinds in found.items()
        }

    return rates(loaded["drafters"]) | {"before": rates(loaded["mtp_before"])}


TEMPLATES, FREE = "held-out templates", "free text and code"


def test_recorded_drafters_reach_their_bars(drafters: dict[str, Any]) -> None:
    for kind in (TEMPLATES, FREE):
        assert drafters["mtp K=3"][kind] >= 2.2
        assert drafters["block"][kind] >= 2.8
    for kind in (TEMPLATES, "tools", "chat"):
        assert drafters["block"][kind] > drafters["mtp K=5"][kind]


def test_the_retrained_head_is_no_worse_anywhere(drafters: dict[str, Any]) -> None:
    for depth in (1, 2, 3, 4, 5):
        for kind, before in drafters["before"][f"mtp K={depth}"].items():
            assert drafters[f"mtp K={depth}"][kind] >= before


def test_the_card_tells_the_recorded_figures(drafters: dict[str, Any]) -> None:
    card = (FOLDER / "MODEL_CARD.md").read_text()
    columns = ("tools", "chat", TEMPLATES, "code", "text", FREE, f"{FREE}, no loops")
    for name, title in {f"mtp K={k}": f"MTP K = {k}" for k in range(1, 6)}.items() | {
        ("block", "block of 8")
    }:
        row = next(line for line in card.splitlines() if line.startswith(f"| {title} |"))
        told = [float(cell.strip(" *")) for cell in row.split("|")[2:-1]]
        assert told == pytest.approx([drafters[name][column] for column in columns], abs=0.0051)
