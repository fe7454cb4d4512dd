"""What a round that runs whole on a card ends with: accepted drafts counted, and all that the next round starts from."""

from torch import Tensor

from kernels.advance import reference
from kernels.advance.plan import NO_STOP, STOPS, RoundState
from kernels.dispatch import device_module, on_card

__all__ = ["NO_STOP", "STOPS", "RoundState", "advance"]


def advance(
    state: RoundState, picks: Tensor, ids: Tensor, hidden: Tensor, *, decreed: Tensor | None = None
) -> Tensor:
    """Walk the picks of a round and move `state` on; see the twin."""
    chosen = device_module("advance") if on_card(picks) else reference
    told: Tensor = chosen.advance(state, picks, ids, hidden, decreed=decreed)
    return told
