"""The committed held-out prompts: every kind, from held-out pages and wordings alone; and the commands of the card exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from models.pocket.recipe.corpus import SOURCES, is_held_out
from models.pocket.recipe.heldout import CUT, KINDS, is_code, prompts_of
from models.pocket.recipe.stages import STAGES

FOLDER = Path(__file__).parents[4] / "models" / "pocket"


def test_every_kind_has_two_dozen_prompts() -> None:
    prompts = prompts_of()
    assert {kind: sum(p.kind == kind for p in prompts) for kind in KINDS} == dict.fromkeys(KINDS, 24)


def test_pages_are_held_out_and_carry_their_licence() -> None:
    licences = {source.package: source.licence for source in SOURCES}
    for prompt in prompts_of():
        if prompt.template:
            assert prompt.licence == "Apache-2.0"
            assert prompt.text.endswith("<|im_start|>assistant\n")
        else:
            assert is_held_out(prompt.source)
            assert prompt.licence == licences[prompt.source.split("/")[0]]
            assert is_code(prompt.text) is (prompt.kind == "code")


def test_a_page_cut_is_short() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    for prompt in prompts_of():
        if not prompt.template:
            assert len(tokenizer.encode(prompt.text, add_special_tokens=False).ids) <= CUT + 8


@pytest.mark.parametrize("page", ["MODEL_CARD.md", "heldout/README.md"])
def test_commands_of_the_page_exist(page: str) -> None:
    text = (FOLDER / page).read_text()
    modules = set(re.findall(r"python -m (models\.pocket\.recipe\.\w+)", text))
    assert modules
    for module in modules:
        assert hasattr(importlib.import_module(module), "main"), module
    for stages in re.findall(r"recipe\.train ([a-z_ ]+)", text):
        assert set(stages.split()) <= set(STAGES)
