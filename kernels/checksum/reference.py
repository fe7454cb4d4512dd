"""A 128-bit checksum of tensors, computed where they are: detects memory that changed, not an adversary.

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

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

GOLDEN: Final = 0x9E3779B97F4A7C15
LANES: Final = (
    (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x2545F4914F6CDD1D),
    (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0xD6E8FEB86659FD93),
)
"""(A, B, first key) of each lane: odd multipliers of well-tried 64-bit mixers."""

WORD_BYTES: Final = 8

_TYPES: Final = (torch.float32, torch.bfloat16)


class Checksum(NamedTuple):
    """Two lanes, each 64 bits as torch's signed integer."""

    one: int
    two: int


def words_of(rows: Tensor) -> Tensor:
    """[n, ...] -> the rows' bits as int64 [n, words] in their own order, a view where they lie contiguous on 8 bytes.

    The last word of a row is filled with zeros. Only float32 and bfloat16: ValueError.
    """
    if rows.dtype not in _TYPES:
        raise ValueError(f"checksums are over float32 or bfloat16, not {rows.dtype}")
    flat = rows.contiguous().view(rows.shape[0], math.prod(rows.shape[1:]))
    if not flat.numel():
        return flat.new_empty(flat.shape, dtype=torch.int64)
    missing = -flat.shape[1] % (WORD_BYTES // flat.element_size())
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    elif flat.data_ptr() % WORD_BYTES:
        flat = flat.clone()
    return flat.view(torch.int64)


def checksums(rows: Tensor) -> Tensor:
    """[n, ...] -> int64 [n, 2], the lanes of each row."""
    words = words_of(rows)
    return torch.stack([_lane(words, lane) for lane in range(2)], dim=1)


def block_checksums(pools: Sequence[Tensor], blocks: Tensor) -> Tensor:
    """Pools [planes, num_blocks, ...] of one shape and block ids int64 [n] -> int64 [n, 2].

    A block's sum is over what `KVPool.read_block` would copy out: the first pool's planes, say its keys, then the next's.
    """
    return checksums(torch.stack([pool[:, blocks] for pool in pools]).movedim(2, 0))


def _lane(words: Tensor, lane: int) -> Tensor:
    first, second, _ = LANES[lane]
    return _mix(words ^ _keys(words.shape[1], lane, words.device), first, second).sum(dim=1)


def _mix(words: Tensor, first: int, second: int) -> Tensor:
    mixed = words * signed(first)
    return (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * signed(second)


@lru_cache(maxsize=16)
def _keys(count: int, lane: int, device: torch.device) -> Tensor:
    """[count] position keys: the splitmix sequence from the lane's first key. A model needs two counts."""
    start = LANES[lane][2]
    steps = torch.arange(1, count + 1, dtype=torch.int64, device=device) * signed(GOLDEN) + signed(start)
    return _mix(_mix(steps, *LANES[1][:2]), *LANES[0][:2])


def signed(value: int) -> int:
    """The 64-bit pattern as torch's signed integer."""
    return value - (1 << 64) if value >> 63 else value
