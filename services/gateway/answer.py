"""The answer to one request as it grows: tokens in, updates for the reader out. Pure; knows no queue and no HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from services.gateway.choice import ChoiceText, Delivered, joined, merge
from services.gateway.echo import Echo, PromptPiece
from services.gateway.faults import RemoteFailure
from services.gateway.model import ServedModel
from services.gateway.parsers.assistant import AssistantParser
from services.gateway.parsers.events import Event
from shared.errors import BurstlineError, DeadlineExceeded
from shared.protocol.messages import (
    AnswerSheet,
    ChoiceEnd,
    Started,
    Terminal,
    TokenLogprobs,
    unpack_tokens,
)
from shared.protocol.stream import Emit, Scored

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, kw_only=True)
class Update:
    """News of one choice. `position` = its tokens taken in so far, and one more at its end; `finish` is set once, in its
    last update. `prompt`: a piece of the echo, which comes before all else, at position 0.

    How tokens are gathered into updates depends on the bursts that brought them, and what they add up to does not: an
    update with several events is of one token alone, one with a single event ends at its position.
    """

    choice: int
    position: int
    events: tuple[Event, ...]
    delivered: tuple[Delivered, ...]
    finish: Finish | None
    prompt: PromptPiece | None = None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """In tokens. `cached` is the hit of the first admission, part of `prompt` (FR-51)."""

    prompt: int
    cached: int
    completion: int
    accepted: int


class Answer:
    """State of one request's answer."""

    def __init__(
        self, sheet: AnswerSheet, model: ServedModel, *, cuts: Mapping[int, int] | None = None
    ) -> None:
        """`cuts`: choice -> a position where an update must end, since a reader goes on from there."""
        self.request: Final = sheet.request
        self.started: Started | None = None
        self.terminal: Terminal | None = None
        self.prompt_tokens: Final = sheet.prompt_tokens
        self.prompt_scores: Final[list[TokenLogprobs]] = []
        """What was told of the prompt, from its second token on, if the whole answer tells it."""
        self.tells_scores: Final = sheet.prompt_logprobs
        """How many likeliest tokens of each prompt row the whole answer tells; None = nothing."""
        self.echo: Final = _echo(sheet, model)
        self._cuts: Final = cuts or {}
        markers = model.markers(tools=sheet.tools) if sheet.chat else frozenset()
        self._choices: Final = [
            ChoiceText(
                model.vocabulary,
                stops=sheet.stops,
                min_tokens=sheet.request.sampling.min_tokens,
                parser=AssistantParser(markers=markers, thinking=sheet.thinking),
                begins=sheet.chat,
            )
            for _ in range(sheet.request.choices)
        ]
        self._finished: Final[dict[int, Finish]] = {}

    @property
    def complete(self) -> bool:
        """Whether every choice has ended for the reader, perhaps before the worker knows."""
        return len(self._finished) == len(self._choices)

    def stop_offset(self, choice: int) -> int | None:
        """Tokens of a choice up to its stop string, once there is one."""
        return self._choices[choice].stop_offset

    def begin(self) -> list[Update]:
        """What is known before anything came: the echo of a prompt that is not scored."""
        return [] if self.echo is None else self._echoed(self.echo.begin())

    def score(self, news: Scored) -> list[Update]:
        """The next log probabilities of the prompt."""
        if self.tells_scores is not None:
            self.prompt_scores.extend(news.entries)
        return [] if self.echo is None else self._echoed(self.echo.score(news.entries))

    def _echoed(self, pieces: list[PromptPiece]) -> list[Update]:
        return [
            Update(choice=choice, position=0, events=(), delivered=(), finish=None, prompt=piece)
            for piece in pieces
            for choice in range(len(self._choices))
        ]

    def take(self, news: Emit) -> list[Update]:
        """The next tokens of a choice, in order. Nothing when the choice has ended already."""
        choice = self._choices[news.choice]
        updates: list[Update] = []
        if news.choice in self._finished:
            return updates
        run, taken = _Run(news.choice), 0
        while taken < len(news.tokens) and choice.stop_offset is None:
            end = self._cut_after(news, taken)
            scores = None if news.logprobs is None else news.logprobs[taken:end]
            count, events = choice.take(news.tokens[taken:end], scores)
            taken += count
            if not run.joins(events):
                updates.extend(run.close())
            run.add(choice.consumed, events, choice.take_delivered())
            if len(events) > 1 or choice.consumed == self._cuts.get(news.choice):
                updates.extend(run.close())
        updates.extend(run.close())
        if choice.stop_offset is not None:
            updates.append(self._update(news.choice, [], self._finish(news.choice, "stop")))
        return updates

    def _cut_after(self, news: Emit, taken: int) -> int:
        """Up to which token of a frame, of which `taken` are in, an update may go: a reader goes on from there, or its end."""
        left = self._cuts.get(news.choice, 0) - self._choices[news.choice].consumed
        return taken + left if left > 0 else len(news.tokens)

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
            position=state.consumed + 1,
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


def _echo(sheet: AnswerSheet, model: ServedModel) -> Echo | None:
    if not sheet.echo:
        return None
    scored = sheet.request.top_logprobs is not None
    return Echo(unpack_tokens(sheet.request.prompt), model.vocabulary, scored=scored)


class _Run:
    """Tokens of one choice that make one update."""

    def __init__(self, choice: int) -> None:
        self._choice: Final = choice
        self._position = 0
        self._events: list[Event] = []
        self._delivered: list[Delivered] = []

    def joins(self, events: list[Event]) -> bool:
        """Whether what a further token gives leaves this one event at most."""
        if not self._events:
            return len(events) <= 1
        return not events or (len(events) == 1 and joined(self._events[-1], events[0]))

    def add(self, position: int, events: list[Event], delivered: list[Delivered]) -> None:
        self._position = position
        self._events.extend(events)
        self._delivered.extend(delivered)

    def close(self) -> list[Update]:
        """The update, if there is anything in it; the run is empty then."""
        events, delivered = tuple(merge(self._events)), tuple(self._delivered)
        self._events, self._delivered = [], []
        if not events and not delivered:
            return []
        return [
            Update(
                choice=self._choice, position=self._position, events=events, delivered=delivered, finish=None
            )
        ]


def call_id(request_id: str, choice: int, index: int) -> str:
    """A tool call's id: the same whenever the same stream is told again."""
    digest = hashlib.sha256(f"{request_id}/{choice}/{index}".encode()).hexdigest()
    return f"call_{digest[:24]}"
