"""Tools of the row-exactness gate: shape tables, poison, thread counts, and the assertion itself. Test code only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

COLUMNS: Final = (1, 2, 3, 4, 6, 8)
"""Verify columns T that every gate covers."""

CO_TENANTS: Final = (0, 1, 3, 7)
"""Other sequences in the launch."""

ROW_COUNTS: Final = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129)
"""Row counts around vector widths, tiles and chunks."""

WIDTHS: Final = (8, 16, 20, 24, 64, 129, 320)
"""Row widths, most of them no multiple of a vector."""

CUTS: Final = (
    (500,),
    (64,) * 7 + (52,),
    (128, 128, 128, 116),
    (192, 308),
    (320, 180),
    (448, 52),
    (64, 256, 64, 116),
)
"""Ways to prefill 500 rows in chunks that start on the grid."""


def poison(*tensors: Tensor) -> None:
    """Fill with NaN what no kernel may read."""
    for tensor in tensors:
        tensor.fill_(torch.nan)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with this many intra-op threads, then as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_equal_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """`torch.equal` with a message that says where and by how much."""
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)} against {tuple(expected.shape)}"
    )
    if torch.equal(actual, expected):
        return
    wrong = (actual != expected).nonzero()
    gap = (actual - expected).abs().max().item()
    raise AssertionError(
        f"{what}: {len(wrong)} of {actual.numel()} values differ, first at {wrong[0].tolist()}, by {gap}"
    )


def assert_row_exact(
    operation: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    counts: Sequence[int] = ROW_COUNTS,
    *,
    across_threads: bool = True,
) -> None:
    """The gate of a row-wise operation: `inputs` share dimension 0, and so does the result.

    Row r has the same bits whether it is computed among all rows, among the first or last `count`, at another row of the
    launch, or with 1 or 2 threads. `across_threads` off compares only launches of one thread count.
    """
    rows = inputs[0].shape[0]
    assert rows > max(counts), "the gate needs more rows than the largest count"
    with threads(1):
        whole = operation(*inputs).clone()
    for thread_count in (1, 2):
        with threads(thread_count):
            if not across_threads:
                whole = operation(*inputs).clone()
            for count in counts:
                for first in (0, 1, rows - count):
                    part = operation(*(tensor[first : first + count].clone() for tensor in inputs))
                    label = f"{count} rows from {first}, {thread_count} threads"
                    assert_equal_bits(part, whole[first : first + count], label)
            turned = operation(*(tensor.roll(3, 0) for tensor in inputs))
            assert_equal_bits(turned, whole.roll(3, 0), f"rotated, {thread_count} threads")
