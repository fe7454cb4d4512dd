"""Tokens of one stream -> text, a token at a time, and exact.

The concatenation of everything `feed` and `finish` return equals the decoding of all tokens at once, wherever the bursts
were cut: bytes of an unfinished character wait for the next token, and become U+FFFD only when it can no longer be
finished. Some vocabularies take spaces from the beginning of a text; a continuation has none.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set
from typing import Final

import msgspec

from services.gateway.vocabulary import Vocabulary


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one token adds: text, then perhaps a marker (a control token that the parser must see)."""

    text: str
    marker: str | None


class Opening:
    """The bytes of tokens in their order, without what the vocabulary takes from the beginning of a whole text."""

    def __init__(self, vocabulary: Vocabulary, *, begins: bool) -> None:
        self._vocabulary: Final = vocabulary
        self._first = begins
        self._spaces = vocabulary.spelling.leading_spaces if begins else 0

    @property
    def over(self) -> bool:
        """Whether nothing more is taken: a token adds its own bytes from now on."""
        return not (self._first or self._spaces)

    def data(self, token: int) -> bytes:
        """What the next token adds."""
        if self._first:
            self._first, data = False, self._vocabulary.first_bytes(token)
        else:
            data = self._vocabulary.token_bytes(token)
        if not self._spaces:
            return data
        dropped = min(len(data) - len(data.lstrip(b" ")), self._spaces)
        self._spaces = self._spaces - dropped if dropped == len(data) else 0  # what shows ends the beginning
        return data[dropped:]


class Detokenizer:
    """Special tokens (end of turn, …) are skipped; control tokens in `markers` come out as markers, others as text."""

    def __init__(
        self, vocabulary: Vocabulary, *, markers: Set[str] = frozenset(), begins: bool = True
    ) -> None:
        """`begins`: the tokens are a text of their own, not the continuation of one."""
        self._vocabulary: Final = vocabulary
        self._opening: Final = Opening(vocabulary, begins=begins)
        self._markers: Final = markers
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished character wait."""
        return bool(self._decoder.getstate()[0])

    def feed(self, token: int) -> Piece:
        """The text that `token` finishes."""
        control = self._vocabulary.control_text.get(token)
        if control is not None and control in self._markers:
            return Piece(text=self.finish(), marker=control)
        if token in self._vocabulary.special_ids:
            return Piece(text="", marker=None)
        return Piece(text=self._decoder.decode(self._opening.data(token)), marker=None)

    def texts(self, tokens: Sequence[int]) -> list[tuple[str, bool]]:
        """The text that each of `tokens` finishes, and whether bytes wait after it, up to the first that may be no text."""
        vocabulary, opening, waits = self._vocabulary, self._opening, self.pending
        found: list[tuple[str, bool]] = []
        for token in tokens:
            if token in vocabulary.apart:
                break
            data = vocabulary.token_bytes(token) if opening.over else opening.data(token)
            if waits or not data.isascii():
                text = self._decoder.decode(data)
                waits = self.pending
            else:  # most are, and no decoder is asked
                text = data.decode("ascii")
            found.append((text, waits))
        return found

    def finish(self) -> str:
        """What was held back, at the end of the stream."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
