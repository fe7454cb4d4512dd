"""One tool call as the model writes it: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json
import re
from typing import Final

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder()


def parse_call(text: str) -> tuple[str, str] | None:
    """(name, arguments) of a call, the arguments in the model's own spelling; None if it is not a valid call.

    The spelling is kept because the next turn renders it again: other spaces would be other tokens.
    """
    try:
        members = _members(text)
        name = json.loads(members["name"])
        arguments = members.get("arguments", "{}")
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not name or not is_object:
        return None
    return name, arguments


def _members(text: str) -> dict[str, str]:
    """Key -> the value's own text, of the one object that `text` holds. Raises ValueError."""
    position = _expect(text, 0, "{")
    members: dict[str, str] = {}
    while True:
        position = _skip(text, position)
        if text[position : position + 1] == "}" and not members:
            break
        key, position = _DECODER.raw_decode(text, position)
        if not isinstance(key, str) or key in members:
            raise ValueError("not a key")
        begin = _skip(text, _expect(text, position, ":"))
        _, position = _DECODER.raw_decode(text, begin)
        members[key] = text[begin:position]
        position = _skip(text, position)
        if text[position : position + 1] != ",":
            break
        position += 1
    if _skip(text, _expect(text, position, "}")) != len(text):
        raise ValueError("more than one object")
    return members


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _expect(text: str, position: int, character: str) -> int:
    position = _skip(text, position)
    if text[position : position + 1] != character:
        raise ValueError(f"expected {character}")
    return position + 1
