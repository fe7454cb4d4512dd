"""Tokens into the text of a choice, as an answer takes them in."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.choice import ChoiceText, merge
from services.gateway.parsers.events import Event


def feed(choice: ChoiceText, tokens: Sequence[int]) -> list[Event]:
    """The events of one frame; what comes after a stop string is passed over."""
    events: list[Event] = []
    taken = 0
    while taken < len(tokens) and choice.stop_offset is None:
        count, told = choice.take(tokens[taken:], None)
        taken += count
        events.extend(told)
    return merge(events)
