"""The causal convolution: prefill in any cut, and windows that start at the accepted count."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels import conv
from kernels.testing import assert_equal_bits, poison

TAPS, CHANNELS, CAPACITY = 4, 24, 8


def _data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, CHANNELS, generator=generator), torch.randn(TAPS, CHANNELS, generator=generator)


def _whole(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return conv.prefill(torch.zeros(TAPS - 1, CHANNELS), x, weight, len(x))[0]


def test_formula() -> None:
    x, weight = _data(50)
    padded = F.pad(x.T[None], (TAPS - 1, 0))
    expected = F.silu(F.conv1d(padded, weight.T[:, None], groups=CHANNELS))[0].T
    torch.testing.assert_close(_whole(x, weight), expected, rtol=1e-5, atol=1e-6)


def test_any_cut_and_tail_padding_give_the_same_bits() -> None:
    x, weight = _data(150)
    whole = _whole(x, weight)
    for cuts in ((64, 86), (1, 1, 1, 147), (2, 148), (100, 50)):
        history, first = torch.zeros(TAPS - 1, CHANNELS), 0
        for count in cuts:
            padded = torch.cat([x[first : first + count], torch.full((7, CHANNELS), torch.nan)])
            out, history = conv.prefill(history, padded, weight, count)
            assert_equal_bits(out[:count], whole[first : first + count], f"{cuts} at {first}")
            first += count


def test_verify_and_rollback_equal_decode() -> None:
    """Columns after a window that starts at the accepted count, in a batch, have the bits of the whole sequence."""
    x, weight = _data(40)
    whole = _whole(x, weight)
    windows = torch.empty(5, TAPS - 1 + CAPACITY, CHANNELS)
    poison(windows)
    windows[[3, 1], : TAPS - 1] = 0.0
    slots, fold, position = torch.tensor([3, 1]), 0, 0
    for columns, accepted in ((8, 3), (1, 1), (4, 4), (2, 0), (6, 5), (3, 3)):
        history = (slots[:, None] * (TAPS - 1 + CAPACITY) + fold + torch.arange(TAPS - 1)).flatten()
        new = x[position : position + columns]
        out = conv.update(windows, history, slots, torch.stack([new, new.flip(0)]), weight)
        assert_equal_bits(out[0], whole[position : position + columns], f"{columns} columns at {position}")
        # The second sequence shares nothing but the launch: alone it must get the same window for the next round.
        windows[1] = windows[3]
        fold, position = accepted, position + accepted
