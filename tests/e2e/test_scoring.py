"""What a text is worth, as an evaluation harness asks for it, and whole-prompt hits: through the whole line, real weights."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from tokenizers import Tokenizer

from shared.config import POCKET
from tests.e2e.conftest import Line

CONTEXT = "A burst is a bounded run of rounds. A round drafts tokens and verifies them; "
CONTINUATION = "what was accepted is delivered."
TOKENIZER = Tokenizer.from_file(str(POCKET / "tokenizer.json"))


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def complete(line: Line, **fields: Any) -> dict[str, Any]:
    with line.client() as client:
        response = client.post("/v1/completions", json={"model": "pocket", "temperature": 0} | fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def scored(line: Line, prompt: object, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = complete(line, prompt=prompt, echo=True, logprobs=1, **fields)
    return found


def log_likelihood(choice: dict[str, Any], context: int, end: int | None) -> tuple[float, bool]:
    """As lm-evaluation-harness reads an answer: the continuation's sum, and whether greedy decoding would say it."""
    logprobs = choice["logprobs"]
    pieces = zip(logprobs["tokens"][context:end], logprobs["top_logprobs"][context:end], strict=True)
    greedy = all(token == max(top, key=top.__getitem__) for token, top in pieces)
    return sum(logprobs["token_logprobs"][context:end]), greedy


def test_r_q20_the_likelihood_of_a_continuation_is_the_same_however_it_is_asked_for(line: Line) -> None:
    context, whole = len(ids(CONTEXT)), ids(CONTEXT) + ids(CONTINUATION)
    only = scored(line, whole, max_tokens=0)
    assert only["usage"]["completion_tokens"] == 0
    assert only["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert len(only["choices"][0]["logprobs"]["token_logprobs"]) == len(whole)
    first = log_likelihood(only["choices"][0], context, None)
    assert math.isfinite(first[0])
    assert first[0] < 0
    for speculation in ({"drafter": "none"}, {"drafter": "mtp", "k": 3}, {"drafter": "ngram", "k": 2}):
        again = scored(line, [whole], max_tokens=1, speculation=speculation)
        assert log_likelihood(again["choices"][0], context, -1) == first
    assert scored(line, CONTEXT + CONTINUATION, max_tokens=0)["choices"][0]["text"] == CONTEXT + CONTINUATION


def test_r_q20_what_the_model_says_greedily_is_found_to_be_greedy(line: Line) -> None:
    prompt = ids(CONTEXT)
    said = complete(line, prompt=prompt, max_tokens=12, logprobs=1, ignore_eos=True, return_token_ids=True)[
        "choices"
    ][0]
    choice = scored(line, [*prompt, *said["token_ids"]], max_tokens=0)["choices"][0]
    total, greedy = log_likelihood(choice, len(prompt), None)
    assert greedy
    assert total == pytest.approx(sum(said["logprobs"]["token_logprobs"]), abs=1e-3)


def test_r_q20_several_texts_are_scored_in_one_call_as_they_are_alone(line: Line) -> None:
    texts = [ids(CONTEXT), ids(CONTEXT + CONTINUATION), ids(CONTINUATION)]
    together = scored(line, texts, max_tokens=0)
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    for text, choice in zip(texts, together["choices"], strict=True):
        alone = scored(line, text, max_tokens=0)["choices"][0]
        assert choice["logprobs"] == alone["logprobs"]


def test_r_q20_a_stream_tells_what_the_whole_answer_tells(line: Line) -> None:
    fields = {"prompt": CONTEXT * 25, "echo": True, "logprobs": 2, "max_tokens": 8, "n": 2, "seed": 5}
    whole = complete(line, **(fields | {"temperature": 0.8}))["choices"]
    texts, logprobs = ["", ""], [[], []]  # type: ignore[var-annotated]
    body = {"model": "pocket", "temperature": 0.8, "stream": True} | fields
    with line.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        for row in response.iter_lines():
            if row.startswith("data: {"):
                for choice in json.loads(row[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
                    logprobs[choice["index"]] += choice["logprobs"]["token_logprobs"]
    assert texts == [choice["text"] for choice in whole]
    assert logprobs == [choice["logprobs"]["token_logprobs"] for choice in whole]


def test_r_q6_a_prompt_on_the_grid_is_served_whole_the_second_time(line: Line) -> None:
    prompt = ids(CONTEXT * 20)[:192]
    fields = {
        "prompt": prompt,
        "max_tokens": 16,
        "logprobs": 2,
        "cache_salt": "whole",
        "seed": 3,
        "temperature": 0.7,
    }
    cold = complete(line, **(fields | {"cache": False}))
    first, again = complete(line, **fields), complete(line, **fields)
    assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, again)] == [0, 192]
    assert first["choices"] == again["choices"] == cold["choices"]
