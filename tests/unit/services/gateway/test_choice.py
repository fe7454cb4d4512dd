"""One choice: which tokens go with which text."""

from __future__ import annotations

import pytest

from services.gateway.choice import ChoiceText
from services.gateway.parsers.assistant import AssistantParser
from services.gateway.parsers.events import Content, Event, Reasoning
from shared.control import THINK
from tests.text_kit import feed
from tests.unit.services.gateway.line import MODEL, ids


def choice(*stops: str, min_tokens: int = 0, markers: frozenset[str] = frozenset()) -> ChoiceText:
    parser = AssistantParser(markers=markers)
    return ChoiceText(MODEL.vocabulary, stops=stops, min_tokens=min_tokens, parser=parser)


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


@pytest.mark.parametrize("count", range(8, 41))
def test_fr_26_what_is_delivered_is_what_was_generated(count: int) -> None:
    tokens = (ids("Pepe ❤️🐈 한국어 says hi. ") * 4)[:count]
    found = choice("never")
    feed(found, tokens[:5])
    feed(found, tokens[5:])
    found.finish()
    assert [item.token for item in found.take_delivered()] == tokens
    assert found.consumed == count


def test_fr_24_nothing_after_the_stop_is_shown() -> None:
    found = choice("STOP")
    assert text(feed(found, ids("one STOP two STOP three"))) == "one "
    assert feed(found, ids(" four")) == []
    assert found.finish() == []
    assert found.stop_offset == len(ids("one STOP"))


def test_fr_27_a_token_that_is_cut_by_the_stop_is_delivered() -> None:
    tokens = ids(" conversation")
    assert len(tokens) < len(" conversation")
    found = choice("sation")
    assert text(feed(found, tokens)) == " conver"
    delivered = found.take_delivered()
    assert delivered[-1].begin < len(" conver") <= delivered[-1].end


def test_min_tokens_keeps_stop_strings_from_counting_early() -> None:
    tokens = ids("one two one two")
    half = len(ids("one two"))
    found = choice("two", min_tokens=half)
    assert text(feed(found, tokens)) == "one two one "


def test_fr_29_hold_back_never_cuts_a_control_token() -> None:
    found = choice("\n\n\n\n", markers=THINK)
    events = feed(found, ids("<think>a\n\n"))
    events += feed(found, ids("</think>"))
    events += feed(found, ids("b"))
    assert events == [Reasoning(text="a"), Reasoning(text="\n\n"), Content(text="b")]


def test_a_stop_string_in_a_tool_call_shows_what_there_is() -> None:
    markers = frozenset({"<tool_call>", "</tool_call>"})
    found = choice("arguments", markers=markers)
    assert (
        text(feed(found, ids('<tool_call>{"name": "f", "arguments": {}}</tool_call>')))
        == '<tool_call>{"name": "f", "'
    )
