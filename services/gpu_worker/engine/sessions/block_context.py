"""What a session asks of a block drafter's context rows, and whether a request can be served by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from torch import Tensor

from services.gpu_worker.engine.events import DrafterOffReason
from services.gpu_worker.engine.models.block_config import BlockDims
from services.gpu_worker.engine.requests import GenerateRequest
from services.gpu_worker.engine.sequence import SequenceState
from services.gpu_worker.engine.sessions.outcome import SessionShape

LEAST_PROMPT: Final = 16
"""Prompt tokens under which a block drafter has too little to read."""
SPARE_ROWS: Final = 8
"""Of the context, beyond prompt and one block."""


class Ring(Protocol):
    """Where the drafter's rows lie."""

    @property
    def k(self) -> Tensor: ...

    @property
    def v(self) -> Tensor: ...


class DraftContext(Protocol):
    """What a session asks of `BlockContext`."""

    @property
    def dims(self) -> BlockDims: ...

    @property
    def ring(self) -> Ring: ...

    def covers(self, slot: int, position: int) -> bool: ...

    def settle(self, slots: Sequence[int], *, upto: int | None = None) -> None: ...

    def complete(self, slot: int, snapshot: int, position: int) -> bool: ...

    def tail(self, slot: int, upto: int) -> Tensor | None: ...


def block_fits(
    request: GenerateRequest, sequence: SequenceState, shape: SessionShape, context: DraftContext
) -> bool:
    """Whether a block drafter may serve the request: a prompt of some length, room for blocks behind it, and its window's
    rows of whatever the sequence begins with (R-D2). Another kind of session serves it otherwise."""
    fits = block_misfit(request, shape, context) is None
    return fits and context.covers(sequence.ssm_slot_idx(), sequence.seq_len)


def block_misfit(
    request: GenerateRequest, shape: SessionShape, context: DraftContext
) -> DrafterOffReason | None:
    """What of the request's own length keeps a block drafter from serving it, or null."""
    prompt = len(request.tokens)
    if prompt < LEAST_PROMPT:
        return DrafterOffReason.PROMPT
    room = prompt + context.dims.block + SPARE_ROWS <= shape.cache_max_ctx
    return None if room else DrafterOffReason.CONTEXT
