"""What all messages stand on: the two kinds of struct, failures and replies, and how token ids are packed."""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from typing import ClassVar

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all. `VERSION` goes up with any change of fields or meaning."""

    VERSION: ClassVar[int] = 1


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=False):
    """A value inside messages; it has no life of its own on the wire."""


class Failure(Part, frozen=True, kw_only=True):
    """A typed error that travels to the caller unchanged."""

    code: str
    message: str
    status: int
    retry_after_s: int | None


class Reply(Message, frozen=True, kw_only=True):
    """Base of every reply. `failure` set = nothing else holds."""

    failure: Failure | None


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32. Raises OverflowError for an id outside 0..2^32-1."""
    packed = array.array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Inverse of `pack_tokens`. Raises ValueError if the length is not a multiple of 4."""
    packed = array.array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)
