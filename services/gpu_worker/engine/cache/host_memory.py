"""Where the host tier's copies lie: in plain tensors, or in one slab of pinned memory that a card copies from at full speed.

A slab is pinned once, at the start: pinning costs far more than copying. Small copies (blocks) are laid from its bottom up,
large ones (states) from its top down, and what was freed serves the next copy of the same size, so nothing ever moves.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from typing import Final, Protocol

import torch
from torch import Tensor

from shared.errors import EngineFault

_ALIGN: Final = 256
_LARGE: Final = 16 << 20
"""Bytes from which a copy is laid from the top."""


class HostMemory(Protocol):
    """Keeps copies of device tensors."""

    def keep(self, values: Tensor) -> Tensor | None:
        """A copy in host memory; null when there is no room. It may still be on its way: what reads it must be queued
        behind."""
        ...

    def drop(self, copy: Tensor) -> None:
        """A copy is not needed any more."""
        ...


class PlainMemory:
    """A tensor each."""

    def keep(self, values: Tensor) -> Tensor | None:
        """Waits for the copy."""
        return values.cpu()

    def drop(self, copy: Tensor) -> None:
        """Its last reference frees it."""


class PinnedSlab:
    """`budget` bytes, pinned. Not thread-safe: the engine's thread owns it."""

    def __init__(self, budget: int) -> None:
        """Raises `EngineFault` when the driver refuses to pin so much."""
        self._bytes = torch.empty(budget, dtype=torch.uint8)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(self._bytes.data_ptr(), budget, 0)
        if int(status):
            raise EngineFault(f"{budget} bytes of host memory could not be pinned: {status}")
        weakref.finalize(self, runtime.cudaHostUnregister, self._bytes.data_ptr())
        self._places = Places(budget)

    def keep(self, values: Tensor) -> Tensor | None:
        """Queued on the current stream, not waited for."""
        values = values.contiguous()
        size = values.numel() * values.element_size()
        start = self._places.take(size)
        if start is None:
            return None
        copy = self._bytes[start : start + size].view(values.dtype).view(values.shape)
        return copy.copy_(values, non_blocking=True)

    def drop(self, copy: Tensor) -> None:
        """The place serves the next copy of this size; copies are queued in order, so a reader before it is done by then.
        A copy that lies elsewhere (another tier's, or plain memory) is its own affair."""
        start = copy.data_ptr() - self._bytes.data_ptr()
        if 0 <= start < len(self._bytes):
            self._places.give(start, copy.numel() * copy.element_size())


def host_memory(budget: int, *, pinned: bool) -> HostMemory:
    """Of a tier of `budget` bytes; `pinned` = a card copies from it."""
    return PinnedSlab(budget) if pinned and budget else PlainMemory()


class Places:
    """Offsets in a range of bytes: the arithmetic of a slab."""

    def __init__(self, total: int) -> None:
        self._bottom, self._top = 0, total // _ALIGN * _ALIGN
        self._free: dict[int, list[int]] = defaultdict(list)

    def take(self, size: int) -> int | None:
        """An offset with room for `size` bytes, a multiple of 256; null when there is none."""
        room = math.ceil(size / _ALIGN) * _ALIGN
        if self._free[room]:
            return self._free[room].pop()
        if self._top - self._bottom < room:
            return None
        if room >= _LARGE:
            self._top -= room
            return self._top
        self._bottom += room
        return self._bottom - room

    def give(self, start: int, size: int) -> None:
        """Give a place back."""
        self._free[math.ceil(size / _ALIGN) * _ALIGN].append(start)
