"""A conversation that asks for `reuse: "decode"`, over REST: each turn goes on from what the turn before decoded."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from services.demo.client import Chat
from services.demo.script import INSTRUCTIONS, QUESTIONS, Message
from services.embedded.waiting import until
from shared.config import POCKET
from shared.telemetry import TRACES_FILE
from shared.tracestore import TraceStore
from tests.e2e.conftest import Line

TURNS = ("Burstline keeps what it has computed. " * 6, " And then a second turn of the talk", " goes on.")


def converse(line: Line, **how: Any) -> list[dict[str, Any]]:
    """Three turns of token ids, each prompt the one before with its answer and a few words more."""
    tokenizer = Tokenizer.from_file(str(POCKET / "tokenizer.json"))
    prompt: list[int] = []
    answers = []
    with line.client() as client:
        for words in TURNS:
            prompt += tokenizer.encode(words, add_special_tokens=False).ids
            asked = {
                "model": "pocket",
                "prompt": prompt,
                "max_tokens": 20,
                "temperature": 0.8,
                "seed": 5,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            response = client.post("/v1/completions", json=asked | how)
            assert response.status_code == 200, response.text
            answer = response.json()
            answers.append(answer)
            prompt = [*prompt, *answer["choices"][0]["token_ids"]]
    return answers


def said(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["choices"][0]["token_ids"] for answer in answers]


def traced(line: Line, trace_id: str) -> set[object]:
    """What the spans of a trace that are stored by now say of its reuse; a worker stores them after its answer."""
    store = TraceStore(line.folder / TRACES_FILE)
    return {span.attributes.get("burstline.reuse") for span in store.read(trace_id)}


def test_c1_3_turns_go_on_from_what_was_decoded_and_the_answer_names_it(line: Line) -> None:
    answers = converse(line, reuse="decode", cache_salt="one")
    first, *later = answers
    assert (first["burstline"]["reuse"], first["burstline"]["exact"]) == ("exact", True)
    for before, answer in zip(answers, later, strict=False):
        told, usage = answer["burstline"], answer["usage"]
        assert (told["reuse"], told["exact"], told["cache_decision"]) == ("decode", False, "decode")
        whole = before["usage"]["prompt_tokens"] + before["usage"]["completion_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == whole
        assert until(lambda trace=told["trace_id"]: "decode" in traced(line, trace), timeout_s=60)
    again = converse(line, reuse="decode", cache_salt="two", speculation={"drafter": "none"})
    assert said(again) == said(answers), "the same history, the same stream, with no drafter"
    assert again[2]["burstline"]["reuse"] == "decode"


def test_c1_3_who_does_not_ask_is_served_exactly(line: Line) -> None:
    converse(line, reuse="decode", cache_salt="three")
    plain = converse(line, cache_salt="three")
    assert {answer["burstline"]["reuse"] for answer in plain} == {"exact"}
    assert {answer["burstline"]["exact"] for answer in plain} == {True}
    assert said(plain) == said(converse(line, cache=False))


def test_c1_3_a_chat_goes_on_from_its_answers_as_the_template_tells_them_again(line: Line) -> None:
    chat = Chat(line.info.gateway_url, line.key)
    messages: list[Message] = [{"role": "system", "content": INSTRUCTIONS}]
    answers = []
    for question in QUESTIONS[:2]:
        messages.append({"role": "user", "content": question})
        asked = {"model": "pocket", "messages": messages, "temperature": 0, "max_tokens": 48}
        answers.append(chat.ask(asked | {"reuse": "decode", "cache_salt": "chat"}))
        messages.append(answers[-1].message())
    chat.close()
    first, second = answers
    assert first.finish_reason == "stop", (
        "an end of its own: the token that ended it is told again by the template"
    )
    assert second.details["reuse"] == "decode"
    assert second.cached_tokens == first.prompt_tokens + first.completion_tokens - 1
