"""Namespaces and chain keys: what decides whether two prompts may share rows (C4).

    root        = SHA-256("burstline/root/1" || for each part: type tag, u32 length, bytes)
    key of b+1  = SHA-256(key of b || the next 64 token ids as little-endian u32)

Typed, length-prefixed parts make the root injective over its parts (an adapter called X is never a salt called X), and
SHA-256 makes keys of different histories different. Keys are the same in every process.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

from shared.protocol.messages import NamespaceParts, pack_tokens

GRID: Final = 64
"""Tokens in a block; positions that are multiples of it are the grid (C1.2)."""

LAYOUT_VERSION: Final = 1
"""Of what a prefix entry holds. Another version is refused, never converted."""

_TAGS: Final = (("fingerprint", b"f"), ("adapter_digest", b"a"), ("tenant", b"t"), ("salt", b"s"))


def root(namespace: NamespaceParts) -> bytes:
    """The chain root of a namespace, 32 bytes."""
    digest = hashlib.sha256(b"burstline/root/1")
    for name, tag in _TAGS:
        part = getattr(namespace, name).encode()
        digest.update(tag + struct.pack("<I", len(part)) + part)
    return digest.digest()


def chain(start: bytes, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """Chain keys of the full blocks of `tokens`, ascending: element i stands for position 64 * (i + 1)."""
    keys: list[bytes] = []
    key = start
    for begin in range(0, len(tokens) - GRID + 1, GRID):
        key = hashlib.sha256(key + pack_tokens(tokens[begin : begin + GRID])).digest()
        keys.append(key)
    return tuple(keys)
