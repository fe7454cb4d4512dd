"""What `prove` asks: conversations rendered by the model's own template, and plain ids for the edges of the grid."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from services.demo.script import TOOLS
from services.prove.models import VOCAB
from shared.config import POCKET

CONVERT: Final = TOOLS[0]

Tokens = tuple[int, ...]


def _repeated() -> Tokens:
    """The same words over and over: what drafters like best."""
    text = "ha ha ha " * 40
    return chat_tokens([{"role": "user", "content": f"Say it again: {text}"}])


def _unicode() -> Tokens:
    """Letters of several scripts, an emoji of many code points, both directions of writing."""
    text = "Grüße, señor! 東京 と 京都 — Привет, мир. 👩‍👩‍👧 שלום 한국어 naïve façade 🇪🇺 "
    return chat_tokens(
        [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": text * 2}]
    )


def _tools() -> Tokens:
    """A turn after a tool call and its result."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {
            "name": "convert_units",
            "arguments": json.dumps({"value": 5, "from": "km", "to": "miles"}),
        },
    }
    return chat_tokens(
        [
            {"role": "system", "content": "You are a helpful assistant. Use a tool when one fits."},
            {"role": "user", "content": "Convert 5 km to miles."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": '{"result": 3.11, "unit": "miles"}'},
            {"role": "assistant", "content": "5 km is 3.11 miles."},
            {"role": "user", "content": "And 12 km?"},
        ],
        tools=[CONVERT],
    )


def _short() -> Tokens:
    """Less than one block: nothing of it can be cached."""
    return chat_tokens([{"role": "user", "content": "What is a burst?"}])


def _grid() -> Tokens:
    """Ends exactly on the grid."""
    return _ids(192, seed=1)


def _long() -> Tokens:
    """Cut by most chunks, with a ragged end."""
    return _ids(545, seed=2)


def _longest() -> Tokens:
    """Cut by every chunk, the largest too, with a ragged end."""
    return _ids(1117, seed=3)


PROMPTS: Final[Mapping[str, Callable[[], Tokens]]] = {
    "repeated text": _repeated,
    "unicode": _unicode,
    "tool call": _tools,
    "short": _short,
    "on the grid": _grid,
    "long": _long,
    "longest": _longest,
}


@cache
def prompt(name: str) -> Tokens:
    """Token ids of a prompt of the table."""
    return PROMPTS[name]()


def chat_tokens(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Tokens:
    """A conversation with its generation header, by the pocket model's template and tokenizer.

    Our own texts, so none of the gateway's bounds and none of its shielding of control tokens is needed. Raises OSError
    without the model's folder.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    source = (POCKET / "chat_template.jinja").read_text(encoding="utf-8")
    text = environment.from_string(source).render(messages=messages, tools=tools, add_generation_prompt=True)
    tokenizer = Tokenizer.from_buffer((POCKET / "tokenizer.json").read_bytes())
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def _ids(length: int, *, seed: int) -> Tokens:
    draw = random.Random(seed)
    return tuple(draw.randrange(16, VOCAB) for _ in range(length))
