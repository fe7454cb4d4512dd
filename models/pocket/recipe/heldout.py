"""Held-out prompts by kind of text, as files: dialogues of the held-out wordings, held-out pages cut in prose and in code.

`python -m models.pocket.recipe.heldout` writes the small set that is committed to `heldout/`; `--wide` writes a larger one
of the same making to `.work/`, for figures. One JSON object a line: kind, source, licence, template, text (what the model reads).
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from models.pocket.recipe.corpus import SOURCES, WORK
from models.pocket.recipe.data import passages
from models.pocket.recipe.dialogues import Renderer, compose
from models.pocket.recipe.phrases import HELD
from models.pocket.recipe.weights import FOLDER

FOLDER_HELD: Final = FOLDER / "heldout"
CUT: Final = 96
"""Tokens of a page that a prompt has."""
KINDS: Final = ("chat", "tools", "code", "text")
_TOOLS: Final = {"call", "json"}
_CODE_LINE: Final = re.compile(
    r"^(>>> |\.\.\. | {4,}\S|def |class |import |from \w+ import |SELECT |CREATE |@)|[;{}(,]$"
)
_LICENCES: Final = {source.package: source.licence for source in SOURCES}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt. `template` says that it comes from a held-out wording rather than from a page."""

    kind: str
    source: str
    licence: str
    template: bool
    text: str


def dialogue_prompts(seeds: Iterator[int]) -> Iterator[Prompt]:
    """Every assistant turn of held-out dialogues, with the true history before it: tool calls and JSON, other chat."""
    renderer, prose = Renderer(), passages(HELD)
    for seed in seeds:
        dialogue = compose(seed, HELD, prose)
        kinds = iter(dialogue.kinds)
        for at, message in enumerate(dialogue.messages):
            if message["role"] == "assistant":
                kind = "tools" if next(kinds) in _TOOLS else "chat"
                text = renderer.render(dialogue.messages[:at], dialogue.schemas, header=True)
                yield Prompt(
                    kind=kind, source=f"dialogue {seed}", licence="Apache-2.0", template=True, text=text
                )


def is_code(text: str) -> bool:
    """At least half of the last lines look like code."""
    lines = [line for line in text.splitlines()[-8:] if line.strip()]
    return len(lines) >= 4 and sum(bool(_CODE_LINE.search(line)) for line in lines) * 2 >= len(lines)


def page_prompts(tokenizer: Tokenizer, stride: int) -> Iterator[Prompt]:
    """Cuts of CUT tokens from held-out pages every `stride` tokens: code if they end in code, free text otherwise."""
    for line in (WORK / "corpus_heldout.jsonl").read_text().split("\n")[:-1]:
        page = json.loads(line)
        ids = tokenizer.encode(page["text"], add_special_tokens=False).ids
        for at in range(0, len(ids) - 2 * CUT, stride):
            text = tokenizer.decode(ids[at : at + CUT], skip_special_tokens=False)
            licence = _LICENCES[page["name"].split("/")[0]]
            yield Prompt(
                kind="code" if is_code(text) else "text",
                source=page["name"],
                licence=licence,
                template=False,
                text=text,
            )


def collect(dialogues: int, pages_stride: int, each: int) -> list[Prompt]:
    """At most `each` prompts of every kind, drawn with a fixed seed."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    found: dict[str, list[Prompt]] = {kind: [] for kind in KINDS}
    for prompt in (*dialogue_prompts(iter(range(dialogues))), *page_prompts(tokenizer, pages_stride)):
        found[prompt.kind].append(prompt)
    for prompts in found.values():
        random.Random(5).shuffle(prompts)
    return [prompt for kind in KINDS for prompt in found[kind][:each]]


def prompts_of(files: list[Path] | None = None) -> list[Prompt]:
    """Reads prompt files; the committed ones unless others are named."""
    chosen = files or sorted(FOLDER_HELD.glob("*.jsonl"))
    return [Prompt(**json.loads(line)) for file in chosen for line in file.read_text().split("\n")[:-1]]


def write(prompts: list[Prompt], folder: Path) -> None:
    """One file a kind."""
    folder.mkdir(exist_ok=True)
    for kind in KINDS:
        lines = [json.dumps(asdict(p), ensure_ascii=False) for p in prompts if p.kind == kind]
        (folder / f"{kind}.jsonl").write_text("\n".join(lines) + "\n")
        print(kind, len(lines), "prompts ->", folder, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wide", action="store_true", help="250 prompts a kind into .work/heldout")
    arguments = parser.parse_args()
    if arguments.wide:
        write(collect(600, 256, 250), WORK / "heldout")
    else:
        write(collect(100, 512, 24), FOLDER_HELD)


if __name__ == "__main__":
    main()
