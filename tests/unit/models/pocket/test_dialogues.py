"""The generated dialogues: seeded, valid, split by wording; and the marks on assistant tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from models.pocket.recipe import phrases, wordings
from models.pocket.recipe.data import ASSISTANT_BIT, mark_assistant
from models.pocket.recipe.dialogues import Renderer, compose
from models.pocket.recipe.evaluate import call_is_valid
from models.pocket.recipe.tools import TOOLS

FOLDER = Path(__file__).parents[4] / "models" / "pocket"
SEEDS = range(120)


@pytest.mark.parametrize("split", [phrases.TRAIN, phrases.HELD])
def test_a_seed_is_a_dialogue(split: str) -> None:
    assert [compose(s, split) for s in SEEDS] == [compose(s, split) for s in SEEDS]
    assert compose(1, phrases.TRAIN) != compose(1, phrases.HELD)


@pytest.mark.parametrize("split", [phrases.TRAIN, phrases.HELD])
def test_every_generated_call_is_valid(split: str) -> None:
    renderer, seen = Renderer(), 0
    for seed in SEEDS:
        dialogue = compose(seed, split)
        for message in dialogue.messages:
            if message.get("tool_calls"):
                text = (
                    renderer.render([message], [])
                    .removeprefix("<|im_start|>assistant\n")
                    .removesuffix("<|im_end|>\n")
                )
                assert call_is_valid(text, dialogue), text
                seen += 1
    assert seen > 50


def test_call_check_refuses_wrong_calls() -> None:
    dialogue = next(d for d in (compose(s, phrases.TRAIN) for s in SEEDS) if d.schemas)
    function = dialogue.schemas[0]["function"]
    for body in (
        "{}",
        "{",
        '{"name": "nothing", "arguments": {}}',
        json.dumps({"name": function["name"], "arguments": {"zz": 1}}),
    ):
        assert not call_is_valid(f"<tool_call>\n{body}\n</tool_call>", dialogue)
    assert not call_is_valid("no call", dialogue)


def test_one_assistant_kind_for_each_assistant_message() -> None:
    for seed in SEEDS:
        dialogue = compose(seed, phrases.TRAIN)
        assert len(dialogue.kinds) == sum(m["role"] == "assistant" for m in dialogue.messages)


def test_wordings_are_split_without_overlap() -> None:
    rng = random.Random(0)
    lists = [wordings.GREETINGS, wordings.NOUN_FORMS, wordings.VERB_FORMS, *(t.asks for t in TOOLS.values())]
    for words in lists:
        seen = {
            split: {phrases.choose(rng, words, split) for _ in range(400)}
            for split in (phrases.TRAIN, phrases.HELD)
        }
        assert seen[phrases.HELD]
        assert not seen[phrases.TRAIN] & seen[phrases.HELD]


def test_noise_never_touches_a_slot() -> None:
    rng = random.Random(1)
    for _ in range(400):
        assert phrases.noisy(rng, "Convert {value} {from} into {to}.").count("{") == 3


def test_assistant_tokens_are_marked_to_their_end() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    header = tokenizer.encode("<|im_start|>assistant\n").ids
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello there<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    marked = mark_assistant(np.array(tokenizer.encode(text).ids, dtype=np.uint16), header)
    written = [int(t) & 0x7FFF for t in marked if t & ASSISTANT_BIT]
    assert tokenizer.decode(written, skip_special_tokens=False) == "Hello there<|im_end|>"
