"""What drafters are measured on was held out of their training, by the recipe's own rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from models.pocket.recipe.corpus import is_held_out
from models.pocket.recipe.heldout import prompts_of
from models.pocket.recipe.wordings import ROLES
from services.bench.held_out import FREE, KINDS, LIVELY, TEMPLATES, circles, held_out
from shared.errors import EngineFault

HELD = tuple(index % 4 == 3 for index in range(len(ROLES)))
"""`phrases.choose`: one wording in four is for evaluation only."""


def test_prompts_are_the_committed_ones_by_kind() -> None:
    prompts = held_out(3)
    assert [prompt.kind for prompt in prompts] == [kind for kind in KINDS for _ in range(3)]
    assert all(prompt.tokens for prompt in prompts)


def test_pages_are_held_out_by_the_hash_of_their_names() -> None:
    pages = [prompt for prompt in prompts_of() if not prompt.template]
    assert len(pages) == 48
    assert all(is_held_out(page.source) for page in pages)


def test_dialogues_have_none_of_the_wordings_that_training_had() -> None:
    patterns = [
        re.compile(".+?".join(map(re.escape, re.split(r"\{[^{}]*\}", role))), re.DOTALL) for role in ROLES
    ]
    told = 0
    for prompt in prompts_of():
        system = re.match(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", prompt.text, re.DOTALL)
        if prompt.template and system is not None:
            roles = [held for held, role in zip(HELD, patterns, strict=True) if role.search(system[1])]
            assert roles
            assert all(roles)
            told += 1
    assert told >= 40, "dialogues without a system prompt are the exception"


def test_templates_and_free_text_are_never_in_one_group() -> None:
    lively, looping = tuple(range(64)), (5, 6) * 32
    for prompt in held_out(2):
        for said in (lively, looping):
            groups = prompt.groups(said)
            assert prompt.kind in groups
            assert (TEMPLATES in groups) is prompt.template
            assert (FREE in groups) is not prompt.template
            assert (LIVELY in groups) is (not prompt.template and said is lively)
    assert not circles(looping[:20]), "too short to say"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match=r"chat\.jsonl"):
        held_out(1, tmp_path)
    (tmp_path / "chat.jsonl").write_text('{"kind": "chat"}\n', encoding="utf-8")
    with pytest.raises(EngineFault, match="template"):
        held_out(1, tmp_path)
