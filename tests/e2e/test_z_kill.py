"""kill -9 of each part of the running line: streams end, the line heals, the books balance. Last: it empties the cache."""

from __future__ import annotations

import json
import os
import signal

import httpx
import pytest

from services.embedded.waiting import until
from shared.clock import SYSTEM
from tests.e2e.conftest import Line

LONG = {
    "model": "pocket",
    "messages": [{"role": "user", "content": "Count from 1 to 90."}],
    "max_tokens": 300,
    "ignore_eos": True,
    "stream": True,
}
SHORT = {"model": "pocket", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
PATIENCE_S = 150.0


def kill(line: Line, name: str) -> int:
    """Kill a part; the pid it had."""
    pid = line.info.pids[name]
    os.kill(pid, signal.SIGKILL)
    return pid


def heals(line: Line, name: str, before: int) -> None:
    """The part is back under another pid, and a request is answered."""

    def answers() -> bool:
        with line.client() as client:
            try:
                return client.post("/v1/chat/completions", json=SHORT).status_code == 200
            except httpx.HTTPError:
                return False

    assert until(lambda: line.info.pids[name] != before, timeout_s=60), line.logs()
    assert until(answers, timeout_s=180, interval_s=0.5), line.logs()


def test_a_killed_worker_never_leaves_a_stream_hanging(line: Line) -> None:
    """It ends with an error or is continued by the next worker; either way with [DONE], within the client's patience."""
    before, events = 0, []
    deadline = SYSTEM.monotonic_ns() + int(PATIENCE_S * 1e9)
    with line.client() as client, client.stream("POST", "/v1/chat/completions", json=LONG) as response:
        assert response.status_code == 200
        for row in response.iter_lines():
            assert SYSTEM.monotonic_ns() < deadline, f"{len(events)} events, still open\n{line.logs()}"
            if not row.startswith("data:"):
                continue
            events.append(row.removeprefix("data:").strip())
            if len(events) == 4:
                before = kill(line, "worker")
    assert before
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert "error" in last or last["choices"][0]["finish_reason"] in ("length", "stop"), last
    heals(line, "worker", before)


def test_fr_111_a_worker_killed_in_mid_json_leaves_one_valid_value(line: Line) -> None:
    """The next worker walks the grammar along what was delivered: the same text as of a request that nobody disturbed."""
    schema = {"type": "array", "items": {"enum": [*range(100, 120)]}, "minItems": 60, "maxItems": 60}
    asked = LONG | {
        "ignore_eos": False,
        "max_tokens": 900,
        "temperature": 1,
        "seed": 5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}},
    }
    before, text, events = 0, "", []
    with line.client() as client:
        with client.stream("POST", "/v1/chat/completions", json=asked) as response:
            assert response.status_code == 200, response.read()
            for row in response.iter_lines():
                if row.startswith("data: {"):
                    events.append(json.loads(row.removeprefix("data: ")))
                    assert "choices" in events[-1], events[-1]
                    text += "".join(choice["delta"].get("content") or "" for choice in events[-1]["choices"])
                    if not before and len(text) > 20:
                        before = kill(line, "worker")
        heals(line, "worker", before)
        again = client.post("/v1/chat/completions", json=asked | {"stream": False}).json()
    whole = again["choices"][0]
    assert before
    assert len(json.loads(text)) == 60
    assert text == whole["message"]["content"]
    assert whole["finish_reason"] == "stop"
    told, tokens = events[-1]["burstline"], again["usage"]["completion_tokens"]
    assert told["replayed"] > 0, "what the journal had is nobody's draft"
    assert tokens - told["replayed"] - told["rounds"] - told["accepted"] in (0, 1)


@pytest.mark.parametrize("name", ["broker", "gateway", "nats", "postgres"])
def test_the_line_heals_after_a_kill(line: Line, name: str) -> None:
    heals(line, name, kill(line, name))


def test_the_books_balance_after_all_of_it(line: Line) -> None:
    audit = line.burstline("audit")
    assert audit.returncode == 0, audit.stdout + audit.stderr
