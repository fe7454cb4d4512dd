"""Where a model is put: what a setting means, and what is refused before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from services.gpu_worker.engine.placement import CPU, place
from shared.errors import EngineFault


def test_the_cpu_computes_in_float32_alone() -> None:
    assert place() is CPU
    assert place("cpu", "float32") is CPU
    with pytest.raises(EngineFault, match="float32, not in bfloat16"):
        place("cpu", "bfloat16")


def test_a_card_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineFault, match="sees no card"):
        place("cuda")
    with pytest.raises(EngineFault, match="neither cpu nor cuda"):
        place("tpu")


@pytest.mark.parametrize(
    ("name", "dtype", "recipe"),
    [
        (None, torch.bfloat16, "card"),
        ("bfloat16", torch.bfloat16, "card"),
        ("float32", torch.float32, "card"),
        ("float8", torch.bfloat16, "card-fp8"),
    ],
)
def test_types_of_a_card(
    monkeypatch: pytest.MonkeyPatch, name: str | None, dtype: torch.dtype, recipe: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    placement = place("cuda", name)
    assert (placement.dtype, placement.recipe, placement.on_card) == (dtype, recipe, True)
    assert placement.recipe_for(()) == recipe
    with pytest.raises(EngineFault, match="none of"):
        place("cuda", "float16")


def test_free_products_are_for_a_benchmark_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting leads to a recipe that is not row-exact."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = (None, "bfloat16", "float32", "float8")
    assert {place("cuda", name).recipe for name in names} == {"card", "card-fp8"}
