"""Prepares the token shards: free text and generated dialogues, each a train and a held-out part.

A shard is one flat uint16 array: token ids in the low 15 bits, the high bit set on tokens that an assistant wrote
(its answer and the closing mark). Documents follow one another, each closed by `<|endoftext|>`. Everything is seeded:
the same tokenizer, corpus and count give the same bytes. `tokenizer` writes what tokenizer.py is trained on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from models.pocket.recipe.corpus import WORK
from models.pocket.recipe.dialogues import FOLDER, Renderer, compose
from models.pocket.recipe.phrases import HELD, TRAIN

ASSISTANT_BIT: Final = 0x8000
ID_MASK: Final = 0x7FFF
END_OF_TEXT, IM_START, IM_END = 0, 1, 2


def pages(split: str) -> list[str]:
    """Corpus texts of one split, in file order."""
    name = "corpus_train.jsonl" if split == TRAIN else "corpus_heldout.jsonl"
    return [json.loads(line)["text"] for line in (WORK / name).open()]


def write_passages(split: str) -> None:
    """Writes .work/passages_<split>.json: prose paragraphs of 80 to 700 characters for system prompts, at most 4,000."""
    found = [
        " ".join(part.split())
        for text in pages(split)
        for part in re.split(r"\n\s*\n", text)
        if 80 <= len(part) <= 700 and part.rstrip().endswith(".")
    ]
    random.Random(split).shuffle(found)
    (WORK / f"passages_{split}.json").write_text(json.dumps(found[:4000]))


def passages(split: str) -> tuple[str, ...]:
    """What `write_passages` kept."""
    return tuple(json.loads((WORK / f"passages_{split}.json").read_text()))


def mark_assistant(ids: np.ndarray, header: list[int]) -> np.ndarray:
    """Sets ASSISTANT_BIT from the end of each assistant header to its `<|im_end|>`, inclusive. ids [n] uint16."""
    marked = ids.copy()
    for start in np.flatnonzero(ids == IM_START):
        first = start + len(header)
        if ids[start:first].tolist() == header:
            ends = np.flatnonzero(ids[first:] == IM_END)
            stop = first + (ends[0] + 1 if len(ends) else len(ids) - first)
            marked[first:stop] |= ASSISTANT_BIT
    return marked


def render_texts(seeds: range, split: str, prose: tuple[str, ...]) -> list[str]:
    """Rendered dialogues; one in five with schemas as bare jinja2 prints them."""
    renderer = Renderer()
    texts = []
    for seed in seeds:
        dialogue = compose(seed, split, prose)
        texts.append(renderer.render(dialogue.messages, dialogue.schemas, plain_json=seed % 5 == 0))
    return texts


def encode_dialogues(seeds: range, split: str, prose: tuple[str, ...]) -> np.ndarray:
    """One flat array of the dialogues of `seeds`."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    header = tokenizer.encode("<|im_start|>assistant\n").ids
    parts = []
    for text in render_texts(seeds, split, prose):
        ids = np.array(tokenizer.encode(text).ids, dtype=np.uint16)
        parts += [mark_assistant(ids, header), np.array([END_OF_TEXT], dtype=np.uint16)]
    return np.concatenate(parts)


def encode_pages(split: str) -> np.ndarray:
    """The corpus as one flat array, pages in a seeded order."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    texts = pages(split)
    random.Random(7).shuffle(texts)
    parts = []
    for at in range(0, len(texts), 64):
        for encoding in tokenizer.encode_batch(texts[at : at + 64], add_special_tokens=False):
            parts.append(np.array([*encoding.ids, END_OF_TEXT], dtype=np.uint16))
    return np.concatenate(parts)


def slices(count: int, size: int = 500) -> Iterator[range]:
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


def write(name: str, tokens: np.ndarray) -> None:
    path = WORK / f"{name}.npz"
    np.savez(path, tokens=tokens)
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
    print(f"{name}: {len(tokens):,} tokens, {path.stat().st_size / 1e6:.1f} MB, sha256 {digest}", flush=True)


def tokenizer_text(count: int) -> None:
    """Writes .work/tokenizer.jsonl: dialogues and a spread of pages, what the tokenizer is trained on."""
    texts = render_texts(range(10**6, 10**6 + count), TRAIN, passages(TRAIN))
    chosen = random.Random(3).sample(pages(TRAIN), 900)
    with (WORK / "tokenizer.jsonl").open("w") as file:
        for text in [*texts, *(page[:20_000] for page in chosen)]:
            file.write(json.dumps({"text": text}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts", nargs="+", choices=["tokenizer", "text", "chat"], help="`text` comes before `chat`"
    )
    parser.add_argument("--dialogues", type=int, default=300_000)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    if "tokenizer" in arguments.parts:
        write_passages(TRAIN)
        tokenizer_text(4000)
    if "text" in arguments.parts:
        for split in (TRAIN, HELD):
            write_passages(split)
            write(f"text_{split}", encode_pages(split))
    if "chat" in arguments.parts:
        with ProcessPoolExecutor(arguments.workers) as pool:
            work = partial(encode_dialogues, split=TRAIN, prose=passages(TRAIN))
            write("chat_train", np.concatenate(list(pool.map(work, slices(arguments.dialogues)))))


if __name__ == "__main__":
    main()
