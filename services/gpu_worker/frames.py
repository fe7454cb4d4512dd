"""Tokens on their way from the engine into frames: bursts wait here while one publish is in flight, and coalesce. Log
probabilities of the prompt go before them.

Pure. Bounded by the request itself: no choice ever holds more than its `max_tokens`, and the prompt is scored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from shared.errors import EngineFault
from shared.protocol.messages import TokenLogprobs

MAX_FRAME_TOKENS: Final = 256
"""Most tokens of one frame: with 20 log probabilities each it stays far below the journal's message limit."""

MAX_SCORE_VALUES: Final = 16_384
"""Most log probabilities of one message of the prompt's: about 300 kB."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the next message of the prompt carries. `offset` = entries before it."""

    offset: int
    entries: tuple[TokenLogprobs, ...]


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
    """The tokens of every choice that are not published yet, and what the prompt's tokens are worth."""

    def __init__(self, offsets: Sequence[int], *, scored: int = 0, to_score: int = 0) -> None:
        """`offsets`: completion tokens of each choice that the journal holds already; `scored` prompt tokens of
        `to_score` it has too."""
        self._choices = [_Waiting(published=offset) for offset in offsets]
        self._turn = 0
        self._told = 0  # entries that the engine has told, journalled ones included
        self._scored = scored
        self._to_score = to_score
        self._scores: list[TokenLogprobs] = []

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

    def score(self, offset: int, entries: Sequence[TokenLogprobs]) -> None:
        """Append entries of the prompt; those that the journal has are dropped, since the engine begins anew. Raises
        EngineFault when they do not follow the ones before."""
        if offset != self._told:
            raise EngineFault(f"prompt log probabilities at offset {offset} where {self._told} follow")
        waiting = self._scored + len(self._scores)
        self._told += len(entries)
        self._scores.extend(entries[max(0, waiting - offset) :])

    def prompt_over(self) -> bool:
        """Nothing more is told of the prompt: tokens wait for it no longer. False when something is missing."""
        wanted, self._to_score = self._to_score, self._scored + len(self._scores)
        return self._to_score >= wanted

    def take(self) -> Chunk | Scores | None:
        """Remove the next message: the prompt's first, then frames, choices in turn; None when nothing waits."""
        if self._scores:
            return self._cut_scores()
        if self._scored < self._to_score:
            return None
        for step in range(len(self._choices)):
            choice = (self._turn + step) % len(self._choices)
            if self._choices[choice].tokens:
                self._turn = choice + 1
                return self._cut(choice)
        return None

    def _cut_scores(self) -> Scores:
        most = min(MAX_FRAME_TOKENS, MAX_SCORE_VALUES // (len(self._scores[0].top) + 1)) or 1
        scores = Scores(offset=self._scored, entries=tuple(self._scores[:most]))
        del self._scores[:most]
        self._scored += len(scores.entries)
        return scores

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
        return bool(self._scores) or any(waiting.tokens for waiting in self._choices)
