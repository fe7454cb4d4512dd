"""Control tokens: the gateway's vocabulary and the one that grammars are walked over part them alike, whatever kind it is."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from services.gateway.vocabulary import Vocabulary
from shared.grammar import compile_grammar, read_tokens
from tests.unit.services.gateway.vocabularies import SPECS, added

SIZE = 1000
NEW = 900
"""The first id that no vocabulary of these has."""
FOUND, MARK = "low", "</think>"
PIECES = {FOUND, "~", "\n", "\n\n", "<b>"}
"""Of text, where a vocabulary has them by itself and is not byte-level."""


def with_added(name: str, decoder: str | None = None, piece: str = FOUND) -> dict[str, Any]:
    """A kind with more added tokens: a piece that it has by itself, a mark of a chat answer that it has too, one that is new and
    special, and one that is new and not."""
    spec = copy.deepcopy(SPECS[name])
    vocab = spec["model"]["vocab"]
    if isinstance(vocab, dict):
        vocab[MARK] = len(vocab)
        place = vocab[piece]
    else:
        vocab.append([MARK, -9.0])
        place = [text for text, _ in vocab].index(piece)
    spec["added_tokens"] += [
        added(place, piece, special=False),
        added(len(vocab) - 1, MARK, special=False),
        added(NEW, "<|new|>"),
        added(NEW + 1, "<new>", special=False),
    ]
    if decoder is not None:
        spec["decoder"] = SPECS[decoder]["decoder"]
    return spec


KINDS = {
    "byte-level": with_added("qwen"),
    "byte-level, whole words": with_added("llama-3", piece="~"),
    "sentencepiece": with_added("llama-2"),
    "sentencepiece with pieces of text": with_added("gemma"),
    "metaspace before, bytes back": with_added("mistral"),
    "unigram": with_added("metaspace", decoder="gemma"),
}


def walked(spec: dict[str, Any], folder: Path) -> LLTokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return read_tokens(folder, SIZE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_grammar_and_the_gateway_know_the_same_control_tokens(kind: str, tmp_path: Path) -> None:
    spec = KINDS[kind]
    vocabulary, tokens = Vocabulary(spec, size=SIZE), walked(spec, tmp_path)
    special = {
        token["content"]: token["id"]
        for token in spec["added_tokens"]
        if tokens.is_special_token(token["id"])
    }
    assert special == vocabulary.control.ids
    assert special.keys() >= {MARK, "<|new|>", "<new>"}
    assert bool(special.keys() & PIECES) is kind.startswith("byte-level")


@pytest.mark.parametrize("kind", KINDS)
def test_a_string_of_a_grammar_may_hold_pieces_of_text_and_no_control_token(
    kind: str, tmp_path: Path
) -> None:
    spec = KINDS[kind]
    tokens = walked(spec, tmp_path)
    for token in spec["added_tokens"]:
        text = token["content"] in PIECES and not kind.startswith("byte-level")
        matcher = compile_grammar("start: /(.|\\n)+/", tokens)
        assert (matcher.try_consume_tokens([token["id"]]) == 1) is text, token
