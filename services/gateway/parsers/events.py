"""What a parser says about a stream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Reasoning:
    """Text of a thinking block."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A whole, valid tool call. `arguments` is the model's own spelling of a JSON object."""

    index: int
    name: str
    arguments: str


Event = Content | Reasoning | ToolCall
