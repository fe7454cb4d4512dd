"""Prompts that are told: `echo`, with and without log probabilities, and `prompt_logprobs` (R-Q20)."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.echo import PIECE_TOKENS, Echo, PromptPiece
from shared.protocol import codec
from shared.protocol.messages import AnswerSheet, TokenLogprobs, unpack_tokens
from tests.unit.services.gateway.line import MODEL, Line, Work, ids, says
from tests.unit.services.gateway.test_resume import told

PROMPT = "A burst is a run of rounds, naïvely 🙂 put."
ANSWER = "Hello there."


def entries(tokens: list[int]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token=token, logprob=-float(place), top=()) for place, token in enumerate(tokens[1:])
    ]


def joined(pieces: list[PromptPiece]) -> tuple[list[int], str, list[int]]:
    return (
        [token for piece in pieces for token in piece.tokens],
        "".join(piece.text for piece in pieces),
        [offset for piece in pieces for offset in piece.offsets],
    )


# ---- the echo alone ----------------------------------------------------------------------------------------------------


@given(
    tokens=st.lists(st.integers(0, MODEL.vocabulary.size - 1), min_size=1, max_size=700),
    cuts=st.lists(st.integers(1, 300), max_size=8),
)
@settings(deadline=None, max_examples=40)
def test_the_pieces_are_the_same_however_the_scores_came(tokens: list[int], cuts: list[int]) -> None:
    at_once = Echo(tokens, MODEL.vocabulary, scored=True)
    expected = [*at_once.begin(), *at_once.score(entries(tokens))]
    echo, scores = Echo(tokens, MODEL.vocabulary, scored=True), entries(tokens)
    pieces = echo.begin()
    for cut in [*cuts, len(scores)]:
        pieces += echo.score(scores[:cut])
        scores = scores[cut:]
    assert pieces == expected
    assert joined(pieces)[:2] == (tokens, echo.text)
    assert [len(piece.tokens) for piece in pieces[:-1]] == [PIECE_TOKENS] * (len(pieces) - 1)
    assert [score for piece in pieces for score in piece.scores or ()] == [None, *entries(tokens)]
    assert echo.text == b"".join(map(MODEL.vocabulary.token_bytes, tokens)).decode("utf-8", "replace")


def test_offsets_count_characters_and_the_first_of_a_piece_is_where_its_text_begins() -> None:
    tokens = ids(PROMPT * 40)
    echo = Echo(tokens, MODEL.vocabulary, scored=False)
    (whole,) = echo.begin()
    assert whole.text == echo.text == PROMPT * 40
    assert whole.scores is None
    scored = Echo(tokens, MODEL.vocabulary, scored=True)
    for piece in [*scored.begin(), *scored.score(entries(tokens))]:
        assert whole.text[piece.offsets[0] :].startswith(piece.text)
    for offset, token in zip(whole.offsets, tokens, strict=True):
        text = MODEL.vocabulary.token_bytes(token)
        if text.isascii():
            assert whole.text[offset:].startswith(text.decode())


def test_a_prompt_that_ends_inside_a_character_ends_by_itself() -> None:
    half = ids("🙂")[:1]
    assert Echo([*ids("so "), *half], MODEL.vocabulary, scored=False).text == "so \ufffd"


def test_a_prompt_of_one_token_has_nothing_to_wait_for() -> None:
    (piece,) = Echo(ids("a")[:1], MODEL.vocabulary, scored=True).begin()
    assert piece.scores == (None,)


# ---- through the gateway -----------------------------------------------------------------------------------------------


def text_of(events: list[tuple[str | None, Any]], index: int = 0) -> str:
    return "".join(
        choice["text"]
        for _, data in events
        if data != "[DONE]"
        for choice in data["choices"]
        if choice["index"] == index
    )


def logprobs_of(events: list[tuple[str | None, Any]], index: int = 0) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for _, data in events:
        for choice in [] if data == "[DONE]" else data["choices"]:
            for name, values in (choice["logprobs"] or {}).items() if choice["index"] == index else ():
                found.setdefault(name, []).extend(values)
    return found


async def test_echo_without_logprobs_scores_nothing_and_uses_the_cache(line: Line) -> None:
    body = (await line.complete(prompt=PROMPT, echo=True)).json()
    assert body["choices"][0]["text"] == PROMPT + ANSWER
    assert body["choices"][0]["logprobs"] is None
    request = line.worker.works[0].request
    assert request.prompt_logprobs is None
    assert request.cache.enabled


@pytest.mark.parametrize(
    "prompt", [PROMPT, ids(PROMPT), [PROMPT], [ids(PROMPT)]], ids=["text", "ids", "list", "lists"]
)
async def test_r_q20_echo_and_logprobs_tell_every_token_but_the_first(line: Line, prompt: object) -> None:
    body = (await line.complete(prompt=prompt, echo=True, logprobs=2)).json()
    choice, tokens = body["choices"][0], ids(PROMPT)
    assert choice["text"] == PROMPT + ANSWER
    told = choice["logprobs"]
    assert len(told["tokens"]) == len(tokens) + len(ids(ANSWER))
    assert told["token_logprobs"][: len(tokens)] == [None, *(-place / 8 for place in range(1, len(tokens)))]
    assert told["top_logprobs"][0] is None
    assert [len(top) for top in told["top_logprobs"][1:]] >= [1] * (len(told["tokens"]) - 1)
    for text, offset in zip(told["tokens"], told["text_offset"], strict=True):
        if "\ufffd" not in text:
            assert choice["text"][offset:].startswith(text)
    request = line.worker.works[0].request
    assert (request.prompt_logprobs, request.cache.enabled) == (2, False)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (
        len(tokens),
        len(ids(ANSWER)) + 1,
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_0_only_scores(line: Line, stream: bool) -> None:
    """What an evaluation harness asks for: the log likelihood of a text."""
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
    response = await line.complete(stream=stream, **fields)
    tokens = ids(PROMPT)
    if stream:
        events = told(response)
        text, logprobs = text_of(events), logprobs_of(events)
        finish = events[-2][1]["choices"][0]["finish_reason"]
    else:
        body = response.json()
        text, logprobs = body["choices"][0]["text"], body["choices"][0]["logprobs"]
        finish = body["choices"][0]["finish_reason"]
        assert body["usage"]["completion_tokens"] == 0
        assert body["burstline"]["tokens_per_verify"] in (None, 1.0)
    assert text == PROMPT
    assert finish == "length"
    assert len(logprobs["token_logprobs"]) == len(tokens)
    assert sum(logprobs["token_logprobs"][1:]) == -sum(range(len(tokens))) / 8


async def test_a_prompt_as_long_as_the_window_can_be_scored(line: Line) -> None:
    response = await line.complete(prompt=[5] * 4096, echo=True, logprobs=0, max_tokens=0)
    assert response.status_code == 200
    assert len(response.json()["choices"][0]["logprobs"]["tokens"]) == 4096


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_stream_and_a_whole_answer_tell_the_same(line: Line, choices: int) -> None:
    prompt = PROMPT * 30
    fields: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 1, "n": choices}
    whole = (await line.complete(**fields)).json()["choices"]
    events = told(await line.complete(stream=True, **fields))
    for index in range(choices):
        assert text_of(events, index) == whole[index]["text"] == prompt + ANSWER
        assert logprobs_of(events, index) == whole[index]["logprobs"]


async def test_scores_may_come_in_any_pieces_and_from_two_attempts(line: Line) -> None:
    async def script(work: Work) -> None:
        await work.start()
        await work.score(7)
        work.attempt = 2
        await work.start()
        await work.score(1)
        await work.score()
        await work.burst(ids(ANSWER))
        await work.end()

    line.worker.script = script
    choice = (await line.complete(prompt=PROMPT, echo=True, logprobs=0)).json()["choices"][0]
    assert choice["text"] == PROMPT + ANSWER
    expected = [None, *(-place / 8 for place in range(1, len(ids(PROMPT))))]
    assert choice["logprobs"]["token_logprobs"][: len(expected)] == expected


async def test_a_live_message_that_was_lost_is_read_from_the_journal(line: Line) -> None:
    async def script(work: Work) -> None:
        await work.start()
        await work.score(3)
        deliver, line.server.deliver = line.server.deliver, lambda _: None  # type: ignore[method-assign]
        await work.score()
        line.server.deliver = deliver  # type: ignore[method-assign]
        await work.burst(ids(ANSWER))
        await work.end()

    line.worker.script = script
    choice = (await line.complete(prompt=PROMPT, echo=True, logprobs=0)).json()["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids(PROMPT)) + len(ids(ANSWER))


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_reader_comes_back_in_the_middle_of_an_echo(line: Line, choices: int) -> None:
    line.worker.script = says(ANSWER, size=1)
    body = {
        "model": "pocket",
        "prompt": PROMPT * 40,
        "echo": True,
        "logprobs": 1,
        "stream": True,
        "n": choices,
    }

    async def post(after: str | None = None) -> list[tuple[str | None, Any]]:
        headers = {"idempotency-key": "k"} | ({} if after is None else {"last-event-id": after})
        response: httpx.Response = await line.client.post("/v1/completions", json=body, headers=headers)
        return told(response)

    whole = await post()
    assert len([name for name, _ in whole if name and name.split(",")[0].startswith("0.0.")]) > 2
    for place, (name, _) in enumerate(whole[:-1]):
        rest = await post(name)
        assert [one for one, _ in rest] == [one for one, _ in whole[place + 1 :]]
        assert text_of(rest) == text_of(whole[place + 1 :])
        assert logprobs_of(rest) == logprobs_of(whole[place + 1 :])
    assert len(line.worker.works) == 1
    (bound,) = line.broker.bound.values()
    kept = codec.decode_as(AnswerSheet, bound.sheet).request.prompt
    assert list(unpack_tokens(kept)) == ids(PROMPT * 40), "the answer tells it, so it is kept with it"


async def test_stop_strings_are_looked_for_in_the_completion_alone(line: Line) -> None:
    choice = (await line.complete(prompt=PROMPT, echo=True, stop=["burst", " there"])).json()["choices"][0]
    assert choice["text"] == PROMPT + "Hello"
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_prompt_logprobs_come_beside_the_answer_by_id_and_rank(line: Line, path: str) -> None:
    body: dict[str, Any] = {"model": "pocket", "prompt_logprobs": 2, "max_tokens": 4}
    body |= {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    answer = (await line.client.post(f"/v1/{path}", json=body)).json()
    found = answer["prompt_logprobs"] if path != "completions" else answer["choices"][0]["prompt_logprobs"]
    request = line.worker.works[0].request
    tokens = unpack_tokens(request.prompt)
    assert (request.prompt_logprobs, request.cache.enabled, request.top_logprobs) == (2, False, None)
    assert found[0] is None
    assert len(found) == len(tokens)
    for place, (token, told_of) in enumerate(zip(tokens[1:], found[1:], strict=True), 1):
        assert told_of[str(token)]["logprob"] == -place / 8
        assert [told_of[str(2000 + place + rank)]["rank"] for rank in range(2)] == [1, 2]
        assert all(set(one) == {"logprob", "rank", "decoded_token"} for one in told_of.values())


async def test_echo_and_prompt_logprobs_each_get_what_they_asked_for(line: Line) -> None:
    choice = (await line.complete(prompt=PROMPT, echo=True, logprobs=1, prompt_logprobs=4)).json()["choices"][
        0
    ]
    assert line.worker.works[0].request.prompt_logprobs == 4
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1 : len(ids(PROMPT))]} == {1}
    assert max(len(one) for one in choice["prompt_logprobs"][1:]) >= 4


async def test_without_being_asked_nothing_of_the_prompt_is_told(line: Line) -> None:
    body = (await line.complete()).json()
    assert "prompt_logprobs" not in body
    assert "prompt_logprobs" not in body["choices"][0]
    assert line.worker.works[0].request.to_score == 0
