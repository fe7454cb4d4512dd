"""Traces of agents at work: what several tenants' agents ask a server, prompt after prompt.

A conversation is twelve turns upon one system prompt with tools. A turn is a user's message, upon which the model thinks
and calls a tool, and the tool's result, upon which it thinks and answers: two prompts. Thinking is rendered only since the
last user's message, as the templates of reasoning models do, so every new turn drops what the prompts of the turn
before held. After four turns the conversation is tried in three branches. Two short conversations with the same system
prompt come in between. Tenants share the text and no cache.

Prompts are rendered and tokenised by the gateway, which also says where the stable boundary is.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.gateway.model import ServedModel, load_model
from services.gateway.rendering import ChatTemplate, Prompt, RenderLimits, render_chat
from services.gateway.schemas.chat import ChatRequest
from shared.clock import SYSTEM
from shared.config import POCKET

TENANTS: Final = 3
TURNS: Final = 12
BRANCHES: Final = 3
BRANCH_AT: Final = 4
SHORT_TURNS: Final = 2

TEMPLATE: Final = """
{%- set query = namespace(last=0) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set query.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {{- '<|im_start|>' -}}{{- 'user' if message.role == 'tool' else message.role -}}{{- '\\n' -}}
    {%- if message.role == 'assistant' and message.reasoning_content and loop.index0 > query.last -%}
        {{- '<think>\\n' -}}{{- message.reasoning_content -}}{{- '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- message.content -}}
    {%- if message.role == 'system' -%}
        {%- for tool in tools or [] -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {{- '<tool_call>\\n' -}}{{- call.function.name -}}{{- call.function.arguments -}}{{- '\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_TEXT: Final = (
    "the worker reads a block from cache and writes state to grid while broker counts every lease of an entry "
    "so gateway can tell token after token what burst it came from and where prefix ends before next turn begins"
)
_WORDS: Final = tuple(_TEXT.split())
_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{text} Returns one JSON object.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
    for name, text in (
        ("read_file", "Read a file of the project."),
        ("run_tests", "Run the tests of a folder."),
    )
]

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One prompt of the trace."""

    tenant: int
    name: str
    tokens: tuple[int, ...]
    stable: int  #: tokens before the generation header: the boundary that the next turn will come back to


class _Conversation:
    """Writes messages; text is drawn from a seed, so a trace is the same everywhere."""

    def __init__(self, seed: str, messages: Sequence[Message] = ()) -> None:
        self.messages = list(messages)
        self._draw = random.Random(seed)

    def ask(self) -> None:
        """A user's message."""
        self.messages.append({"role": "user", "content": self._text(30, 70)})

    def call(self, turn: int) -> None:
        """The model's tool call, and the tool's result."""
        arguments = json.dumps({"path": f"src/part_{self._draw.randrange(99)}.py"})
        function = {"name": self._draw.choice(["read_file", "run_tests"]), "arguments": arguments}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        self.messages.append(
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": self._text(20, 50),
                "tool_calls": [call],
            }
        )
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": self._text(110, 160)})

    def answer(self) -> None:
        """The model's answer."""
        self.messages.append(
            {"role": "assistant", "content": self._text(20, 40), "reasoning_content": self._text(10, 30)}
        )

    def _text(self, least: int, most: int) -> str:
        return " ".join(self._draw.choice(_WORDS) for _ in range(self._draw.randint(least, most)))


def trace(*, tenants: int = TENANTS, turns: int = TURNS, branches: int = BRANCHES) -> list[Ask]:
    """All prompts in the order in which they come: tenants take turns, and so do the branches of each."""
    writer = _Writer()
    plays = [list(_tenant(writer, tenant, turns, branches)) for tenant in range(tenants)]
    return [ask for step in zip(*plays, strict=True) for ask in step]


def _tenant(writer: _Writer, tenant: int, turns: int, branches: int) -> Iterator[Ask]:
    head = [{"role": "system", "content": _Conversation("system")._text(300, 300)}]
    trunk = _Conversation("trunk", head)
    for turn in range(min(BRANCH_AT, turns)):
        yield from _turn(writer, trunk, tenant, f"trunk/{turn}", turn)
    for number in range(2):
        short = _Conversation(f"short {number}", head)
        for turn in range(SHORT_TURNS):
            yield from _turn(writer, short, tenant, f"short{number}/{turn}", turn)
    tries = [_Conversation(f"branch {number}", trunk.messages) for number in range(branches)]
    for turn in range(BRANCH_AT, turns):
        for number, conversation in enumerate(tries):
            yield from _turn(writer, conversation, tenant, f"branch{number}/{turn}", turn)


def _turn(writer: _Writer, conversation: _Conversation, tenant: int, name: str, turn: int) -> Iterator[Ask]:
    conversation.ask()
    yield writer.ask(conversation.messages, tenant, f"{name}/call")
    conversation.call(turn)
    yield writer.ask(conversation.messages, tenant, f"{name}/answer")
    conversation.answer()


class _Writer:
    """The gateway's way from messages to tokens, with a template that drops old thinking."""

    def __init__(self) -> None:
        self._model: ServedModel = load_model("pocket", POCKET)
        self._template = ChatTemplate(TEMPLATE, {})
        self._known: dict[str, Prompt] = {}

    def ask(self, messages: Sequence[Message], tenant: int, name: str) -> Ask:
        prompt = self._known.get(name) or self._render(messages)
        self._known[name] = prompt
        assert prompt.stable is not None
        return Ask(tenant=tenant, name=name, tokens=tuple(prompt.tokens), stable=prompt.stable)

    def _render(self, messages: Sequence[Message]) -> Prompt:
        request = ChatRequest.model_validate({"model": "pocket", "messages": list(messages)})
        limits = RenderLimits(
            characters=10**6,
            window=self._model.window,
            longest=self._model.vocabulary.longest,
            deadline_ns=SYSTEM.monotonic_ns() + 60 * 10**9,
            clock=SYSTEM,
        )
        return render_chat(
            self._template, self._model.vocabulary, request, tools=_TOOLS, date=SYSTEM.now(), limits=limits
        )
