"""The seed of each choice of a request (C1.4): f(seed, 0) = seed; others are SHA-256 of both, first 64 bits."""

from __future__ import annotations

import hashlib
import struct


def choice_seed(seed: int, choice: int) -> int:
    """The 64-bit seed of choice `choice`. Raises struct.error outside 0 <= seed < 2^64."""
    if choice == 0:
        return seed
    digest = hashlib.sha256(b"burstline/choice/1" + struct.pack("<QI", seed, choice)).digest()
    return int.from_bytes(digest[:8], "little")
