"""Every kind of vocabulary: what streams is the library's decoding of all, and prompts are encoded as the library does."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.gateway.detokenize import Detokenizer
from services.gateway.shield import Segment
from services.gateway.vocabulary import Vocabulary
from tests.unit.services.gateway.vocabularies import LETTERS, SPECIAL, SPECS, library, size

KINDS = sorted(SPECS)
some = settings(deadline=None, max_examples=60)
texts = st.one_of(
    st.text(LETTERS, max_size=20),
    st.text(max_size=8),
    st.lists(
        st.sampled_from(["the", " then", " hello", "  low", "é", "日本", "🐟", "\n\n", "<b>", " ", ""]),
        max_size=6,
    ).map("".join),
)
marked = st.lists(st.one_of(texts, st.sampled_from(SPECIAL)), max_size=6).map("".join)


@cache
def vocabulary(kind: str) -> Vocabulary:
    return Vocabulary(SPECS[kind], size=size(kind))


def streamed(kind: str, tokens: list[int], *, begins: bool = True) -> str:
    detokenizer = Detokenizer(vocabulary(kind), begins=begins)
    return "".join(detokenizer.feed(token).text for token in tokens) + detokenizer.finish()


def _answers(kind: str) -> st.SearchStrategy[list[int]]:
    """Tokens in any order; bytes of fallback only as whole characters, since their spoilt runs are shown our own way."""
    vocab: Tokenizer = library(kind)
    spoken = [token for token in range(size(kind)) if not str(vocab.id_to_token(token)).startswith("<0x")]
    one = st.sampled_from(spoken).map(lambda token: [token])
    if vocab.token_to_id("<0x00>") is not None:
        ids = st.characters(codec="utf-8").map(
            lambda letter: [vocab.token_to_id(f"<0x{byte:02X}>") for byte in letter.encode()]
        )
        one = st.one_of(one, ids)
    return st.lists(one, max_size=20).map(lambda parts: [token for part in parts for token in part])


@pytest.mark.parametrize("kind", KINDS)
@some
@given(data=st.data())
def test_fr_30_fr_32_what_streams_joins_to_the_librarys_decoding(kind: str, data: st.DataObject) -> None:
    """Special tokens are hidden, the beginning loses what the decoder takes, and no character comes apart."""
    tokens = data.draw(_answers(kind))
    assert streamed(kind, tokens) == library(kind).decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@some
@given(text=marked)
def test_prompts_are_encoded_as_the_library_does(kind: str, text: str) -> None:
    ours = vocabulary(kind).encode(vocabulary(kind).control.split(text))
    assert ours == library(kind).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@some
@given(text=marked, begins=st.booleans())
def test_a_callers_text_never_becomes_a_control_token(kind: str, text: str, begins: bool) -> None:
    ids = vocabulary(kind).encode([Segment(text=text, token=None)], begins=begins)
    unknown = {0} if kind == "metaspace" else set()  # what Unigram has no piece for
    assert not (set(ids) - unknown) & vocabulary(kind).control_text.keys()


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"metaspace"}))
@some
@given(text=texts)
def test_fr_32_good_text_streams_without_replacement_characters(kind: str, text: str) -> None:
    tokens = library(kind).encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(vocabulary(kind))
    pieces = [detokenizer.feed(token).text for token in tokens] + [detokenizer.finish()]
    whole = library(kind).decode(tokens)
    assert "".join(pieces) == whole
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    "kind", sorted({*KINDS} - {"qwen", "llama-3"})
)  # whose tokens are parts of characters
@some
@given(data=st.data())
def test_a_continuation_keeps_its_first_space(kind: str, data: st.DataObject) -> None:
    """Of a raw prompt: the two texts join to that of all tokens together."""
    before, after = data.draw(_answers(kind)), data.draw(_answers(kind))
    first = library(kind).token_to_id("the") or library(kind).token_to_id("h")
    whole = library(kind).decode([first, *before, *after])
    assert streamed(kind, [first, *before]) + streamed(kind, after, begins=False) == whole


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in ("llama-2", "mistral", "gemma")])
@some
@given(data=st.data())
def test_spoilt_bytes_show_one_sign_an_ill_formed_part(kind: str, data: st.DataObject) -> None:
    raw = data.draw(st.binary(max_size=8))
    tokens = [library(kind).token_to_id(f"<0x{byte:02X}>") for byte in raw]
    assert streamed(kind, tokens, begins=False) == raw.decode("utf-8", "replace")
