"""Chat messages -> the text of a prompt, by the model's own jinja template in a sandbox.

The sandbox cannot reach Python; its output is bounded in characters and in time; the date that a template sees is the
request's, resolved once (C1.7). The *stable boundary* is where the prompt with the generation header parts from the one
without: what lies before it will be rendered the same in the next turn, so that is where a capture is worth taking.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from jinja2 import Template

from services.gateway.header import ASKED, HERE, mark, texts_of
from services.gateway.sandbox import TICK, Sandbox, TemplateRaised
from services.gateway.schemas.chat import AssistantMessage, ChatRequest, Message, TextPart
from services.gateway.shield import Segment, Shield
from services.gateway.vocabulary import Vocabulary
from shared.clock import Clock
from shared.errors import InvalidRequest

_WANTS_MAPPING: Final = re.compile(r"arguments\s*(\|\s*items|\.items)")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A tokenised prompt. `stable` = tokens before the generation header; None when the prompt has none."""

    tokens: list[int]
    stable: int | None


class TookTooLong(InvalidRequest):
    """A prompt was not rendered within its time."""


class ChatTemplate:
    """A compiled template. `render` is pure and may run in any thread."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = Sandbox()
        tree = environment.read(source)
        self._passes: Final = (True,) if mark(tree, environment) else (True, False)
        self._template: Final[Template] = environment.from_string(tree)
        self.texts: Final = texts_of(environment, source)
        """What it writes as it stands."""
        self._special: Final = dict(special)
        self._mapping: Final = bool(_WANTS_MAPPING.search(source))
        self.thinks: Final = "<think>" in source
        """Whether it knows of thinking blocks."""

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages in the one form that the template sees."""
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> dict[str, Any]:
        plain: dict[str, Any] = {"role": message.role, "content": _joined(message.content)}
        if isinstance(message, AssistantMessage):
            if message.reasoning_content is not None:
                plain["reasoning_content"] = message.reasoning_content
            if message.tool_calls:
                plain["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {
                            "name": call.function.name,
                            "arguments": self._arguments(call.function.arguments),
                        },
                    }
                    for call in message.tool_calls
                ]
        elif message.role == "tool":
            plain["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            plain["name"] = message.name
        return plain

    def _arguments(self, text: str) -> object:
        """The caller's spelling, unless the template walks the arguments."""
        if not self._mapping:
            return text
        try:
            value = json.loads(text or "{}")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise InvalidRequest("tool call arguments must be the text of a JSON object", param="messages")
        return value

    def render(
        self, variables: Mapping[str, Any], *, date: datetime, limits: RenderLimits
    ) -> tuple[str, str]:
        """The prompt's text with the generation header, and without. Raises InvalidRequest with the template's own message, or
        when a bound is passed."""
        try:
            texts = [
                self._pieces({**variables, ASKED: header, "strftime_now": date.strftime}, limits)
                for header in self._passes
            ]
        except TemplateRaised as error:
            raise InvalidRequest(f"the chat template refused: {error.message}", param="messages") from error
        except InvalidRequest:
            raise
        except Exception as error:  # a template may fail with any Python error, and it is a 400 (FR-63)
            detail = f"{type(error).__name__}: {error}"[:300]
            raise InvalidRequest(f"the chat template failed: {detail}", param="messages") from error
        full, bare = texts[0], texts[-1]
        cut = full.index(HERE) if len(texts) == 1 else len(bare)
        return "".join(piece for piece in full if piece != HERE), "".join(bare[:cut])

    def _pieces(self, variables: Mapping[str, Any], limits: RenderLimits) -> list[str]:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate({**self._special, **variables, TICK: limits.in_time}):
            pieces.append(piece)
            if piece != HERE:
                size += len(piece)
                limits.check(size)
        return pieces


@dataclass(frozen=True, kw_only=True)
class RenderLimits:
    """Bounds of one rendering. `deadline_ns` is on `clock`'s monotonic scale; `window` in tokens, `longest` the bytes of
    the longest token: more text than window * longest cannot fit, and is not worth tokenising."""

    characters: int
    window: int
    longest: int
    deadline_ns: int
    clock: Clock

    def check(self, size: int) -> None:
        """Raise InvalidRequest when `size` characters or the time are over."""
        if size > self.window * self.longest:
            raise InvalidRequest(
                f"This model's context window is {self.window} tokens; the request has at least "
                f"{size // self.longest} prompt tokens and asks for at least 1 more.",
                code="context_length_exceeded",
                param="messages",
            )
        if size > self.characters:
            raise InvalidRequest(
                f"the rendered prompt is over {self.characters} characters", param="messages"
            )
        self.in_time()

    def in_time(self) -> None:
        """Raise TookTooLong when the time is over."""
        if self.clock.monotonic_ns() > self.deadline_ns:
            raise TookTooLong("the chat template took too long", param="messages")


def render_chat(
    template: ChatTemplate,
    vocabulary: Vocabulary,
    request: ChatRequest,
    *,
    tools: object,
    date: datetime,
    limits: RenderLimits,
) -> Prompt:
    """The prompt of a conversation, tokenised, with its stable boundary. `tools` as the caller spelt them, or None.

    Raises:
        InvalidRequest: the template refused or failed.
    """
    shield = Shield(vocabulary.control)
    variables: dict[str, Any] = {
        "messages": [_cover(shield, item) for item in template.messages(request.messages)]
    }
    variables["tools"] = shield.cover(tools) if tools else None
    full, bare = shield.uncover_both(*template.render(variables, date=date, limits=limits))
    return _with_boundary(vocabulary, full, bare)


def _cover(shield: Shield, message: dict[str, Any]) -> dict[str, Any]:
    """All of a message but its role, which the schema fixed."""
    return {name: value if name == "role" else shield.cover(value) for name, value in message.items()}


def _with_boundary(vocabulary: Vocabulary, full: Sequence[Segment], bare: Sequence[Segment]) -> Prompt:
    """Tokens of `full`, and how many of them begin `bare` as well. Segments that both share are encoded once."""
    shared = 0
    while shared < min(len(full), len(bare)) and full[shared] == bare[shared]:
        shared += 1
    tokens = vocabulary.encode(full[:shared])
    stable = len(tokens)
    rest, other = (vocabulary.encode(part[shared:], begins=not shared) for part in (full, bare))
    for ours, theirs in zip(rest, other, strict=False):
        if ours != theirs:
            break
        stable += 1
    return Prompt(tokens=[*tokens, *rest], stable=stable)


def _joined(content: str | Sequence[TextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)
