"""Small vocabularies of the kinds that public models have, as their tokenizer.json files tell them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from tokenizers import Tokenizer

MARK: Final = "▁"
SPECIAL: Final = ("<unk>", "<s>", "</s>", "<|turn|>")
WORDS: Final = ("the", "then", "hello", "low", "é", "日本")
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz .,\nTHé日本<>|/sunk_0x9A"


def added(token: int, text: str, *, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, **flags, "special": special}


def _spec(model: dict[str, Any], extra: tuple[dict[str, Any], ...] = (), **parts: Any) -> dict[str, Any]:
    base = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    return {
        "version": "1.0", "truncation": None, "padding": None, **base, **parts,
        "added_tokens": [*(added(token, text) for token, text in enumerate(SPECIAL)), *extra], "model": model,
    }  # fmt: skip


def _grown(alphabet: list[str], words: list[str]) -> tuple[list[str], list[list[str]]]:
    """Every word from its letters, left to right: tokens in order, and merges."""
    tokens, merges = list(dict.fromkeys(alphabet)), []
    for word in words:
        for end in range(2, len(word) + 1):
            merge = [word[: end - 1], word[end - 1]]
            if merge not in merges:
                merges.append(merge)
                tokens.append(word[:end])
    return list(dict.fromkeys(tokens)), merges


def _bpe(tokens: list[str], merges: list[list[str]], **more: Any) -> dict[str, Any]:
    vocab = {text: token for token, text in enumerate(dict.fromkeys([*SPECIAL, *tokens]))}
    plain = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    return {"type": "BPE", **plain, **flags, **more, "vocab": vocab, "merges": merges}


_BYTE_LEVEL: Final = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
_CUT: Final = {
    "type": "Split",
    "pattern": {"Regex": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"},
    "behavior": "Isolated",
    "invert": False,
}
_OPENING: Final = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}


def _bytes_as_letters(text: str) -> str:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + place) for place, byte in enumerate(b for b in range(256) if b not in table)}
    return "".join(table[byte] for byte in text.encode())


def _byte_level(*, ignore_merges: bool, **parts: Any) -> dict[str, Any]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + place) for place in range(256 - len(printable))]
    grown = _grown(alphabet, [_bytes_as_letters(word) for word in (*WORDS, *(f" {word}" for word in WORDS))])
    cut = {"type": "Sequence", "pretokenizers": [_CUT, _BYTE_LEVEL]}
    return _spec(_bpe(*grown, ignore_merges=ignore_merges), pre_tokenizer=cut, decoder=_BYTE_LEVEL, **parts)


def _pieces(*, normalizer: Any, decoder: Any, pre: Any = None, extra: tuple[str, ...] = ()) -> dict[str, Any]:
    """Sentencepiece's BPE: a mark for spaces, bytes for what has no token."""
    letters = [letter for letter in dict.fromkeys(LETTERS) if letter not in " \né日本"]
    words = [f"{mark}{word}" for word in WORDS for mark in ("", MARK)]
    tokens, merges = _grown([MARK, *letters, "é", "日", "本"], words)
    tokens += [text for text in extra if text not in tokens]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    model = _bpe(tokens, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    known = tuple(added(model["vocab"][text], text, special=False) for text in extra)
    return _spec(
        model, known, normalizer=normalizer, pre_tokenizer=pre, decoder=decoder, post_processor=_OPENING
    )


_SPACES: Final = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
_BACK: Final = {"type": "Replace", "pattern": {"String": MARK}, "content": " "}
_STRIP: Final = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _decoder(*more: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": [_BACK, {"type": "ByteFallback"}, {"type": "Fuse"}, *more]}


def _metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": scheme == "always"}


def _unigram() -> dict[str, Any]:
    pieces = [(MARK, -3.0), *((letter, -6.0) for letter in dict.fromkeys(LETTERS) if letter not in " \n")]
    pieces += [(f"{mark}{word}", -4.0) for word in WORDS[:4] for mark in ("", MARK)]
    vocab = [[text, 0.0] for text in SPECIAL] + [list(piece) for piece in pieces]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False}
    return _spec(model, pre_tokenizer=_metaspace("always"), decoder=_metaspace("always"))


SPECS: Final[dict[str, dict[str, Any]]] = {
    "qwen": _byte_level(ignore_merges=False, normalizer={"type": "NFC"}),
    "llama-3": _byte_level(
        ignore_merges=True,
        post_processor={"type": "Sequence", "processors": [_BYTE_LEVEL, _OPENING]},
    ),
    "llama-2": _pieces(
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, _SPACES]},
        decoder=_decoder(_STRIP),
    ),
    "mistral": _pieces(normalizer=None, pre=_metaspace("first"), decoder=_decoder(_STRIP)),
    "gemma": _pieces(
        normalizer=_SPACES,
        pre={"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        decoder=_decoder(),
        extra=("\n", "\n\n", "<b>"),
    ),
    "metaspace": _unigram(),
}


def size(name: str) -> int:
    """Ids of a kind."""
    return len(SPECS[name]["model"]["vocab"])


@cache
def library(name: str) -> Tokenizer:
    """The library's own reading of it."""
    return Tokenizer.from_str(json.dumps(SPECS[name]))
