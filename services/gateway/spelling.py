"""What a tokenizer.json's decoder says that tokens stand for, as a fixed run of bytes a token.

    byte-level      GPT-2, Llama 3, Qwen, SmolLM2     every character of a token is a stand-in of one byte
    replace         Gemma, Mistral, Llama 2           a mark (▁) is a space; with byte fallback <0x0A> is the byte
    metaspace       converted sentencepiece           the same, and the first token of a text loses its marks

So decoding is incremental and exact, and needs no window of earlier tokens. Two decoders also take something from the
beginning of a whole text (Strip, Metaspace): that is told apart from the bytes, since a continuation has no beginning.

A run of fallback bytes that is no UTF-8 shows U+FFFD for each part that is ill-formed, as byte-level vocabularies do. (The
tokenizers library shows one for every byte of the whole run, its well-formed characters too; no stream can know in time that
a character which is complete will be followed by a wrong byte.) Any other decoder is refused at start, with its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from shared.control import decoder_steps, is_byte_level

_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """`leading_spaces`: so many a whole text loses at most. `mark`: a text's first token loses every one of it; "" = none."""

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    leading_spaces: int = 0
    mark: str = ""

    def data(self, text: str) -> bytes:
        """What the token of this text stands for."""
        if self.byte_level:
            known = all(character in _ALPHABET for character in text)
            return bytes(_ALPHABET[character] for character in text) if known else text.encode()
        if self.byte_fallback and (byte := _BYTE.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        for old, new in self.replacements:
            text = text.replace(old, new)
        return text.encode()

    def first(self, text: str) -> bytes:
        """The same where it is the first of a whole text; `leading_spaces` come off by themselves."""
        return self.data(text.replace(self.mark, "") if self.mark else text)


def spelling(decoder: Mapping[str, Any] | None) -> Spelling:
    """Of the `decoder` of a tokenizer.json. Raises ValueError naming what is not supported."""
    if not decoder:
        raise ValueError("a vocabulary without a decoder is not supported")
    if is_byte_level(decoder):
        return Spelling(byte_level=True)
    found, fused = Spelling(), False
    for kind, part in decoder_steps(decoder):
        if kind == "Strip" and not fused:
            raise ValueError("decoder Strip before Fuse is not supported")
        found = _step(found, kind, part)
        fused = fused or kind == "Fuse"
    return found


def _step(found: Spelling, kind: str, part: Mapping[str, Any]) -> Spelling:
    values = dict(found.__dict__)
    if kind == "Replace":
        old = part["pattern"].get("String")
        if not old:
            raise ValueError("decoder Replace of a regular expression is not supported")
        values["replacements"] += ((str(old), str(part["content"])),)
    elif kind == "Metaspace":
        mark = str(part["replacement"])
        values["replacements"] += ((mark, " "),)
        scheme = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never")
        values["mark"] = "" if scheme == "never" else mark
    elif kind == "ByteFallback":
        values["byte_fallback"] = True
    elif kind == "Strip":
        if part.get("content") != " " or part.get("stop"):
            raise ValueError("decoder Strip of anything but leading spaces is not supported")
        values["leading_spaces"] += int(part["start"])
    elif kind != "Fuse":
        raise ValueError(f"decoder {kind} is not supported")
    return Spelling(**values)
