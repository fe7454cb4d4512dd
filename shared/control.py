"""Which added tokens of a tokenizer.json mark a place, and which are pieces of text that callers may write: one answer for all
who read such a file. The gateway looks for control tokens in no caller's text, and a grammar lets none into a string.

    byte-level vocabularies   whatever was added marks a place, special or not
    all others                so does what is special, what the vocabulary has not by itself, and the marks of a chat answer;
                              the rest is text, as Gemma's runs of newlines and its HTML tags are
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

THINK: Final = frozenset({"<think>", "</think>"})
"""The marks of a thinking block."""
BEGIN_CALL: Final = "<tool_call>"
END_CALL: Final = "</tool_call>"
TOOLS: Final = frozenset({BEGIN_CALL, END_CALL})
"""Those of a tool call."""

Added = list[Mapping[str, Any]]


def split_added(spec: Mapping[str, Any]) -> tuple[Added, Added]:
    """The added tokens of a tokenizer.json: pieces of text, and control tokens. Raises KeyError without a model."""
    base, bytewise = base_vocabulary(spec["model"]), is_byte_level(spec.get("decoder"))
    text: Added = []
    control: Added = []
    for token in spec.get("added_tokens") or []:
        known = token["content"] in base and token["content"] not in THINK | TOOLS
        (text if known and not token["special"] and not bytewise else control).append(token)
    return text, control


def base_vocabulary(model: Mapping[str, Any]) -> dict[str, int]:
    """Text -> id of the tokenizer's own vocabulary: a mapping, or for Unigram a list of (text, score)."""
    vocab = model["vocab"]
    if isinstance(vocab, Mapping):
        return dict(vocab)
    return {str(text): token for token, (text, _) in enumerate(vocab)}


def is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    """Whether every character of a token is a stand-in of one byte."""
    return decoder is not None and [kind for kind, _ in decoder_steps(decoder)] == ["ByteLevel"]


def decoder_steps(decoder: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(kind, step) of a decoder in order: of a Sequence its members, of any other the one that it is."""
    return [(str(part.get("type")), part) for part in decoder.get("decoders", [decoder])]
