"""Figures of the pocket model: acceptance at K = 3, tool calls, answers and perplexity, on held-out data.

Dialogues come from the held-out *templates* (wordings that training never saw), free text from held-out pages. A
greedy stream is generated, then the draft head is unrolled along it: where the chain agrees with the stream is exactly
where a greedy verify would accept, so rounds can be counted without running them.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from models.pocket.recipe import weights
from models.pocket.recipe.data import END_OF_TEXT, IM_END, pages, passages
from models.pocket.recipe.decode import generate
from models.pocket.recipe.dialogues import Dialogue, Renderer, compose
from models.pocket.recipe.layers import Layout
from models.pocket.recipe.model import Pocket
from models.pocket.recipe.phrases import HELD

K = 3
BATCH = 64


@dataclass
class Acceptance:
    """Rounds and tokens of simulated verifies of `k` drafts; `accepted[j]` of `drafted[j]` at depth j were right in turn."""

    k: int = K
    rounds: int = 0
    tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafted, self.accepted = [0] * self.k, [0] * self.k

    def walk(self, hits: list[list[bool]], first: int, end: int) -> None:
        """One stream: `first` is the position that the prime emitted, `end` the stream's length. `hits[s][p]`: chain
        step s at row p guesses token p+1."""
        anchor = first
        while anchor < end - 1:
            k = min(self.k, end - 1 - anchor)
            m = 0
            while m < k and hits[m][anchor + m]:
                m += 1
            for depth in range(k):
                self.drafted[depth] += 1
                self.accepted[depth] += depth < m
            emitted = min(m + 1, end - 1 - anchor)
            self.rounds, self.tokens, anchor = self.rounds + 1, self.tokens + emitted, anchor + emitted

    def report(self) -> dict[str, Any]:
        rates = [round(a / max(d, 1), 4) for a, d in zip(self.accepted, self.drafted, strict=True)]
        return {"tokens_per_verify": round(self.tokens / max(self.rounds, 1), 3), "rounds": self.rounds,
                "tokens": self.tokens, "accepted_share_by_depth": rates}  # fmt: skip


@torch.no_grad()
def chain_hits(model: Pocket, streams: list[list[int]], steps: int = K) -> list[list[list[bool]]]:
    """For each stream `steps` lists: whether chain step s at row p has the stream's token p+1 as its argmax."""
    device = model.model.embed_tokens.weight.device
    order = sorted(range(len(streams)), key=lambda i: len(streams[i]))
    result: list[list[list[bool]]] = [[] for _ in streams]
    for at in range(0, len(order), BATCH):
        rows = order[at : at + BATCH]
        length = max(len(streams[i]) for i in rows)
        ids = torch.tensor(
            [streams[i] + [END_OF_TEXT] * (length - len(streams[i])) for i in rows], device=device
        )
        starts = torch.zeros_like(ids, dtype=torch.bool)
        starts[:, 0] = True
        layout = Layout.of(starts, model.shape)
        hidden = model.model(ids, layout)
        outputs = model.mtp.unroll(model.model.embed_tokens(ids), hidden, layout, steps)
        right = [(model.logits(y[:, :-1]).argmax(-1) == ids[:, 1:]).tolist() for y in outputs]
        for row, index in enumerate(rows):
            result[index] = [step[row] for step in right]
    return result


def loops(stream: list[int]) -> bool:
    """Greedy text of a model this small often circles: fewer than 16 different tokens among the last 64."""
    return len(stream) >= 64 and len(set(stream[-64:])) < 16


def acceptance(model: Pocket, prompts: list[list[int]], streams: list[list[int]]) -> dict[str, Any]:
    """Simulated greedy verify over all streams, and over those that do not loop (a loop is easy to draft)."""
    every, lively = Acceptance(), Acceptance()
    for prompt, stream, hits in zip(prompts, streams, chain_hits(model, streams), strict=True):
        every.walk(hits, len(prompt), len(stream))
        if not loops(stream):
            lively.walk(hits, len(prompt), len(stream))
    return {"all": every.report(), "without_loops": lively.report()}


@torch.no_grad()
def perplexity(model: Pocket, texts: list[list[int]], length: int = 1024) -> float:
    """exp of the mean next-token loss over pages cut to `length` tokens."""
    device = model.model.embed_tokens.weight.device
    loss = count = 0.0
    for ids in texts:
        row = torch.tensor([ids[:length]], device=device)
        starts = torch.zeros_like(row, dtype=torch.bool)
        starts[:, 0] = True
        logits = model.logits(model.model(row, Layout.of(starts, model.shape)))
        loss += F.cross_entropy(logits[0, :-1].float(), row[0, 1:], reduction="sum").item()
        count += row.shape[1] - 1
    return float(torch.tensor(loss / count).exp())


