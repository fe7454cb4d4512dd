"""Event ids are a function of the tokens: a reader goes on from any of them, whichever bursts bring the rest."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.answer import Answer
from services.gateway.chat_format import ChatFormat
from services.gateway.formats import Extras, Format
from services.gateway.keys import Mark, marks_of
from services.gateway.sse import EventNames
from services.gateway.text_format import TextFormat
from shared.protocol.messages import AnswerSheet, ChoiceEnd, SpecTelemetry, Terminal
from shared.protocol.stream import Emit
from tests.golden.protocol.examples import example
from tests.unit.services.gateway.line import MODEL, ids

PIECES = st.lists(
    st.sampled_from(
        [
            "Hello", " there.", " ❤️🐈", " 한국어", "\n\n", "<think>", "</think>", " STOP", "ST", "<|im_end|>",
            '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "<tool_call>broken</tool_call>", "<tool_call>",
        ]
    ),
    max_size=8,
)  # fmt: skip
Streams = list[list[int]]


def _sheet(*, chat: bool, choices: int) -> AnswerSheet:
    sheet = example(AnswerSheet)
    assert isinstance(sheet, AnswerSheet)
    sampling = msgspec.structs.replace(sheet.request.sampling, min_tokens=0)
    request = msgspec.structs.replace(sheet.request, choices=choices, sampling=sampling, top_logprobs=None)
    return msgspec.structs.replace(
        sheet, request=request, chat=chat, tools=True, thinking=False, stops=("STOP",), token_ids=True
    )


def _terminal(streams: Streams) -> Terminal:
    terminal = example(Terminal)
    assert isinstance(terminal, Terminal)
    ends = tuple(
        ChoiceEnd(
            choice=choice, finish="length", completion_tokens=len(tokens), emitted_tokens=len(tokens), stop_id=None,
            spec=SpecTelemetry(rounds=1, drafted=0, accepted=0),
        )
        for choice, tokens in enumerate(streams)
    )  # fmt: skip
    return msgspec.structs.replace(terminal, ends=ends, failure=None, cancel_reason=None)


def _events(
    sheet: AnswerSheet, streams: Streams, sizes: list[int], seen: dict[int, Mark] | None
) -> list[tuple[str, dict[str, Any]]]:
    """(id, choice element) of a telling whose bursts have `sizes`, again and again; the choices take turns."""
    cuts = {choice: token for choice, (token, _) in (seen or {}).items()}
    answer = Answer(sheet, MODEL, cuts=cuts)
    extras = Extras(trace_id="t", route="r", usage_chunk=False, token_ids=True)
    form: Format = (ChatFormat if sheet.chat else TextFormat)(answer, MODEL.vocabulary, extras)
    names, updates = EventNames(seen), []
    begins, turn = [0] * len(streams), 0
    while any(begin < len(tokens) for begin, tokens in zip(begins, streams, strict=True)):
        choice, size = turn % len(streams), sizes[turn % len(sizes)]
        burst = streams[choice][begins[choice] : begins[choice] + size]
        if burst:
            updates += answer.take(
                Emit(choice=choice, offset=begins[choice], tokens=tuple(burst), logprobs=None)
            )
        begins[choice] += len(burst)
        turn += 1
    updates += answer.end(_terminal(streams))
    found = []
    for update in updates:
        for element in form.chunks(update):
            opens = "role" in element.get("delta", ())
            name = names.name(update.choice, 0 if opens else update.position)
            if name is not None:
                found.append((name, element))
    return found


def _told(events: list[tuple[str, dict[str, Any]]]) -> dict[int, Any]:
    """What a reader has of each choice in the end: its text of every kind, calls, token ids, finish and roles."""
    found: dict[int, Any] = {}
    for _, element in events:
        mine = found.setdefault(
            element["index"], {"text": "", "thought": "", "calls": [], "ids": [], "ends": [], "roles": 0}
        )
        delta = element.get("delta", {})
        mine["text"] += element.get("text", "") + (delta.get("content") or "")
        mine["thought"] += delta.get("reasoning_content", "")
        mine["calls"] += delta.get("tool_calls", [])
        mine["ids"] += element.get("token_ids", [])
        mine["ends"] += [element["finish_reason"]] if element["finish_reason"] else []
        mine["roles"] += "role" in delta
    return found


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(PIECES, min_size=1, max_size=2),
    chat=st.booleans(),
    first=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    second=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    data=st.data(),
)
def test_c2_a_reader_goes_on_from_any_event_whatever_the_bursts_are(
    texts: list[list[str]], chat: bool, first: list[int], second: list[int], data: st.DataObject
) -> None:
    streams = [ids("".join(pieces)) for pieces in texts]
    sheet = _sheet(chat=chat, choices=len(streams))
    whole = _events(sheet, streams, first, None)
    assert len({name for name, _ in whole}) == len(whole)
    cut = data.draw(st.integers(1, len(whole)), label="events that the reader has")
    rest = _events(sheet, streams, second, marks_of(whole[cut - 1][0]))
    assert _told([*whole[:cut], *rest]) == _told(whole)
