"""Choosing wordings: the train/held-out split, typing noise, system prompts.

Every list of wordings splits by index: one wording in four is for evaluation only (`HELD`), so that the figures on
held-out templates are about wordings that training never saw.
"""

from __future__ import annotations

import random
from typing import Final

from models.pocket.recipe.wordings import COMPANIES, FILLERS, NAMES, ROLES, RULES, SMALL_WORDS

TRAIN: Final = "train"
HELD: Final = "held"


def choose(rng: random.Random, wordings: tuple[str, ...], split: str) -> str:
    """One wording of `split`. Lists shorter than four have no held-out part and serve both."""
    if len(wordings) < 4:
        return rng.choice(wordings)
    part = [w for i, w in enumerate(wordings) if (i % 4 == 3) == (split == HELD)]
    return rng.choice(part)


def noisy(rng: random.Random, wording: str) -> str:
    """The wording as different people would type it: small words dropped, a filler added, a letter swapped, case lost.
    Slots in braces are never touched. Keeps the model from learning wordings by heart.
    """
    words = wording.split(" ")
    if rng.random() < 0.25:
        kept = [w for w in words if w.lower().strip("?.,") not in SMALL_WORDS or rng.random() < 0.6]
        words = kept if len(kept) > 1 or (kept and "{" in kept[0]) else words
    if rng.random() < 0.12:
        words.insert(rng.randint(0, len(words)), rng.choice(FILLERS))
    if rng.random() < 0.06:
        at = rng.randrange(len(words))
        if "{" not in words[at] and len(words[at]) > 4:
            cut = rng.randint(1, len(words[at]) - 3)
            word = words[at]
            words[at] = word[:cut] + word[cut + 1] + word[cut] + word[cut + 2 :]
    text = " ".join(words)
    return text.lower() if "{" not in text and rng.random() < 0.1 else text


def system_prompt(rng: random.Random, split: str) -> str:
    """A role and zero to fourteen rules: about 8 to 300 tokens."""
    parts = [choose(rng, ROLES, split)]
    count = rng.choice((0, 1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 12, 14))
    held = [rule for i, rule in enumerate(RULES) if i % 4 == 3]
    pool = list(RULES) if split == HELD else [rule for rule in RULES if rule not in held]
    parts += rng.sample(pool, min(count, len(pool)))
    return " ".join(parts).format(company=rng.choice(COMPANIES), name=rng.choice(NAMES))
