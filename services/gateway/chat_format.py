"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.answer import Answer, Finish, Update, call_id
from services.gateway.choice import Delivered
from services.gateway.formats import Extras, Format
from services.gateway.parsers.events import Content, Event, Reasoning, ToolCall
from services.gateway.vocabulary import Vocabulary


@dataclass(kw_only=True)
class _Gathered:
    """What one choice has said so far, for an answer told whole."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    delivered: list[Delivered] = field(default_factory=list)
    finish: Finish | None = None


class ChatFormat(Format):
    """Deltas with a role, content, reasoning_content and tool_calls."""

    prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, answer: Answer, vocabulary: Vocabulary, extras: Extras) -> None:
        super().__init__(answer, vocabulary, extras)
        self._gathered = [_Gathered() for _ in range(answer.request.choices)]
        self._opened: set[int] = set()

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        deltas = [self._delta(update.choice, event) for event in update.events]
        if not deltas and update.delivered and update.finish is None:
            deltas = [{}]
        if update.choice not in self._opened and (deltas or update.finish):  # the role comes first of all
            self._opened.add(update.choice)
            deltas[:0] = [{"role": "assistant", "content": ""}]
        chunks = [self._choice(update, delta, None) for delta in deltas]
        if update.finish is not None:
            chunks.append(self._choice(update, {}, update.finish))
        if chunks and update.delivered:  # the tokens go with the last delta that they made
            carrier = chunks[-2] if update.finish is not None and len(chunks) > 1 else chunks[-1]
            carrier["logprobs"] = self._logprobs(update.delivered)
            carrier.update(self.token_ids(update.delivered))
        return chunks

    def _choice(self, update: Update, delta: dict[str, Any], finish: Finish | None) -> dict[str, Any]:
        return {"index": update.choice, "delta": delta, "logprobs": None, "finish_reason": finish}

    def _delta(self, choice: int, event: Event) -> dict[str, Any]:
        match event:
            case Content(text=text):
                return {"content": text}
            case Reasoning(text=text):
                return {"reasoning_content": text}
            case ToolCall():
                return {"tool_calls": [{"index": event.index} | self._call(choice, event)]}

    def _call(self, choice: int, event: ToolCall) -> dict[str, Any]:
        return {
            "id": call_id(self.answer.request.request_id, choice, event.index),
            "type": "function",
            "function": {"name": event.name, "arguments": event.arguments},
        }

    def _logprobs(self, delivered: Sequence[Delivered]) -> dict[str, Any] | None:
        if self.answer.request.top_logprobs is None:
            return None
        content = [self.chat_logprobs(item.logprobs) for item in delivered if item.logprobs is not None]
        return {"content": content, "refusal": None}

    def whole(self) -> dict[str, Any]:
        told = self.prompt_logprobs()
        return super().whole() | ({} if told is None else {"prompt_logprobs": told})

    def add(self, update: Update) -> None:
        gathered = self._gathered[update.choice]
        for event in update.events:
            match event:
                case Content(text=text):
                    gathered.content += text
                case Reasoning(text=text):
                    gathered.reasoning += text
                case ToolCall():
                    gathered.calls.append(self._call(update.choice, event))
        gathered.delivered.extend(update.delivered)
        gathered.finish = update.finish or gathered.finish

    def choices(self) -> list[dict[str, Any]]:
        return [self._whole(index, gathered) for index, gathered in enumerate(self._gathered)]

    def _whole(self, index: int, gathered: _Gathered) -> dict[str, Any]:
        empty = not gathered.content and bool(gathered.calls)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if empty else gathered.content,
            "refusal": None,
        }
        if gathered.reasoning:
            message["reasoning_content"] = gathered.reasoning
        if gathered.calls:
            message["tool_calls"] = gathered.calls
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(gathered.delivered),
            "finish_reason": gathered.finish,
            **self.token_ids(tuple(gathered.delivered)),
        }
