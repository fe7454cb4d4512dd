"""Checksums of what the pools hold, computed where it is; every device gives the same sum."""

from collections.abc import Sequence

from torch import Tensor

from kernels.checksum import reference
from kernels.checksum.reference import Checksum
from kernels.dispatch import device_module, on_card

__all__ = ["Checksum", "block_checksums", "checksum", "checksums"]


def checksum(values: Tensor) -> Checksum:
    """Of a whole tensor's bits in its own order. Waits for the device: 16 bytes come back."""
    one, two = checksums(values.reshape(1, -1))[0].tolist()
    return Checksum(one, two)


def checksums(rows: Tensor) -> Tensor:
    """[n, ...] float32 or bfloat16 -> int64 [n, 2] beside it, the lanes of each row; waits for nothing."""
    return (device_module("checksum") if on_card(rows) else reference).checksums(rows)


def block_checksums(pools: Sequence[Tensor], blocks: Tensor) -> Tensor:
    """Of blocks in pools [planes, num_blocks, ...], as if each were copied out first; see the twin."""
    return (device_module("checksum") if on_card(pools[0]) else reference).block_checksums(pools, blocks)
