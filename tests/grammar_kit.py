"""A vocabulary of bytes for models of 512 ids, and grammars over it: an end, every byte, and some longer tokens."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from services.gpu_worker.engine.grammar import Grammar
from shared.grammar import compile_grammar, read_tokens

VOCAB = 512
END = 0
MERGED = ('{"', '":', '",', '"a', '"b', "tr", "ue", "12", "true", "]}", '"}', "ab")


@cache
def letters() -> dict[int, str]:
    """Byte -> the letter that byte-level vocabularies write for it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    found = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in found]
    return found | {byte: chr(256 + place) for place, byte in enumerate(others)}


@cache
def tokens() -> LLTokenizer:
    """The vocabulary as grammars are walked over it."""
    names = [letters()[byte] for byte in range(256)] + list(MERGED)
    merges = [["{", '"'], ['"', ":"], ['"', ","], ['"', "a"], ['"', "b"], ["t", "r"], ["u", "e"], ["1", "2"]]
    merges += [["tr", "ue"], ["]", "}"], ['"', "}"], ["a", "b"]]
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": END, "content": "<|end|>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False},
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {"<|end|>": END} | {name: place + 1 for place, name in enumerate(names)},
            "merges": merges,
        },
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(json.dumps(spec))
        return read_tokens(Path(folder), VOCAB)


def text_of(ids: Sequence[int]) -> str:
    """What the ids spell."""
    names = [bytes([byte]) for byte in range(256)] + [merged.encode() for merged in MERGED]
    return b"".join(names[token - 1] for token in ids).decode()


def grammar(source: str) -> Grammar:
    """A grammar over the vocabulary."""
    return Grammar(compile_grammar(source, tokens()), tokens().eos_tokens)


def of_schema(schema: dict[str, Any]) -> Grammar:
    """A JSON value of a schema, without spaces."""
    return grammar("start: %json " + json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}}))
