"""kill -9 of the worker in mid-stream: the stream ends, the line heals, the books balance. Last: it empties the cache."""

from __future__ import annotations

import json
import os
import signal

import httpx

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
PATIENCE_S = 150.0
SHORT = {"model": "pocket", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def test_a_killed_worker_never_leaves_a_stream_hanging(line: Line) -> None:
    """It ends with an error or is continued by the next worker; either way with [DONE], within the client's patience."""
    before = line.info.pids["worker"]
    frames, killed, events = 0, False, []
    deadline = SYSTEM.monotonic_ns() + int(PATIENCE_S * 1e9)
    with line.client() as client, client.stream("POST", "/v1/chat/completions", json=LONG) as response:
        assert response.status_code == 200
        for row in response.iter_lines():
            assert SYSTEM.monotonic_ns() < deadline, f"{frames} frames, still open\n{line.logs()}"
            if not row.startswith("data:"):
                continue
            events.append(row.removeprefix("data:").strip())
            frames += 1
            if frames == 4:
                os.kill(before, signal.SIGKILL)
                killed = True
    assert killed
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert "error" in last or last["choices"][0]["finish_reason"] in ("length", "stop"), last

    assert until(lambda: line.info.pids["worker"] != before, timeout_s=60), line.logs()

    def answers() -> bool:
        with line.client() as client:
            try:
                return client.post("/v1/chat/completions", json=SHORT).status_code == 200
            except httpx.HTTPError:
                return False

    assert until(answers, timeout_s=180, interval_s=0.5), line.logs()
    audit = line.burstline("audit")
    assert audit.returncode == 0, audit.stdout + audit.stderr
