"""One choice of a request: its tokens -> events for the reader, with the ids and log probabilities that go with them.

The rule at a stop string (FR-27): text ends before the stop string; ids and log probabilities end with the last token
that gave at least one character to that text; usage counts every token up to the one that completed the stop string, as
it counts an end-of-turn token. All of it is a function of the tokens alone, not of the bursts that carried them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from services.gateway.detokenize import Detokenizer, Piece
from services.gateway.parsers.assistant import AssistantParser
from services.gateway.parsers.events import Content, Event, Reasoning
from services.gateway.stops import StopMatcher
from services.gateway.vocabulary import Vocabulary
from shared.protocol.messages import TokenLogprobs


class Delivered(msgspec.Struct, frozen=True, kw_only=True):
    """A token that the reader has got. `begin`, `end`: its characters in the choice's text, before any parsing."""

    token: int
    logprobs: TokenLogprobs | None
    begin: int
    end: int


class ChoiceText:
    """State of one choice."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stops: Sequence[str],
        min_tokens: int,
        parser: AssistantParser,
        begins: bool = True,
    ) -> None:
        """`begins`: its text is one of its own, as a chat's answer is, not the continuation of the prompt's."""
        self.consumed = 0
        """Tokens taken in so far."""
        self.stop_offset: int | None = None
        """Set once a stop string is complete: tokens up to and with the one that completed it."""
        self.parser: Final = parser
        self._detokenizer = Detokenizer(vocabulary, markers=parser.markers, begins=begins)
        self._matcher = StopMatcher(stops)
        self._exempt: Final = min_tokens if any(stops) else 1 << 62
        """So many tokens are searched for no stop string."""
        self._seen = 0  # characters decoded
        self._shown = 0  # characters past the stop matcher
        self._waiting: deque[Delivered] = deque()
        self._delivered: list[Delivered] = []

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None
    ) -> tuple[int, list[Event]]:
        """Take the first of `tokens`, and with it those after it that are plain text too and are searched for no stop string:
        most frames go in at once. Not to be called after a stop string. Returns how many were taken, and their events.

        `logprobs` has one entry a token, or is None."""
        room = self._exempt - self.consumed
        texts = self._detokenizer.texts(tokens[:room] if room < len(tokens) else tokens) if room > 0 else []
        if not texts:
            return 1, merge(self._step(tokens[0], None if logprobs is None else logprobs[0]))
        for place, (text, waits) in enumerate(texts):
            begin, self._seen = self._seen, self._seen + len(text)
            self._waiting.append(
                Delivered(
                    token=tokens[place],
                    logprobs=None if logprobs is None else logprobs[place],
                    begin=begin,
                    end=self._seen + waits,
                )
            )
        self.consumed += len(texts)
        events = self._show("".join([text for text, _ in texts]))
        self._settle(None)
        return len(texts), events

    def finish(self) -> list[Event]:
        """The stream ended by itself: everything held back."""
        if self.stop_offset is not None:
            return []
        rest = self._detokenizer.finish()
        self._seen += len(rest)
        events = self._match(rest)
        if self.stop_offset is None:
            events.extend([*self._show(self._matcher.flush()), *self.parser.finish()])
            self._settle(None)
        return merge(events)

    def take_delivered(self) -> list[Delivered]:
        """Tokens whose text has gone out since the last call."""
        taken, self._delivered = self._delivered, []
        return taken

    def _step(self, token: int, logprobs: TokenLogprobs | None) -> list[Event]:
        begin = self._seen
        piece = self._detokenizer.feed(token)
        self._seen += len(piece.text)
        end = self._seen + (1 if self._detokenizer.pending else 0)
        self._waiting.append(Delivered(token=token, logprobs=logprobs, begin=begin, end=end))
        self.consumed += 1
        events = self._told(piece)
        self._settle(None)
        return events

    def _told(self, piece: Piece) -> list[Event]:
        exempt = self.consumed <= self._exempt
        events = self._show(piece.text) if exempt else self._match(piece.text)
        if piece.marker is not None and self.stop_offset is None:
            events.extend(self._show(self._matcher.flush()))
            events.extend(self.parser.marker(piece.marker))
        return events

    def _match(self, text: str) -> list[Event]:
        released = self._matcher.feed(text)
        events = self._show(released.text)
        if released.stopped:
            self.stop_offset = self.consumed
            events.extend(self.parser.finish())
            self._settle(self._shown)
        return events

    def _show(self, text: str) -> list[Event]:
        self._shown += len(text)
        return self.parser.text(text) if text else []

    def _settle(self, cut: int | None) -> None:
        """Move tokens whose text is out to the delivered ones; at a `cut`, those that gave text before it, no others."""
        while self._waiting:
            first = self._waiting[0]
            if cut is not None and first.begin >= cut:
                self._waiting.clear()
            elif cut is not None or first.end <= self._shown:
                self._delivered.append(self._waiting.popleft())
            else:
                return


def joined(one: Event, other: Event) -> bool:
    """Whether two neighbours are text of one kind, so that they are told as one."""
    return type(one) is type(other) and isinstance(one, Content | Reasoning)


def merge(events: list[Event]) -> list[Event]:
    """Neighbours of one kind of text as one."""
    if len(events) < 2:
        return events
    merged: list[Event] = []
    begin = 0
    for end in range(1, len(events) + 1):
        if end == len(events) or not joined(events[begin], events[end]):
            merged.append(_one(events[begin:end]))
            begin = end
    return merged


def _one(run: list[Event]) -> Event:
    """What a run of neighbours that are told as one comes to."""
    if len(run) == 1:
        return run[0]
    text = "".join(event.text for event in run if isinstance(event, Content | Reasoning))
    return Content(text=text) if isinstance(run[0], Content) else Reasoning(text=text)
