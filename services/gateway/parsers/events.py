"""What a parser says about a stream."""

from __future__ import annotations

import msgspec


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """Text for the reader."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """Text of a thinking block."""

    text: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A whole, valid tool call. `arguments` is the model's own spelling of a JSON object."""

    index: int
    name: str
    arguments: str


Event = Content | Reasoning | ToolCall
