"""Tokens on their way from the engine into frames: bursts wait here while one publish is in flight, and coalesce.

Pure. Bounded by the request's own budget: no choice ever holds more than its `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from shared.errors import EngineFault
from shared.protocol.messages import TokenLogprobs

MAX_FRAME_TOKENS: Final = 256
"""Most tokens of one frame: with 20 log probabilities each it stays far below the journal's message limit."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What the next frame of one choice carries. `offset` counts completion tokens before it."""

    choice: int
    offset: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclass(kw_only=True)
class _Waiting:
    published: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None


class FrameBuffer:
    """The tokens of every choice that are not published yet."""

    def __init__(self, offsets: Sequence[int]) -> None:
        """`offsets`: completion tokens of each choice that the journal holds already."""
        self._choices = [_Waiting(published=offset) for offset in offsets]
        self._turn = 0

    def add(
        self, choice: int, offset: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None
    ) -> None:
        """Append one burst. Raises EngineFault when it does not follow the one before it."""
        waiting = self._choices[choice]
        expected = waiting.published + len(waiting.tokens)
        if offset != expected:
            raise EngineFault(f"choice {choice}: a burst at offset {offset} where {expected} follows")
        if logprobs is not None:
            if len(logprobs) != len(tokens):
                raise EngineFault(f"choice {choice}: {len(logprobs)} log probabilities, {len(tokens)} tokens")
            waiting.logprobs = [*(waiting.logprobs or ()), *logprobs]
        waiting.tokens.extend(tokens)

    def take(self) -> Chunk | None:
        """Remove the next frame, choices in turn; None when nothing waits."""
        for step in range(len(self._choices)):
            choice = (self._turn + step) % len(self._choices)
            if self._choices[choice].tokens:
                self._turn = choice + 1
                return self._cut(choice)
        return None

    def _cut(self, choice: int) -> Chunk:
        waiting = self._choices[choice]
        tokens = tuple(waiting.tokens[:MAX_FRAME_TOKENS])
        logprobs = None
        if waiting.logprobs is not None:
            logprobs = tuple(waiting.logprobs[: len(tokens)])
            waiting.logprobs = waiting.logprobs[len(tokens) :] or None
        del waiting.tokens[: len(tokens)]
        chunk = Chunk(choice=choice, offset=waiting.published, tokens=tokens, logprobs=logprobs)
        waiting.published += len(tokens)
        return chunk

    @property
    def offsets(self) -> tuple[int, ...]:
        """Completion tokens of each choice that left the buffer."""
        return tuple(waiting.published for waiting in self._choices)

    def __bool__(self) -> bool:
        return any(waiting.tokens for waiting in self._choices)
