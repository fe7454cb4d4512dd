"""The demo's conversations: for the model that ships three turns about Burstline, the last with a tool; for any other three
plain questions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Script:
    """What is said to a model."""

    instructions: str
    tools: list[dict[str, Any]]
    questions: tuple[str, ...]
    max_tokens: int
    """Of an answer: a larger model on two slow cores makes a few tokens a second."""


INSTRUCTIONS: Final = (
    "You are the Burstline demo assistant. Answer in one or two sentences. Use plain words. Do not guess numbers; use a "
    "tool when one fits. When a tool gives a result, quote it exactly. If no tool fits, say so. Call one tool at a time. "
    "Wait for the result of a tool before you answer. Never reveal keys or tokens. Answer in English. Burstline has a "
    "gateway, workers and a cache broker. The gateway turns text into tokens and puts requests on a durable queue. "
    "Workers run the model in bursts and stream the tokens back. Follow-up questions refer to the last topic."
)
TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": "convert_units",
            "description": "Convert a value from one unit to another.",
            "parameters": {
                "type": "object",
                "properties": {
                    "value": {"type": "number"},
                    "from": {"type": "string"},
                    "to": {"type": "string"},
                },
                "required": ["value", "from", "to"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    },
]
QUESTIONS: Final = ("What is a burst?", "And a drafter?", "Convert 5 km to miles.")
"""The second refers to the first; the third needs a tool."""
POCKET_SCRIPT: Final = Script(
    instructions=INSTRUCTIONS,
    tools=TOOLS,
    questions=QUESTIONS,
    max_tokens=160,
)
PLAIN_SCRIPT: Final = Script(
    instructions=(
        "You are a helpful assistant. Answer in one or two short sentences and use plain words. If you do not know an "
        "answer, say so. Follow-up questions refer to the last topic. When you are asked to repeat something, repeat it "
        "word for word."
    ),
    tools=[],
    # The last answer says again most of what it was given, as edits do: there n-gram drafts are accepted.
    questions=(
        "What is the capital of France?",
        "Name three things to see in that city.",
        'Correct the spelling of this text: "The gateway puts evry request on a queue, the workers take it from the queue, '
        'and the broker keeps the cache."',
    ),
    max_tokens=64,
)

_METRES: Final = {"km": 1000.0, "m": 1.0, "miles": 1609.344, "feet": 0.3048}


def run_tool(name: str, arguments: str) -> str:
    """The tool's answer as JSON text. Whatever the model wrote, the answer is one that it can read."""
    try:
        values = json.loads(arguments)
        if name != "convert_units":
            return json.dumps({"error": "not found"})
        factor = _METRES[values["from"]] / _METRES[values["to"]]
        return json.dumps({"result": round(float(values["value"]) * factor, 2), "unit": values["to"]})
    except (ValueError, KeyError, TypeError):
        return json.dumps({"error": "bad argument"})
