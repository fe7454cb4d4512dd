"""What a shape's figures are held against on the same card: our engine with a library's own products, which are not
row-exact, and `generate` of transformers. Neither is a way to serve."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from typing import Any, Final

import torch

from services.bench import card, card_decode
from services.bench.card import SHAPES, Ceilings
from services.bench.card_record import Row
from services.gpu_worker.engine.config import ModelDims
from shared.clock import SYSTEM
from shared.evidence import Bar

FREE_DECODE_LEAST: Final = 0.97
TRANSFORMERS_LEAST: Final = 4.0
_TOKENS: Final = 24


def release() -> None:
    """Give the card's memory of what is no longer named back."""
    gc.collect()
    torch.cuda.empty_cache()


def free_steps(dims: ModelDims, ceilings: Ceilings, batches: Sequence[int], row: Row) -> dict[str, Any]:
    """Plain steps of the same engine on cuBLAS as it comes."""
    loaded = card.model(dims, "free")
    return card_decode.run_card_decode(loaded, ceilings, batches, (), row=row)


def free_bars(ours: dict[str, Any], free: dict[str, Any]) -> list[Bar]:
    """Speed of the exact steps over the free ones."""
    told = []
    for size, figures in free.items():
        speed = figures["mean_round_ms"] / ours[size]["mean_round_ms"]
        told.append(Bar.at_least(f"exact over free cuBLAS, {size}", round(speed, 3), FREE_DECODE_LEAST, "x"))
    return told


def transformers_step_ms(shape: str, layers: int | None = None) -> float:
    """Milliseconds a token of greedy `generate`, batch 1, random weights of the shape, its own cache."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((SHAPES / shape / "config.json").read_text(encoding="utf-8"))
    if layers:
        config["num_hidden_layers"] = layers
    kind = config.pop("model_type")
    with torch.device("cuda"):
        made = AutoConfig.for_model(kind, **config)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.eval()
    prompt = (torch.arange(128, device="cuda") * 7919 % config["vocab_size"])[None]

    def seconds(tokens: int) -> float:
        torch.cuda.synchronize()
        began = SYSTEM.monotonic_ns()
        model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        torch.cuda.synchronize()
        return (SYSTEM.monotonic_ns() - began) / 1e9

    seconds(2)
    return (seconds(1 + _TOKENS) - seconds(1)) / _TOKENS * 1e3


def transformers_bar(ours_ms: float, theirs_ms: float) -> Bar:
    """Tokens a second over theirs."""
    return Bar.at_least(
        "over transformers generate, batch 1", round(theirs_ms / ours_ms, 2), TRANSFORMERS_LEAST, "x"
    )
