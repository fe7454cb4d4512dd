"""Blocks on their way from the host: buffers on the device that copies pass through before they are put in place.

Copies that lie side by side travel as one. On a card the transfers have a stream of their own, so that one buffer fills
while what the other holds is put in place. Knows no pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

STAGED: Final = 16
"""Blocks of a buffer."""


def staged(rows: Sequence[Tensor], like: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of one size, in the order of their addresses, brought to the device of `like` and into its type: some at a time,
    with their places in `rows`.

    What is yielded is overwritten when the next but one is asked for: whatever reads it is queued on the current stream
    until then. From pinned memory the host waits for nothing.
    """
    shape = (min(STAGED, len(rows)), *rows[0].shape)
    buffers = [torch.empty(shape, dtype=like.dtype, device=like.device) for _ in range(2)]
    transfers = _Transfers() if like.device.type == "cuda" else None
    for turn, first in enumerate(range(0, len(rows), STAGED)):
        some = slice(first, min(first + STAGED, len(rows)))
        buffer = buffers[turn % 2][: some.stop - first]
        if transfers is None:
            _fill(buffer, rows[some])
            yield some, buffer
        else:
            transfers.fill(buffer, rows[some], turn)
            yield some, buffer
            transfers.used(turn)


class _Transfers:
    """The order of two streams over two buffers."""

    def __init__(self) -> None:
        self._main, self._side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._side.wait_stream(self._main)
        self._read: list[torch.cuda.Event | None] = [None, None]

    def fill(self, buffer: Tensor, rows: Sequence[Tensor], turn: int) -> None:
        """As soon as nobody reads the buffer any more; the main stream then waits for it."""
        read = self._read[turn % 2]
        if read is not None:
            self._side.wait_event(read)
        with torch.cuda.stream(self._side):
            _fill(buffer, rows)
        self._main.wait_stream(self._side)

    def used(self, turn: int) -> None:
        """What reads the buffer is queued."""
        self._read[turn % 2] = self._main.record_event()


def _fill(buffer: Tensor, rows: Sequence[Tensor]) -> None:
    """Copy rows, in the order of their addresses, into a buffer: each run of neighbours at once."""
    size = rows[0].numel() * rows[0].element_size()
    first = 0
    while first < len(rows):
        last = first + 1
        while last < len(rows) and _follows(rows[last - 1], rows[last], size):
            last += 1
        run = rows[first]
        if last - first > 1:
            run = run.as_strided((last - first, *run.shape), (run.numel(), *run.stride()))
        buffer[first:last].view(run.shape).copy_(run, non_blocking=True)
        first = last


def _follows(one: Tensor, other: Tensor, size: int) -> bool:
    """Whether `other` lies right behind `one`, of `size` bytes, in the same allocation."""
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return same and other.data_ptr() == one.data_ptr() + size
