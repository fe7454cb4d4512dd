"""A request with an Idempotency-Key through the whole line: told again, gone on with, and charged once."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.e2e.conftest import Line

PATH = "/v1/chat/completions"


def _events(text: str) -> list[tuple[str, Any]]:
    """(id, data) of the events that have ids."""
    found = []
    for block in text.split("\n\n"):
        name, _, rest = block.partition("\n")
        if name.startswith("id: "):
            found.append((name[4:], json.loads(rest.removeprefix("data: "))))
    return found


def _completions(client: httpx.Client) -> float:
    """Completion tokens that this gateway told of requests of its own."""
    rows = client.get("/metrics").text.splitlines()
    return sum(
        float(row.rsplit(" ", 1)[1])
        for row in rows
        if row.startswith("burstline_gateway_tokens_total") and 'kind="completion"' in row
    )


def test_fr_68_a_key_runs_once_and_its_stream_goes_on_from_any_event(line: Line) -> None:
    body = {
        "model": "pocket", "messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 24,
        "temperature": 1, "n": 2, "return_token_ids": True, "ignore_eos": True,
    }  # fmt: skip
    keyed = {"Idempotency-Key": "count to ten"}
    with line.client() as client:
        before = _completions(client)
        whole = _events(client.post(PATH, json=body | {"stream": True}, headers=keyed).text)
        again = client.post(PATH, json=body, headers=keyed)
        assert again.status_code == 200, line.logs()
        told = {choice["index"]: choice["message"]["content"] for choice in again.json()["choices"]}
        for index, content in told.items():
            pieces = [data["choices"][0] for _, data in whole if data["choices"][0]["index"] == index]
            assert "".join(piece["delta"].get("content", "") for piece in pieces) == content
        assert whole[0][1]["id"] == again.json()["id"]
        middle = len(whole) // 2
        headers = {"Last-Event-ID": whole[middle][0]}
        path = f"/v1/streams/{again.headers['x-burstline-request-id']}"
        rest = _events(client.get(path, headers=headers).text)
        assert [name for name, _ in rest] == [name for name, _ in whole[middle + 1 :]]
        other = client.post(PATH, json=body | {"temperature": 0}, headers=keyed)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
        assert _completions(client) - before == again.json()["usage"]["completion_tokens"]
