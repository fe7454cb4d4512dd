"""A model folder's vocabulary: text -> ids, and what each id stands for in bytes.

Only byte-level vocabularies are served: there every id is a fixed run of bytes, so that incremental decoding is exact and
needs no window of earlier tokens. Another decoder is refused at start, with its name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from services.gateway.shield import ControlTokens, Segment


class ModelFolderError(ValueError):
    """A model folder cannot be served; the message says which file and why."""


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level vocabularies (GPT-2's table), inverted."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return table


_ALPHABET: Final = _byte_alphabet()


class Vocabulary:
    """Encodes segments of a prompt and knows every token's bytes. Safe to use from several threads."""

    def __init__(self, spec: dict[str, Any], *, size: int) -> None:
        """`spec` is the content of a tokenizer.json; `size` the model's vocabulary (ids in 0..size-1)."""
        added = spec.get("added_tokens") or []
        _check(spec, added)
        self.size: Final = size
        self.control: Final = ControlTokens({token["content"]: token["id"] for token in added})
        self.special_ids: Final = frozenset(token["id"] for token in added if token["special"])
        self.control_text: Final[dict[int, str]] = {token["id"]: token["content"] for token in added}
        # Without its added tokens the tokenizer knows no control token, whatever a text spells.
        self._plain = Tokenizer.from_str(
            json.dumps({**spec, "added_tokens": [], "truncation": None, "padding": None})
        )
        self._bytes = _token_bytes(spec["model"]["vocab"], self.control_text, size)
        self.longest: Final = max(map(len, self._bytes), default=1) or 1
        """Bytes of the longest token: no text of n bytes has fewer than n / longest tokens."""

    @classmethod
    def load(cls, file: Path, *, size: int) -> Vocabulary:
        """Read a tokenizer.json. Raises ModelFolderError."""
        try:
            spec = json.loads(file.read_text(encoding="utf-8"))
            return cls(spec, size=size)
        except (OSError, ValueError, KeyError) as error:
            raise ModelFolderError(f"{file}: {error}") from error

    def encode(self, segments: Sequence[Segment]) -> list[int]:
        """Ids of a rendered prompt: control tokens as their ids, the rest as plain text."""
        ids: list[int] = []
        for segment in segments:
            if segment.token is not None:
                ids.append(segment.token)
            else:
                ids.extend(self._plain.encode(segment.text, add_special_tokens=False).ids)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; b"" for an id that no token has."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""


def _check(spec: dict[str, Any], added: list[dict[str, Any]]) -> None:
    for token in added:
        for flag in ("lstrip", "rstrip", "single_word"):
            if token.get(flag):
                raise ValueError(f"added token {token['content']!r} with {flag} is not supported")
    decoder = spec.get("decoder") or {}
    kinds = [part["type"] for part in decoder.get("decoders", [decoder]) if "type" in part]
    if "ByteLevel" not in kinds:
        raise ValueError(f"only byte-level vocabularies are supported, not {kinds or 'none'}")


def _token_bytes(vocab: dict[str, int], control: dict[int, str], size: int) -> tuple[bytes, ...]:
    table = [b""] * size
    for text, token in vocab.items():
        if token < size:
            known = all(character in _ALPHABET for character in text)
            table[token] = bytes(_ALPHABET[character] for character in text) if known else text.encode()
    for token, text in control.items():
        if token < size:
            table[token] = text.encode()
    return tuple(table)
