"""Held-out prompts of the pocket model: what no drafter was trained on, by kind of text.

The files lie beside the model (`models/pocket/heldout`, whose README says where they come from). Templates are dialogues of
held-out wordings, the rest is cut from held-out pages; figures of the two are never mixed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from shared.config import POCKET
from shared.errors import EngineFault

FOLDER: Final = POCKET / "heldout"
KINDS: Final = ("chat", "tools", "code", "text")
TEMPLATES: Final = "held-out templates"
FREE: Final = "free text and code"
LIVELY: Final = "free text and code, no loops"
"""Greedy text of a model this small often circles, which is easy to draft."""
GROUPS: Final = (*KINDS, TEMPLATES, FREE, LIVELY)
_LOOP_TOKENS: Final = 48
_LOOP_IDS: Final = 12
"""A stream circles whose last `_LOOP_TOKENS` have fewer different ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """`template`: of a held-out wording, not of a page."""

    kind: str
    template: bool
    tokens: tuple[int, ...]

    def groups(self, said: Sequence[int]) -> tuple[str, ...]:
        """The rows of the table that a stream after this prompt counts in."""
        if self.template:
            return self.kind, TEMPLATES
        return (self.kind, FREE) if circles(said) else (self.kind, FREE, LIVELY)


def circles(said: Sequence[int]) -> bool:
    """Whether a stream ends in a loop."""
    return len(said) >= _LOOP_TOKENS and len(set(said[-_LOOP_TOKENS:])) < _LOOP_IDS


def held_out(each: int, folder: Path = FOLDER) -> list[Prompt]:
    """The first `each` prompts of every kind. Raises EngineFault naming the file that is not there or not as described."""
    tokenizer = Tokenizer.from_file(str(POCKET / "tokenizer.json"))
    return [prompt for kind in KINDS for prompt in _read(folder / f"{kind}.jsonl", tokenizer)[:each]]


def _read(path: Path, tokenizer: Tokenizer) -> list[Prompt]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        return [
            Prompt(
                kind=row["kind"],
                template=row["template"],
                tokens=tuple(tokenizer.encode(row["text"], add_special_tokens=False).ids),
            )
            for row in rows
        ]
    except (OSError, ValueError, KeyError) as error:
        raise EngineFault(f"{path}: held-out prompts cannot be read: {error}") from error
