"""The card's norms in Triton's interpreter, float32, against their twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.norm_rope import device, reference
from kernels.testing import assert_equal_bits

EPS = 1e-6


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("width", [8, 24, 320, 1032])
@pytest.mark.parametrize("rows", [1, 3])
def test_rms_norm_is_the_twin(nan_filled_empty: None, rows: int, width: int) -> None:
    x, scale = _draw(rows, width), _draw(width)
    torch.testing.assert_close(device.rms_norm(x, scale, EPS), reference.rms_norm(x, scale, EPS))
    whole = device.rms_norm(x, scale, EPS)
    assert_equal_bits(device.rms_norm(x[-1:].clone(), scale, EPS), whole[-1:], "last row alone")


def test_rms_norm_takes_heads_and_column_views() -> None:
    wide, scale = _draw(5, 128), _draw(32)
    view = wide[:, 32:96].view(5, 2, 32)
    torch.testing.assert_close(device.rms_norm(view, scale, EPS), reference.rms_norm(view, scale, EPS))
    torch.testing.assert_close(
        device.rms_norm(wide[:, 64:96], scale, EPS), reference.rms_norm(wide[:, 64:96], scale, EPS)
    )


@pytest.mark.parametrize("slices", [0, 1, 3])
@pytest.mark.parametrize("width", [24, 320])
def test_add_rms_norm_is_the_twin(nan_filled_empty: None, slices: int, width: int) -> None:
    x, scale = _draw(4, width), _draw(width)
    delta = _draw(slices, 4, width) if slices else _draw(4, width)
    ours, theirs = x.clone(), x.clone()
    got, expected = (
        device.add_rms_norm(ours, delta, scale, EPS),
        reference.add_rms_norm(theirs, delta, scale, EPS),
    )
    assert_equal_bits(ours, theirs, "the sum")
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("heads", "width"), [(1, 8), (5, 24), (6, 128)])
def test_gated_norm_is_the_twin(nan_filled_empty: None, heads: int, width: int) -> None:
    x, wide, weight = _draw(3, heads, width), _draw(3, heads * width + 8), _draw(width)
    gate = wide[:, 8:].view(3, heads, width)
    torch.testing.assert_close(
        device.gated_norm(x, gate, weight, EPS), reference.gated_norm(x, gate, weight, EPS)
    )


def test_zero_rows_stay_zero() -> None:
    zeros = torch.zeros(2, 16)
    assert not device.rms_norm(zeros, torch.ones(16), EPS).any()
    assert not device.add_rms_norm(zeros.clone(), zeros, torch.ones(16), EPS).any()


def test_views_that_another_binary_would_serve_are_refused() -> None:
    scale = torch.ones(16)
    with pytest.raises(ValueError, match="no multiple"):
        device.rms_norm(torch.ones(2, 17)[:, :16], scale, EPS)
    with pytest.raises(ValueError, match="16 bytes"):
        device.rms_norm(torch.ones(2, 24)[:, 1:17], scale, EPS)
    with pytest.raises(ValueError, match="strides"):
        device.rms_norm(torch.ones(2, 32)[:, ::2], scale, EPS)
