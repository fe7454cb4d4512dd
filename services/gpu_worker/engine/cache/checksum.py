"""A 128-bit checksum of float32 tensors, computed where they are: detects memory that changed, not an adversary.

Bytes are read as 64-bit words w_i. Each of two lanes computes, modulo 2^64,

    h = sum over i of mix(w_i xor k_i),   mix(x) = y * B,   y = z xor (z >> 32),   z = x * A

with odd constants A, B and position keys k_i of its own, so that `mix` is a bijection.

What it misses. A change inside one word always changes both lanes, since a bijection of one summand is all that
changes. Words that swap places meet other keys. Changes in several words cancel in a lane only when their differences
after `mix` add up to 0 modulo 2^64: for changes that know nothing of the keys (bits that flip, a block in another
block's place, a copy that ran early or late) about one in 2^64 a lane, and the lanes' keys and constants are unrelated,
so one in 2^128 together. Somebody who knows the constants can build a collision: bytes that leave the process are
hashed with SHA-256 instead.

All of it is integer arithmetic, so every device gives the same sum, whatever the order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

_GOLDEN: Final = 0x9E3779B97F4A7C15
_LANES: Final = (
    (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x2545F4914F6CDD1D),
    (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0xD6E8FEB86659FD93),
)
"""(A, B, first key) of each lane: odd multipliers of well-tried 64-bit mixers."""


class Checksum(NamedTuple):
    """Two lanes, each 64 bits as torch's signed integer."""

    one: int
    two: int


def checksum(values: Tensor) -> Checksum:
    """Of a tensor's bits in its own order; an odd last word counts as if a zero followed. Only float32: ValueError."""
    if values.dtype != torch.float32:
        raise ValueError(f"checksums are over float32, not {values.dtype}")
    flat = values.contiguous().view(-1)
    if flat.numel() % 2:
        flat = torch.nn.functional.pad(flat, (0, 1))
    elif flat.storage_offset() % 2:
        flat = flat.clone()  # pairs must lie on 8 bytes
    words = flat.view(torch.int64)
    one, two = (_lane(words, lane) for lane in range(2))
    return Checksum(one, two)


def _lane(words: Tensor, lane: int) -> int:
    first, second, _ = _LANES[lane]
    return int(_mix(words ^ _keys(len(words), lane, words.device), first, second).sum())


def _mix(words: Tensor, first: int, second: int) -> Tensor:
    mixed = words * _signed(first)
    return (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * _signed(second)


@lru_cache(maxsize=16)
def _keys(count: int, lane: int, device: torch.device) -> Tensor:
    """[count] position keys: the splitmix sequence from the lane's first key. A model needs two counts."""
    start = _LANES[lane][2]
    steps = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN) + _signed(start)
    return _mix(_mix(steps, *_LANES[1][:2]), *_LANES[0][:2])


def _signed(value: int) -> int:
    """The 64-bit pattern as torch's signed integer."""
    return value - (1 << 64) if value >> 63 else value
