"""The assistant's turn: thinking blocks, tool calls and content, told apart by control tokens.

    content ──<think>──▶ thinking ──</think>──▶ content ──<tool_call>──▶ call ──</tool_call>──▶ content

A tool call is shown when it is whole and valid, never in parts: a broken one goes out as the text that it is, and what
was sent cannot be taken back. White space between content and a tool call belongs to neither and is dropped, since the
template writes its own; so are line breaks at the border of a thinking block.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final, Literal

from services.gateway.parsers.events import Content, Event, Reasoning, ToolCall
from services.gateway.parsers.tools import parse_call
from shared.control import TOOLS


class AssistantParser:
    """State of one choice. `markers` says which control tokens it will be told about."""

    def __init__(self, *, markers: Set[str], thinking: bool = False) -> None:
        self.markers: Final = markers
        self._tools: Final = bool(markers & TOOLS)
        self.calls = 0
        self._state: Literal["content", "thinking", "call"] = "thinking" if thinking else "content"
        self._call = ""
        self._space = ""  # white space that may turn out to stand before a tool call
        self._fresh = thinking  # nothing shown yet since a border: line breaks are dropped

    def text(self, text: str) -> list[Event]:
        """Plain text of the model."""
        if self._state == "call":
            self._call += text
            return []
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        if not text:
            return []
        return [Reasoning(text=text)] if self._state == "thinking" else self._content(text)

    def _content(self, text: str) -> list[Event]:
        if not self._tools:
            return [Content(text=text)]
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return [Content(text=shown)] if shown else []

    def marker(self, marker: str) -> list[Event]:
        """A control token. One that makes no sense here goes out as text."""
        match (self._state, marker):
            case ("content", "<think>"):
                self._state, self._fresh = "thinking", True
                return self._release()
            case ("thinking", "</think>"):
                self._state, self._fresh = "content", True
                return []
            case ("content", "<tool_call>"):
                self._state, self._call = "call", ""
                return []
            case ("call", "</tool_call>"):
                return self._close()
            case ("call", _):
                broken = self._broken()
                return [*broken, *self.marker(marker)]
            case _:
                self._fresh = False
                return self.text(marker)

    def _close(self) -> list[Event]:
        call = parse_call(self._call)
        if call is None:
            return [*self._broken(), *self.text("</tool_call>")]
        self._state, self._call, self._space = "content", "", ""
        self.calls += 1
        name, arguments = call
        return [ToolCall(index=self.calls - 1, name=name, arguments=arguments)]

    def _broken(self) -> list[Event]:
        text, self._state, self._call = "<tool_call>" + self._call, "content", ""
        return self.text(text)

    def _release(self) -> list[Event]:
        space, self._space = self._space, ""
        return [Content(text=space)] if space else []

    def finish(self) -> list[Event]:
        """The end of the stream: what was held back, unless it is white space after a tool call."""
        events = self._broken() if self._state == "call" else []
        return events if self.calls else [*events, *self._release()]
