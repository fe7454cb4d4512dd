"""Depthwise causal convolution over rows: u_t = silu(sum_j w[j] * x[t - (K-1) + j]), taps added in ascending order.

A slot keeps a window of pre-conv inputs: the K - 1 rows before its last verify's rows, then these rows. Which of them
were accepted only moves the start of the next window, so a rejected draft costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.activation.reference import silu


def _taps(window: Tensor, weight: Tensor) -> Tensor:
    """window [B, K - 1 + n, C], weight [K, C] -> silu of the convolution, [B, n, C]."""
    taps = weight.shape[0]
    count = window.shape[1] - (taps - 1)
    total = window[:, :count] * weight[0]
    for j in range(1, taps):
        total.addcmul_(window[:, j : j + count], weight[j])
    return silu(total)


def update(windows: Tensor, history: Tensor, slots: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Convolve the new rows of each slot and keep its window.

    windows [slots, K - 1 + max_verify, C], written at `slots`; history [B * (K - 1)] int64: rows of the flattened windows
    that precede the new ones (first row = accepted count); slots [B] int64; x [B, T, C]; weight [K, C] -> [B, T, C].
    """
    batch, count, channels = x.shape
    before = windows.view(-1, channels).index_select(0, history).view(batch, -1, channels)
    window = torch.cat([before, x], dim=1)
    if batch == 1:
        windows[int(slots), : window.shape[1]] = window[0]
    else:
        windows[:, : before.shape[1] + count].index_copy_(0, slots, window)
    return _taps(window, weight)


def prefill(history: Tensor, x: Tensor, weight: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Convolve a chunk: history [K - 1, C], x [n, C] of which `rows` are real -> ([n, C], next history [K - 1, C])."""
    window = torch.cat([history, x])
    return _taps(window[None], weight)[0], window[rows : rows + history.shape[0]]