def call_is_valid(text: str, dialogue: Dialogue) -> bool:
    """One `<tool_call>` block of valid JSON that names an offered tool and gives exactly its parameters, typed right."""
    if not (text.startswith("<tool_call>\n") and text.endswith("\n</tool_call>")):
        return False
    try:
        call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    except json.JSONDecodeError:
        return False
    if (
        not isinstance(call, dict)
        or set(call) != {"name", "arguments"}
        or not isinstance(call["arguments"], dict)
    ):
        return False
    for schema in dialogue.schemas:
        function = schema["function"]
        if function["name"] == call["name"]:
            properties = function["parameters"]["properties"]
            types = {"string": str, "number": (int, float), "integer": int}
            return set(properties) == set(call["arguments"]) and all(
                isinstance(value, types[properties[key]["type"]]) for key, value in call["arguments"].items()
            )
    return False


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One assistant turn of a held-out dialogue: its prompt, the expected text, its kind."""

    dialogue: Dialogue
    kind: str
    prompt: str
    expected: str


def held_out_turns(count: int) -> list[Turn]:
    """Every assistant turn of `count` held-out dialogues, each with the true history before it."""
    renderer = Renderer()
    turns: list[Turn] = []
    prose = passages(HELD)
    for seed in range(count):
        dialogue = compose(seed, HELD, prose)
        kinds = iter(dialogue.kinds)
        for at, message in enumerate(dialogue.messages):
            if message["role"] == "assistant":
                prompt = renderer.render(dialogue.messages[:at], dialogue.schemas, header=True)
                whole = renderer.render(dialogue.messages[: at + 1], dialogue.schemas)
                expected = whole[len(prompt) :].removesuffix("<|im_end|>\n")
                turns.append(Turn(dialogue=dialogue, kind=next(kinds), prompt=prompt, expected=expected))
    return turns


def dialogue_figures(model: Pocket, tokenizer: Tokenizer, count: int) -> dict[str, Any]:
    """Acceptance, exact answers by kind and valid calls on held-out dialogue templates."""
    turns = held_out_turns(count)
    prompts = [tokenizer.encode(turn.prompt).ids for turn in turns]
    streams = generate(model, prompts, 160, (IM_END, END_OF_TEXT))
    right: dict[str, list[bool]] = defaultdict(list)
    valid, samples = [], []
    for turn, prompt, stream in zip(turns, prompts, streams, strict=True):
        said = tokenizer.decode([t for t in stream[len(prompt) :] if t != IM_END], skip_special_tokens=False)
        right[turn.kind].append(said == turn.expected)
        if turn.kind == "call":
            valid.append(call_is_valid(said, turn.dialogue))
        if said != turn.expected and len(samples) < 40:
            samples.append(
                {"kind": turn.kind, "asked": turn.prompt[-160:], "expected": turn.expected, "said": said}
            )
    exact = {kind: {"exact": round(sum(v) / len(v), 4), "turns": len(v)} for kind, v in sorted(right.items())}
    return {"acceptance": acceptance(model, prompts, streams), "answers": exact, "turns": len(turns),
            "valid_tool_calls": round(sum(valid) / max(len(valid), 1), 4), "tool_calls": len(valid), "misses": samples}  # fmt: skip


def text_figures(model: Pocket, tokenizer: Tokenizer, count: int) -> dict[str, Any]:
    """Acceptance on greedy continuations of held-out pages (128 tokens read, 128 written), and their perplexity."""
    encoded = [e.ids for e in tokenizer.encode_batch(pages(HELD), add_special_tokens=False)]
    cuts = [ids[at : at + 128] for ids in encoded for at in range(0, len(ids) - 128, 512)][:count]
    streams = generate(model, cuts, 128, (END_OF_TEXT,))
    figures = acceptance(model, cuts, streams)
    cut_texts = [tokenizer.decode(s[len(c) :]) for c, s in zip(cuts, streams, strict=True)]
    repeated = sum(map(loops, streams)) / len(streams)
    return {"acceptance": figures, "streams": len(cuts), "perplexity": round(perplexity(model, encoded), 2),
            "looping_share": round(repeated, 3), "samples": cut_texts[:4]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, default=weights.FOLDER / "model.safetensors")
    parser.add_argument("--dialogues", type=int, default=300)
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = weights.load(arguments.weights).to(device).eval()
    tokenizer = Tokenizer.from_file(str(weights.FOLDER / "tokenizer.json"))
    result = {
        "command": " ".join(["python -m models.pocket.recipe.evaluate", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "k": K,
        "held_out_dialogues": dialogue_figures(model, tokenizer, arguments.dialogues),
        "held_out_text": text_figures(model, tokenizer, arguments.texts),
    }
    text = json.dumps(result, indent=1, ensure_ascii=False)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
