"""The trunk's own continuations, as training data for the draft head: what it drafts when serving is such text."""

from __future__ import annotations

import numpy as np
import torch

from models.pocket.recipe.batches import load_shard
from models.pocket.recipe.corpus import WORK
from models.pocket.recipe.data import ASSISTANT_BIT, END_OF_TEXT, ID_MASK
from models.pocket.recipe.decode import generate
from models.pocket.recipe.model import Pocket


def write_own_streams(model: Pocket, *, streams: int = 4096, budget: int = 192, trial: bool = False) -> None:
    """Continues cuts of the training prose (three in four greedily, one at temperature 0.7) and writes the shard
    `own_train`; continuation tokens carry the assistant bit, so they weigh most.
    """
    if trial:
        streams, budget = 16, 80
    shard = load_shard("text_train", torch.device("cpu")) & ID_MASK
    generator = torch.Generator().manual_seed(17)
    parts: list[np.ndarray] = []
    for part, temperature in enumerate((0.0, 0.0, 0.0, 0.7)):
        length = (24, 64, 128, 64)[part]
        at = torch.randint(0, len(shard) - length, (streams // 4,), generator=generator)
        prompts = [shard[i : i + length].tolist() for i in at.tolist()]
        for prompt, stream in zip(
            prompts,
            generate(model, prompts, budget, (END_OF_TEXT,), temperature=temperature, seed=part),
            strict=True,
        ):
            tokens = np.array(stream, dtype=np.uint16)
            tokens[len(prompt) :] |= ASSISTANT_BIT
            parts += [tokens, np.array([END_OF_TEXT], dtype=np.uint16)]
    np.savez_compressed(WORK / "own_train.npz", tokens=np.concatenate(parts))
