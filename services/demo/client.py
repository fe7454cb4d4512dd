"""One streamed chat completion over HTTP, as any OpenAI client would ask for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from services.demo.script import Message
from services.embedded.faults import Cancelled, EmbeddedFault
from services.embedded.waiting import Stop, never
from shared.clock import SYSTEM


@dataclass(kw_only=True)
class Answer:
    """What came back. Times in seconds; `details` is the server's own block (trace, speculation, cache)."""

    text: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    trace_id: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def said(self) -> tuple[str, list[dict[str, Any]]]:
        """Text and calls, without what differs by request (ids, times)."""
        return self.text, [call["function"] for call in self.tool_calls]

    def message(self) -> Message:
        """The answer as the next request sends it back."""
        sent: Message = {"role": "assistant", "content": self.text or None}
        if self.tool_calls:
            sent["tool_calls"] = self.tool_calls
        return sent


class Chat:
    """A client with one key. Closed with `close`."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        timeout_s: float = 300.0,
        stop: Stop = never,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`timeout_s` bounds each wait for bytes; `transport` stands in for the network in tests."""
        self._client = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            transport=transport,
            trust_env=False,  # a proxy must not stand between us and our own loopback
        )
        self._stop = stop

    def close(self) -> None:
        self._client.close()

    def ask(self, body: dict[str, Any], *, show: Callable[[str], None] = lambda piece: None) -> Answer:
        """Stream one completion; `show` gets each piece of text as it comes.

        Raises:
            EmbeddedFault: the server refused, the stream ended in an error, or the connection broke.
            Cancelled: asked to stop.
        """
        answer = Answer()
        began = SYSTEM.monotonic_ns()
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=request) as response:
                if response.status_code != 200:
                    raise EmbeddedFault(
                        f"the gateway answered {response.status_code}: {response.read().decode()}"
                    )
                answer.trace_id = response.headers.get("x-trace-id", "")
                for chunk in self._events(response):
                    if _take(chunk, answer, show) and not answer.first_token_s:
                        answer.first_token_s = (SYSTEM.monotonic_ns() - began) / 1e9
        except httpx.HTTPError as error:
            raise EmbeddedFault(f"the connection to the gateway broke: {error!r}") from error
        answer.total_s = (SYSTEM.monotonic_ns() - began) / 1e9
        return answer

    def _events(self, response: httpx.Response) -> Iterator[dict[str, Any]]:
        for line in response.iter_lines():
            if self._stop():
                raise Cancelled("stopped during the chat")
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            chunk: dict[str, Any] = json.loads(line.removeprefix("data:"))
            if "error" in chunk:
                raise EmbeddedFault(f"the stream ended in an error: {chunk['error'].get('message')}")
            yield chunk


def _take(chunk: dict[str, Any], answer: Answer, show: Callable[[str], None]) -> bool:
    """Fold one chunk into `answer`. True if it carried text or a part of a tool call."""
    carried = False
    for choice in chunk.get("choices", []):
        delta = choice.get("delta", {})
        if delta.get("content"):
            carried = True
            answer.text += delta["content"]
            show(delta["content"])
        for part in delta.get("tool_calls") or []:
            carried = True
            _merge(part, answer.tool_calls)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if usage := chunk.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if details := chunk.get("burstline"):
        answer.details |= details
        answer.trace_id = details.get("trace_id", answer.trace_id)
    return carried


def _merge(part: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    while len(calls) <= part["index"]:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[part["index"]]
    call["id"] = part.get("id") or call["id"]
    function = part.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""
