"""A prompt that its answer begins with: its text, where each token stands in it, and what the tokens are worth.

The text is the bytes of all its tokens, control tokens included: the whole prompt was the caller's, but for the opening that
the vocabulary puts before a text, which has none. It ends by itself, so a
character that the prompt left unfinished is U+FFFD there, and the completion is the same with an echo and without.

Pure. A scored prompt goes out in pieces of a fixed number of tokens, as their log probabilities come: the same pieces
whichever messages brought them, so that a reader can come back between two.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.gateway.detokenize import Opening
from services.gateway.vocabulary import Vocabulary
from shared.protocol.messages import TokenLogprobs

PIECE_TOKENS: Final = 256


@dataclass(frozen=True, kw_only=True)
class PromptPiece:
    """Neighbouring prompt tokens. `offsets`: where each begins in the prompt's text, in characters. `scores`: one a token,
    None for the prompt's first; None altogether when nobody asked."""

    tokens: tuple[int, ...]
    text: str
    offsets: tuple[int, ...]
    scores: tuple[TokenLogprobs | None, ...] | None


class Echo:
    """State of one prompt on its way out."""

    def __init__(self, tokens: Sequence[int], vocabulary: Vocabulary, *, scored: bool) -> None:
        self._tokens: Final = tuple(tokens)
        self._scored: Final = scored
        self._scores: list[TokenLogprobs | None] = [None]
        self._told = 0
        self.text, self._offsets = _decoded(tokens, vocabulary)

    def begin(self) -> list[PromptPiece]:
        """What can be told at once: all of a prompt that is not scored, or whose only token has no score."""
        return self._ready() if self._scored else [self._piece(len(self._tokens))]

    def score(self, entries: Sequence[TokenLogprobs]) -> list[PromptPiece]:
        """Take the next entries; what can be told by now."""
        self._scores.extend(entries)
        return self._ready() if self._scored else []

    def _ready(self) -> list[PromptPiece]:
        pieces = []
        while self._told < len(self._tokens):
            end = min(self._told + PIECE_TOKENS, len(self._tokens))
            if len(self._scores) < end:
                break
            pieces.append(self._piece(end))
        return pieces

    def _piece(self, end: int) -> PromptPiece:
        begin, self._told = self._told, end
        until = self._offsets[end] if end < len(self._tokens) else len(self.text)
        return PromptPiece(
            tokens=self._tokens[begin:end],
            text=self.text[self._offsets[begin] : until],
            offsets=tuple(self._offsets[begin:end]),
            scores=tuple(self._scores[begin:end]) if self._scored else None,
        )


def _decoded(tokens: Sequence[int], vocabulary: Vocabulary) -> tuple[str, list[int]]:
    """The text of all tokens, and the characters that are decoded before each of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    opening, bare = Opening(vocabulary, begins=True), len(vocabulary.opening_ids)
    bare = bare if tuple(tokens[:bare]) == vocabulary.opening_ids else 0
    parts, offsets, seen = [], [], 0
    for place, token in enumerate(tokens):
        offsets.append(seen)
        parts.append(decoder.decode(opening.data(token) if place >= bare else b""))
        seen += len(parts[-1])
    parts.append(decoder.decode(b"", final=True))
    return "".join(parts), offsets
