"""What the runner is asked for: rows of prefill, of verify and of the draft plane.

Plain values with absolute positions. Nothing here knows requests, sampling or who owns a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillChunk:
    """`len(tokens)` prompt rows from `start`, which lies on the 64-grid and is where the slot's state is valid."""

    slot: int
    start: int
    tokens: Sequence[int]
    block_table: Sequence[int]
    """Block ids of rows 0.. on; covers `start + len(tokens)` rows at least."""
    previous_hidden: Tensor
    """[H] float32: final-normed hidden of row `start - 1`, zeros at 0. Pairs draft row `start`."""
    defer: bool = False
    """A block drafter takes these rows in later, when it is told to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyRows:
    """1 to `max_verify` columns of one sequence; column 0 is the anchor, at position `start`."""

    slot: int
    start: int
    tokens: Sequence[int]
    block_table: Sequence[int]
    eager: bool = False
    """Launch without a device graph; a runner without graphs has nothing to do for it."""
    tap: bool = False
    """A block drafter shall take in the rows that are accepted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockAsk:
    """Ask a block drafter for `k` drafts after `anchor`, which stands at `start` and has no row yet."""

    slot: int
    start: int
    anchor: int
    k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRows:
    """Rows of the draft plane: row p pairs the token x_p with the final-normed hidden of row p - 1."""

    start: int
    tokens: Sequence[int]
    hiddens: Tensor
    """[n, H] float32."""
    block_table: Sequence[int]

    def part(self, first: int, stop: int) -> DraftRows:
        """Rows number `first` to `stop` - 1 of these, as far as there are so many."""
        return DraftRows(
            start=self.start + first,
            tokens=self.tokens[first:stop],
            hiddens=self.hiddens[first:stop],
            block_table=self.block_table,
        )
