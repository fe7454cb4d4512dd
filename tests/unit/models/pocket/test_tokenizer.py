"""The tokenizer round-trips any text, splits digits, and keeps its special tokens where config.json expects them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

FOLDER = Path(__file__).parents[4] / "models" / "pocket"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
CONFIG = json.loads((FOLDER / "config.json").read_text())


def round_trip(text: str) -> str:
    return TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "text",
    ["", "Hello, world", " two  spaces ", "tabs\tand\r\nlines\n\n", "漢字かな交じり文", "한국어", "🎉👩‍👩‍👧‍👦🇪🇺", "naïve café ﬁ", "e\u0301 is not é",
     '{"a": [1, 2.5, null]}\n', "x = y**2 # ∑∞", "\u0000\uffff\u2028"],
)  # fmt: skip
def test_round_trip(text: str) -> None:
    assert round_trip(text) == text


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=80))
def test_round_trip_of_any_text(text: str) -> None:
    assert round_trip(text) == text


@given(st.integers(min_value=0, max_value=10**12))
@settings(deadline=None, max_examples=30)
def test_digits_are_single_tokens(number: int) -> None:
    assert TOKENIZER.encode(str(number)).tokens == list(str(number))


def test_ids_fill_the_vocabulary_exactly() -> None:
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(CONFIG["vocab_size"]))


def test_control_tokens_are_special_and_marks_are_visible() -> None:
    text = "<|im_start|>assistant\n<tool_call>\n{}\n</tool_call><|im_end|>"
    encoding = TOKENIZER.encode(text)
    assert TOKENIZER.decode(encoding.ids) == "assistant\n<tool_call>\n{}\n</tool_call>"
    for name in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"):
        assert TOKENIZER.encode(name).ids == [TOKENIZER.token_to_id(name)]


def test_end_and_pad_tokens_agree_with_the_configs() -> None:
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    settings_ = json.loads((FOLDER / "tokenizer_config.json").read_text())
    assert (
        TOKENIZER.token_to_id(settings_["eos_token"])
        == CONFIG["eos_token_id"]
        == generation["eos_token_id"][0]
    )
    assert TOKENIZER.token_to_id(settings_["pad_token"]) == CONFIG["pad_token_id"]
