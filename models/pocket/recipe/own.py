"""The trunk's own continuations, as training data for drafters: what they draft when serving is such text.

`write_own_streams` is what the first draft-head stages used. `python -m models.pocket.recipe.own` writes the wider shards of
the later stages, from the weights that ship: `own_prose` and `own_chat`.
"""

from __future__ import annotations

import argparse
from typing import Final

import numpy as np
import torch

from models.pocket.recipe import weights
from models.pocket.recipe.batches import load_shard
from models.pocket.recipe.corpus import WORK
from models.pocket.recipe.data import ASSISTANT_BIT, END_OF_TEXT, ID_MASK, IM_END
from models.pocket.recipe.decode import generate
from models.pocket.recipe.model import Pocket

LONGEST_PROMPT: Final = 640
"""Tokens before an answer that `own_chat` regenerates; longer dialogues are left out."""


def marked(prompts: list[list[int]], streams: list[list[int]]) -> list[np.ndarray]:
    """Each stream with the assistant bit on its continuation, then the end of its document."""
    parts = []
    for prompt, stream in zip(prompts, streams, strict=True):
        tokens = np.array(stream, dtype=np.uint16)
        tokens[len(prompt) :] |= ASSISTANT_BIT
        parts += [tokens, np.array([END_OF_TEXT], dtype=np.uint16)]
    return parts


def keep(name: str, parts: list[np.ndarray]) -> None:
    """Writes a shard."""
    tokens = np.concatenate(parts)
    np.savez_compressed(WORK / f"{name}.npz", tokens=tokens)
    print(f"{name}: {len(tokens):,} tokens", flush=True)


def write_own_streams(model: Pocket, *, streams: int = 4096, budget: int = 192, trial: bool = False) -> None:
    """Continues cuts of the training prose (three in four greedily, one at temperature 0.7) and writes the shard
    `own_train`; continuation tokens carry the assistant bit, so they weigh most.
    """
    if trial:
        streams, budget = 16, 80
    lengths, temperatures = (24, 64, 128, 64), (0.0, 0.0, 0.0, 0.7)
    write_prose(model, "own_train", streams, budget, lengths, temperatures, seed=17)


def write_prose(
    model: Pocket,
    name: str,
    streams: int,
    budget: int,
    lengths: tuple[int, ...],
    temperatures: tuple[float, ...],
    *,
    seed: int,
) -> None:
    """Continues `streams` cuts of the training prose, an equal part for each (prompt length, temperature)."""
    shard = load_shard("text_train", torch.device("cpu")) & ID_MASK
    generator = torch.Generator().manual_seed(seed)
    parts: list[np.ndarray] = []
    for part, (length, temperature) in enumerate(zip(lengths, temperatures, strict=True)):
        at = torch.randint(0, len(shard) - length, (streams // len(lengths),), generator=generator)
        prompts = [shard[i : i + length].tolist() for i in at.tolist()]
        written = generate(model, prompts, budget, (END_OF_TEXT,), temperature=temperature, seed=part)
        parts += marked(prompts, written)
    keep(name, parts)


def answer_prompts(shard: np.ndarray, count: int, seed: int) -> list[list[int]]:
    """Prompts of `count` answers drawn from a dialogue shard: all of the dialogue up to where the assistant writes."""
    written = (shard & ASSISTANT_BIT) != 0
    begins = np.flatnonzero(written[1:] & ~written[:-1]) + 1
    ends = np.flatnonzero((shard & ID_MASK) == END_OF_TEXT)
    opened = np.concatenate(([0], ends + 1))[np.searchsorted(ends, begins)]
    fits = begins - opened <= LONGEST_PROMPT
    begins, opened = begins[fits], opened[fits]
    chosen = np.random.default_rng(seed).choice(len(begins), min(count, len(begins)), replace=False)
    return [(shard[opened[i] : begins[i]] & ID_MASK).tolist() for i in sorted(chosen)]


def write_dialogues(
    model: Pocket, name: str, streams: int, budget: int, temperatures: tuple[float, ...]
) -> None:
    """Writes other answers into `streams` dialogues of the training shard, an equal part at each temperature."""
    shard = np.load(WORK / "chat_train.npz")["tokens"]
    parts: list[np.ndarray] = []
    for part, temperature in enumerate(temperatures):
        prompts = answer_prompts(shard, streams // len(temperatures), seed=100 + part)
        written = generate(model, prompts, budget, (IM_END, END_OF_TEXT), temperature=temperature, seed=part)
        parts += marked(prompts, written)
    keep(name, parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Writes own_prose and own_chat with the weights that ship; wants a GPU."
    )
    parser.add_argument(
        "--prose", type=int, default=32_768, help="streams of prose; 0 leaves the shard as it is"
    )
    parser.add_argument("--chat", type=int, default=16_384, help="answers in dialogues; 0 likewise")
    parser.add_argument("--budget", type=int, default=144, help="tokens written at most")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = weights.load(weights.FOLDER / "model.safetensors").to(device)
    lengths, temperatures = (24, 64, 128, 96), (0.0, 0.4, 0.0, 0.8)
    if arguments.prose:
        write_prose(model, "own_prose", arguments.prose, arguments.budget, lengths, temperatures, seed=18)
    if arguments.chat:
        write_dialogues(model, "own_chat", arguments.chat, arguments.budget, (0.3, 0.8))


if __name__ == "__main__":
    main()
