"""SmolLM2 through the whole line, from its package to a streamed answer: a model that nobody here trained.

Where it is neither in the user's cache folder nor to be fetched, its test is skipped; `test_folder` and `test_public` hold
what they can to a made-up model with its layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Line, running
from tests.public import NAME, public_models


@pytest.fixture(scope="module")
def public() -> Iterator[Line]:
    with running("--model", NAME, BURSTLINE_MODELS_DIR=str(public_models())) as line:
        yield line


def test_it_answers_sanely_with_and_without_drafts(public: Line) -> None:
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 24,
        "stream": True,
    }
    pieces = _streamed(public, body)
    assert "".join(pieces) == "The capital of France is Paris.", public.logs()
    assert len(pieces) > 1, "it streamed"
    assert "".join(_streamed(public, body | {"speculation": {"drafter": "none", "k": 0}})) == "".join(pieces)


def test_no_other_model_is_served(public: Line) -> None:
    with public.client() as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [NAME]


def _streamed(line: Line, body: dict[str, object]) -> list[str]:
    with line.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        events = [text.removeprefix("data: ") for text in answer.iter_lines() if text.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return [delta["content"] for delta in deltas if delta.get("content")]
