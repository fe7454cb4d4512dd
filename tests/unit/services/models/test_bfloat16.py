"""The writer of safetensors files: readable by safetensors, rounded as torch rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from services.models.bfloat16 import rounded, write
from services.models.faults import ModelFault


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_values_are_rounded_as_torch_does(values: list[float]) -> None:
    ours = rounded(np.array(values, dtype=np.float32)).astype(np.int32)
    theirs = (
        torch.tensor(values, dtype=torch.float32).to(torch.bfloat16).view(torch.int16).to(torch.int32)
        & 0xFFFF
    )
    assert ours.tolist() == theirs.tolist()


def test_the_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    draw, told = np.random.default_rng(2), []
    values = {"a": draw.standard_normal((3, 5)).astype(np.float32), "b.weight": np.ones(7, np.float32)}
    path = tmp_path / "model.safetensors"
    write(path, {name: one.shape for name, one in values.items()}, values.__getitem__, done=told.append)
    found = load_file(path)
    assert {name: one.dtype for name, one in found.items()} == dict.fromkeys(values, torch.bfloat16)
    for name, one in values.items():
        assert torch.equal(found[name], torch.from_numpy(one).to(torch.bfloat16))
    assert told == [30, 14]


@pytest.mark.parametrize(
    ("values", "told"),
    [(np.ones((2, 2), np.float32), "shape"), (np.array([1.0, np.nan], np.float32), "finite")],
)
def test_a_wrong_tensor_is_named(tmp_path: Path, values: np.ndarray, told: str) -> None:
    with pytest.raises(ModelFault, match=f"tensor a .*{told}"):
        write(tmp_path / "model.safetensors", {"a": (2,)}, lambda name: values)
