"""Where every sequence of a card's rounds stands. The tensors keep their address; a round has the first S sequences.

starts       int32 [most]        position of column 0, the anchor
counts       int32 [most]        columns of the next round; 0 = padding, or a sequence that ended
left         int32 [most]        rows that the sequence may still commit
wide         int32 [most]        columns that its rounds have while `left` allows them
stops        int32 [most, STOPS] ids that end it; NO_STOP = none
pending      int32 [most]        accepted rows that its state does not hold yet
head         int32 [most]        row of its ring where these begin
store_after  int32 [most]        1 = the next round stores the state after them
tail_tokens  int32 [most, C]     picks of the last round, and with
tail_counts  int32 [most]        how many of them stand and
tail_hidden  [most, C, H]        the hiddens of the rows before them, what drafts are made from
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

STOPS: Final = 8
"""Stop ids a stream may have on the card."""

NO_STOP: Final = -2
"""A stop id that no pick equals: a broken row is -1."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundState:
    """See the module. Rings have `capacity` rows; a state is stored once `fold_rows` are pending."""

    starts: Tensor
    counts: Tensor
    left: Tensor
    wide: Tensor
    stops: Tensor
    pending: Tensor
    head: Tensor
    store_after: Tensor
    tail_tokens: Tensor
    tail_counts: Tensor
    tail_hidden: Tensor
    capacity: int
    fold_rows: int
