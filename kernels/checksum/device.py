"""The checksum in Triton: one pass over the words, position keys computed on the way.

Programs add their parts by atomics. Integer sums do not depend on the order, so this is the twin's sum bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checksum.reference import GOLDEN, LANES, WORD_BYTES, signed, words_of

CHUNK: Final = 4096
"""Words of one program."""

_GOLDEN = tl.constexpr(signed(GOLDEN))
_A0, _B0, _KEY0 = (tl.constexpr(signed(value)) for value in LANES[0])
_A1, _B1, _KEY1 = (tl.constexpr(signed(value)) for value in LANES[1])


@triton.jit
def _mix(words, FIRST: tl.constexpr, SECOND: tl.constexpr):
    mixed = words * FIRST
    return (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * SECOND


@triton.jit
def _keys(steps, START: tl.constexpr):
    """The lane's position keys of words number steps - 1."""
    return _mix(_mix(steps * _GOLDEN + START, _A1, _B1), _A0, _B0)


@triton.jit(do_not_specialize=["words", "first"])
def _sums(
    data, blocks, out, words, first, plane_stride, row_stride, GATHERED: tl.constexpr, CHUNK: tl.constexpr
):
    """Adds the words of (row, plane, chunk), the plane's number `first + plane * words` on, to the row's two lanes."""
    row, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.program_id(2).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    live = at < words
    block = tl.load(blocks + row) if GATHERED else row
    found = tl.load(data + plane * plane_stride + block * row_stride + at, mask=live, other=0)
    steps = first + plane * words + at + 1
    one = tl.where(live, _mix(found ^ _keys(steps, _KEY0), _A0, _B0), 0)
    two = tl.where(live, _mix(found ^ _keys(steps, _KEY1), _A1, _B1), 0)
    tl.atomic_add(out + row * 2, tl.sum(one, axis=0), sem="relaxed")
    tl.atomic_add(out + row * 2 + 1, tl.sum(two, axis=0), sem="relaxed")


def checksums(rows: Tensor) -> Tensor:
    """As the twin."""
    words = words_of(rows)
    out = torch.zeros(len(words), 2, dtype=torch.int64, device=rows.device)
    _launch(words[None], None, out, 0)
    return out


def block_checksums(pools: Sequence[Tensor], blocks: Tensor) -> Tensor:
    """As the twin, without a copy. The pools must be contiguous, and a block of a plane whole words: ValueError."""
    out = torch.zeros(len(blocks), 2, dtype=torch.int64, device=pools[0].device)
    first = 0
    for pool in pools:
        planes, count = pool.shape[:2]
        block_bytes = pool[0, 0].numel() * pool.element_size()
        if not pool.is_contiguous() or block_bytes % WORD_BYTES:
            raise ValueError("blocks must lie contiguous and on whole words")
        words = words_of(pool.view(planes * count, -1)).view(planes, count, -1)
        _launch(words, blocks, out, first)
        first += planes * words.shape[2]
    return out


def _launch(words: Tensor, blocks: Tensor | None, out: Tensor, first: int) -> None:
    """`words` [planes, rows, W]; a null `blocks` takes the rows in turn."""
    grid = (len(out), words.shape[0], triton.cdiv(words.shape[2], CHUNK))
    if 0 in grid:
        return
    _sums[grid](
        words, out if blocks is None else blocks, out, words.shape[2], first, words.stride(0), words.stride(1),
        GATHERED=blocks is not None, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
