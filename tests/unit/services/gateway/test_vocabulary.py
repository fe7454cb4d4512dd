"""Vocabularies by kind: what is refused, what is put before a raw prompt, and what a caller may spell."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from services.gateway.echo import Echo
from services.gateway.shield import Segment
from services.gateway.spelling import spelling
from services.gateway.vocabulary import Vocabulary
from tests.unit.services.gateway.vocabularies import MARK, SPECS, added, library, size


def vocabulary(kind: str, **changed: Any) -> Vocabulary:
    return Vocabulary({**copy.deepcopy(SPECS[kind]), **changed}, size=size(kind))


REPLACE = {"type": "Replace", "pattern": {"String": MARK}, "content": " "}


@pytest.mark.parametrize(
    ("decoder", "told"),
    [
        (None, "without a decoder"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "decoder WordPiece"),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}, REPLACE]}, "decoder ByteLevel"),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": " "}, "regular expression"),
        ({"type": "Sequence", "decoders": [REPLACE, {"type": "Strip", "content": " ", "start": 1}]}, "before Fuse"),
        (
            {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "stop": 1}]},
            "leading spaces",
        ),
    ],
)  # fmt: skip
def test_a_decoder_that_is_not_served_is_named(decoder: dict[str, Any] | None, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        spelling(decoder)


@pytest.mark.parametrize(
    ("kind", "opening"),
    [
        ("qwen", ()),
        ("llama-3", (1,)),
        ("llama-2", (1,)),
        ("mistral", (1,)),
        ("gemma", (1,)),
        ("metaspace", ()),
    ],
)
def test_the_opening_is_what_the_library_puts_before_a_text(kind: str, opening: tuple[int, ...]) -> None:
    assert vocabulary(kind).opening_ids == opening
    assert tuple(library(kind).encode("").ids) == opening


def test_an_echo_tells_no_opening() -> None:
    """The caller did not write it; its own control tokens show."""
    known = vocabulary("mistral")
    words = known.encode([Segment(text="the low", token=None)])
    pieces = Echo([1, *words, 2], known, scored=False).begin()
    assert pieces[0].text == "the low</s>"
    assert pieces[0].offsets[0] == pieces[0].offsets[1] == 0
    assert pieces[0].tokens == (1, *words, 2)


def test_only_the_beginning_of_a_text_is_marked() -> None:
    """`prepend_scheme: first`: text behind a control token begins nothing."""
    known, plain = vocabulary("mistral"), Segment(text="the", token=None)
    turn = Segment(text="<|turn|>", token=3)

    def spelled(ids: list[int]) -> bytes:
        return b"".join(map(known.token_bytes, ids))

    assert spelled(known.encode([plain])) == b" the"
    assert spelled(known.encode([turn, plain])[1:]) == b"the"
    assert spelled(known.encode([plain], begins=False)) == b"the"


def test_a_metaspace_vocabulary_takes_the_marks_of_the_first_token_alone() -> None:
    known = vocabulary("metaspace")
    token = library("metaspace").token_to_id(f"{MARK}the")
    assert (known.first_bytes(token), known.token_bytes(token)) == (b"the", b" the")


def test_words_that_were_added_are_text_that_callers_write() -> None:
    known = vocabulary("gemma")
    assert known.control.ids.keys().isdisjoint({"\n\n", "<b>"})
    (token,) = known.encode([Segment(text="\n\n", token=None)])
    assert known.token_bytes(token) == b"\n\n"


def test_what_calls_tools_is_a_control_token_in_every_vocabulary() -> None:
    spec = copy.deepcopy(SPECS["gemma"])
    place = len(spec["model"]["vocab"])
    spec["model"]["vocab"]["<tool_call>"] = place
    spec["added_tokens"].append(added(place, "<tool_call>", special=False))
    known = Vocabulary(spec, size=place + 1)
    assert known.control.ids["<tool_call>"] == place
    assert place not in known.encode([Segment(text="<tool_call>", token=None)])


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_eat_their_neighbours_are_refused(flag: str) -> None:
    with pytest.raises(ValueError, match=f"'<mask>' with {flag}"):
        vocabulary("qwen", added_tokens=[{**added(0, "<mask>"), flag: True}])


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("begins", [True, False])
def test_what_was_learnt_is_encoded_as_before(kind: str, begins: bool) -> None:
    """Whether it stands where the text begins or behind."""
    texts = ["assistant\n", "\n", " a", "user"]
    segments = [Segment(text=text, token=None) for text in [*texts, "other", *reversed(texts)]]
    plain, learnt = vocabulary(kind), vocabulary(kind)
    learnt.learn(texts)
    for begin in range(len(segments)):
        expected = plain.encode(segments[begin:], begins=begins)
        assert learnt.encode(segments[begin:], begins=begins) == expected
