"""The answer to one request as it grows: tokens in, updates for the reader out. Pure; knows no queue and no HTTP."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, Literal

from services.gateway.choice import ChoiceText, Delivered
from services.gateway.faults import RemoteFailure
from services.gateway.model import ServedModel
from services.gateway.parsers.assistant import AssistantParser
from services.gateway.parsers.events import Event
from services.gateway.schemas.chat import ChatRequest
from services.gateway.schemas.fields import GenerationFields
from shared.errors import BurstlineError, DeadlineExceeded
from shared.protocol.messages import (
    ChoiceEnd,
    GenerateRequest,
    Started,
    Terminal,
    unpack_tokens,
)
from shared.protocol.stream import Emit

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, kw_only=True)
class Update:
    """News of one choice. `position` = its tokens taken in so far; `finish` is set once, in its last update."""

    choice: int
    position: int
    events: tuple[Event, ...]
    delivered: tuple[Delivered, ...]
    finish: Finish | None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """In tokens. `cached` is the hit of the first admission, part of `prompt` (FR-51)."""

    prompt: int
    cached: int
    completion: int
    accepted: int


class Answer:
    """State of one request's answer."""

    def __init__(self, request: GenerateRequest, model: ServedModel, fields: GenerationFields) -> None:
        self.request: Final = request
        self.started: Started | None = None
        self.terminal: Terminal | None = None
        prompt = list(unpack_tokens(request.prompt))
        self.prompt_tokens: Final = len(prompt)
        chat = isinstance(fields, ChatRequest)
        markers = (
            model.markers(tools=isinstance(fields, ChatRequest) and fields.offers_tools)
            if chat
            else frozenset()
        )
        thinking = chat and model.opens_thinking(prompt)
        self._choices: Final = [
            ChoiceText(
                model.vocabulary,
                stops=fields.stops,
                min_tokens=request.sampling.min_tokens,
                parser=AssistantParser(markers=markers, thinking=thinking),
            )
            for _ in range(request.choices)
        ]
        self._finished: Final[dict[int, Finish]] = {}

    @property
    def complete(self) -> bool:
        """Whether every choice has ended for the reader, perhaps before the worker knows."""
        return len(self._finished) == len(self._choices)

    def stop_offset(self, choice: int) -> int | None:
        """Tokens of a choice up to its stop string, once there is one."""
        return self._choices[choice].stop_offset

    def take(self, news: Emit) -> Update | None:
        """The next tokens of a choice, in order. None when the choice has ended already."""
        choice = self._choices[news.choice]
        if news.choice in self._finished:
            return None
        events = choice.feed(news.tokens, news.logprobs)
        finish = self._finish(news.choice, "stop") if choice.stop_offset is not None else None
        return self._update(news.choice, events, finish)

    def end(self, terminal: Terminal) -> list[Update]:
        """The worker's last word: what was held back, and every finish that the reader has not seen.

        Raises:
            RemoteFailure: the request failed; as the worker said it.
            DeadlineExceeded: it was cancelled for its deadline.
            BurstlineError: it was cancelled by somebody else.
        """
        self.terminal = terminal
        if terminal.failure is not None:
            raise RemoteFailure(terminal.failure)
        updates: list[Update] = []
        for end in sorted(terminal.ends, key=lambda end: end.choice):
            if end.choice not in self._finished:
                updates.append(self._end(end, terminal.cancel_reason))
        if not self.complete:
            raise BurstlineError("the worker's last message does not name every choice")
        return updates

    def _end(self, end: ChoiceEnd, cancel_reason: str | None) -> Update:
        if end.finish == "cancelled" and cancel_reason == "deadline":
            raise DeadlineExceeded("the request's deadline passed")
        if end.finish in ("cancelled", "error"):
            raise BurstlineError(f"the request ended early: {cancel_reason or end.finish}", code=end.finish)
        choice = self._choices[end.choice]
        events = choice.finish()
        stopped = choice.stop_offset is not None or end.finish == "stop"
        return self._update(end.choice, events, self._finish(end.choice, "stop" if stopped else "length"))

    def _finish(self, choice: int, reason: Finish) -> Finish:
        if reason == "stop" and self._choices[choice].parser.calls:
            reason = "tool_calls"
        self._finished[choice] = reason
        return reason

    def _update(self, choice: int, events: list[Event], finish: Finish | None) -> Update:
        state = self._choices[choice]
        return Update(
            choice=choice,
            position=state.consumed,
            events=tuple(events),
            delivered=tuple(state.take_delivered()),
            finish=finish,
        )

    def usage(self) -> Usage:
        """What the request used: as the worker counted it, and for stop strings up to the token that completed one."""
        ends = {end.choice: end for end in self.terminal.ends} if self.terminal is not None else {}
        completion = 0
        for place, state in enumerate(self._choices):
            if state.stop_offset is not None or place not in ends:
                completion += state.consumed
            else:
                completion += ends[place].completion_tokens
        cached = self.terminal.cached_tokens if self.terminal is not None else 0
        if self.terminal is None and self.started is not None:
            cached = self.started.cached_tokens
        return Usage(
            prompt=self.prompt_tokens,
            cached=min(cached, self.prompt_tokens),
            completion=completion,
            accepted=sum(end.spec.accepted for end in ends.values()),
        )


def call_id(request_id: str, choice: int, index: int) -> str:
    """A tool call's id: the same whenever the same stream is told again."""
    digest = hashlib.sha256(f"{request_id}/{choice}/{index}".encode()).hexdigest()
    return f"call_{digest[:24]}"
