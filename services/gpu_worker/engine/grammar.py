"""What a stream's grammar allows next: a mask over the vocabulary, from the tokens that the completion has by then.

`Grammar` is compiled once and shared; `GrammarState` walks one stream through it. The state follows the history lazily: tokens
are noted when they are decided, or tried by a drafter and taken back, and walked when somebody asks for a mask. So row i of a
verify is masked by what the grammar allows after the committed tokens and the first i drafts, and a stream that is begun
again, on this worker or another, comes to the same masks by walking the same tokens.

    stop ids   may come where the grammar is complete, and nowhere else, unless the grammar has them as text
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shared.errors import EngineFault

Allowed: TypeAlias = NDArray[np.bool_]


class Matcher(Protocol):
    """The part of llguidance's LLMatcher that is used."""

    def deep_copy(self) -> Matcher: ...
    def compute_bitmask(self) -> bytes: ...
    def try_consume_tokens(self, tokens: list[int]) -> int: ...
    def rollback(self, num_tokens: int) -> bool: ...
    def is_accepting(self) -> bool: ...
    def is_error(self) -> bool: ...


class Grammar:
    """A compiled grammar, shared by the streams that follow it. Belongs to the engine's thread once it is submitted."""

    def __init__(self, matcher: Matcher, ends: Iterable[int]) -> None:
        """`matcher` stands before the first token; `ends` are the ids that it takes for an end by itself."""
        self._matcher = matcher
        self._ends = sorted(ends)

    def begin(self, vocab: int, stop_ids: Iterable[int]) -> GrammarState:
        """A stream before its first completion token."""
        return GrammarState(self._matcher.deep_copy(), vocab, self._ends, stop_ids)


class GrammarState:
    """Where one stream stands in its grammar."""

    def __init__(self, matcher: Matcher, vocab: int, ends: Iterable[int], stop_ids: Iterable[int]) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._ends = [end for end in ends if end < vocab]
        self._stops = frozenset(stop_ids)
        self._stop_ids = sorted(self._stops)
        self._history: list[int] = []
        self._walked = 0  # tokens of the history that the matcher has seen

    def record(self, token: int) -> None:
        """The completion has one more token."""
        self._history.append(token)

    def forget(self) -> None:
        """The newest token was only tried. Raises EngineFault when the matcher cannot go back."""
        self._history.pop()
        back = self._walked - len(self._history)
        if back > 0:
            if not self._matcher.rollback(back):
                raise EngineFault("a grammar cannot go back", code="grammar_fault")
            self._walked -= back

    def allowed(self) -> Allowed:
        """Which ids [V] may come next. Raises EngineFault when the history is none of the grammar's, or the grammar takes more
        work than one step may (`shared.grammar.LIMITS`)."""
        if not self._walk():
            return self._only_stops()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise EngineFault("a step of the grammar takes too much work", code="grammar_fault")
        mask = np.unpackbits(bits, bitorder="little")[: self._vocab].astype(np.bool_)
        allowed = np.zeros(self._vocab, dtype=np.bool_)
        allowed[: len(mask)] = mask
        allowed[self._ends] = False
        if self._matcher.is_accepting():
            allowed[self._stop_ids] = True
        return allowed

    def _walk(self) -> bool:
        """Bring the matcher up to the history; false where a stop id ended it, as a drafter's look ahead may."""
        for token in self._history[self._walked :]:
            if token in self._stops:
                return False
            if self._matcher.try_consume_tokens([token]) != 1:
                raise EngineFault("a token of the completion breaks its grammar", code="grammar_fault")
            self._walked += 1
        return True

    def _only_stops(self) -> Allowed:
        allowed = np.zeros(self._vocab, dtype=np.bool_)
        allowed[self._stop_ids] = True
        return allowed
