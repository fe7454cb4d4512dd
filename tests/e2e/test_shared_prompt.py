"""Conversations of one tenant that share instructions and tools: each has a cache of its own above the branch point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.demo.about import about
from services.demo.client import Answer, Chat
from services.demo.report import reuse_faults, turn_of
from services.demo.script import INSTRUCTIONS, TOOLS, Message
from tests.e2e.conftest import Line

CONVERSATIONS = {
    "a": ("What is a burst?", "And a drafter?"),
    "b": ("Name the parts of Burstline, please.", "Which of them runs the model?"),
    "c": ("Thank you for the help so far!", "Good bye."),
}


def converse(chat: Chat, questions: tuple[str, ...]) -> list[Answer]:
    messages: list[Message] = [{"role": "system", "content": INSTRUCTIONS}]
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        asked: dict[str, Any] = {
            "model": "pocket",
            "messages": messages,
            "tools": TOOLS,
            "temperature": 0,
            "max_tokens": 24,
        }
        answers.append(chat.ask(asked))
        messages.append(answers[-1].message())
    return answers


def test_the_second_conversation_has_a_cache_and_the_third_begins_at_the_branch(
    line: Line, tmp_path: Path
) -> None:
    assert line.burstline("tenant", "create", "sharing").returncode == 0
    made = line.burstline("key", "create", "sharing")
    header = about("pocket").header_tokens
    chat = Chat(line.info.gateway_url, made.stdout.strip())
    begun = {}
    for name, questions in CONVERSATIONS.items():
        answers = converse(chat, questions)
        assert reuse_faults([turn_of(answer) for answer in answers], header) == [], name
        begun[name] = answers[0].cached_tokens
    chat.close()
    assert begun["a"] == 0
    assert begun["c"] > 0, "the branch of the first two was cut"
    audit = line.burstline("audit", "--json", str(tmp_path / "audit.json"))
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert all(bar["holds"] for bar in json.loads((tmp_path / "audit.json").read_text())["bars"])
