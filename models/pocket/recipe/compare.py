"""Tokens a verify of every drafter on the same held-out streams: the draft head at K = 1 to 5, the block drafter, by kind of text.

The trunk writes greedy streams after held-out prompts; a drafter is then asked at every position, and rounds are counted
from where it agrees with the stream (see evaluate.py). No cache and the full history: what serving has to come up to.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer

from models.pocket.recipe import weights
from models.pocket.recipe.block import BlockDrafter, Places
from models.pocket.recipe.block_loss import embed_blocks
from models.pocket.recipe.data import END_OF_TEXT, IM_END
from models.pocket.recipe.decode import generate
from models.pocket.recipe.evaluate import Acceptance, chain_hits, loops
from models.pocket.recipe.heldout import Prompt, prompts_of
from models.pocket.recipe.layers import Layout
from models.pocket.recipe.model import Pocket

DEPTHS: Final = (1, 2, 3, 4, 5)
Hits = list[list[list[bool]]]
"""[stream][step s][row p]: whether step s guesses token p + 1 from the anchor p - s."""


@torch.no_grad()
def block_hits(model: Pocket, drafter: BlockDrafter, streams: list[list[int]], firsts: list[int]) -> Hits:
    """The block drafter's guesses from every anchor from `firsts[i]` on, laid out as `chain_hits` does."""
    device = model.model.embed_tokens.weight.device
    steps, batch = drafter.shape.block_size - 1, 32 if device.type == "cuda" else 2
    order = sorted(range(len(streams)), key=lambda i: len(streams[i]))
    result: Hits = [[] for _ in streams]
    for at in range(0, len(order), batch):
        rows = order[at : at + batch]
        length = max(len(streams[i]) for i in rows)
        ids = torch.full((len(rows), length + steps + 1), END_OF_TEXT, device=device)
        for row, index in enumerate(rows):
            ids[row, : len(streams[index])] = torch.tensor(streams[index], device=device)
        count = max(len(streams[i]) - firsts[i] for i in rows)
        anchors = torch.tensor(
            [[min(firsts[i] + a, length) for a in range(count)] for i in rows], device=device
        )
        drafts = propose(model, drafter, ids, anchors)
        places = anchors[..., None] + torch.arange(1, steps + 1, device=device)
        truth = ids[torch.arange(len(rows), device=device)[:, None, None], places]
        right = (drafts == truth).tolist()
        for row, index in enumerate(rows):
            size = len(streams[index])
            table = [[False] * (size + steps) for _ in range(steps)]
            for a in range(size - firsts[index]):
                for step in range(steps):
                    table[step][firsts[index] + a + step] = right[row][a][step]
            result[index] = table
    return result


@torch.no_grad()
def propose(model: Pocket, drafter: BlockDrafter, ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Greedy drafts [B, A, S-1] from `anchors` [B, A] of the rows `ids` [B, T], each row one document."""
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[:, 0] = True
    layout = Layout.of(starts, model.shape)
    outputs = model.model.outputs(ids, layout)
    context = drafter.context([outputs[layer] for layer in drafter.shape.target_layer_ids])
    first = ids.gather(1, anchors)
    places = Places.of(anchors, layout.documents, drafter.shape)
    hidden = drafter(embed_blocks(model, drafter, first), context, places)[..., 1:, :]
    return drafter.walk(hidden, model.logits(hidden), first)


@dataclass(frozen=True, kw_only=True)
class Written:
    """Prompts with the greedy streams (prompt included) that the trunk wrote after them."""

    prompts: list[Prompt]
    firsts: list[int]
    streams: list[list[int]]

    def tally(self, hits: Hits, k: int) -> dict[str, dict[str, Any]]:
        """Acceptance by kind; of free text also without streams that loop."""
        found: dict[str, Acceptance] = {}
        for prompt, first, stream, of in zip(self.prompts, self.firsts, self.streams, hits, strict=True):
            names = [prompt.kind, "held-out templates" if prompt.template else "free text and code"]
            if not prompt.template and not loops(stream):
                names += [f"{name}, no loops" for name in names]
            for name in names:
                found.setdefault(name, Acceptance(k)).walk(of, first, len(stream))
        return {name: found[name].report() for name in sorted(found)}


def write(model: Pocket, tokenizer: Tokenizer, prompts: list[Prompt], budget: int) -> Written:
    """Lets the trunk write at most `budget` tokens after each prompt."""
    encoded = [tokenizer.encode(p.text, add_special_tokens=False).ids for p in prompts]
    streams = generate(model, encoded, budget, (IM_END, END_OF_TEXT))
    return Written(prompts=prompts, firsts=[len(ids) for ids in encoded], streams=streams)


def figures(
    model: Pocket, drafter: BlockDrafter | None, written: Written, report: Callable[[str], None] = print
) -> dict[str, dict[str, dict[str, Any]]]:
    """drafter -> kind of text -> acceptance."""
    chain = chain_hits(model, written.streams, max(DEPTHS))
    result = {f"mtp K={k}": written.tally(chain, k) for k in DEPTHS}
    if drafter is not None:
        hits = block_hits(model, drafter, written.streams, written.firsts)
        result["block"] = written.tally(hits, drafter.shape.block_size - 1)
    for name, kinds in result.items():
        report(f"{name}: " + ", ".join(f"{kind} {v['tokens_per_verify']}" for kind, v in kinds.items()))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, default=weights.FOLDER / "model.safetensors")
    parser.add_argument("--block", type=Path, default=weights.FOLDER / "block" / "model.safetensors")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", help="prompt files; the committed ones unless named"
    )
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = weights.load(arguments.weights).to(device).eval()
    drafter = weights.load_block(arguments.block).to(device).eval() if arguments.block.exists() else None
    tokenizer = Tokenizer.from_file(str(weights.FOLDER / "tokenizer.json"))
    prompts = prompts_of(arguments.prompts)
    written = write(model, tokenizer, prompts, arguments.budget)
    result = {
        "command": " ".join(["python -m models.pocket.recipe.compare", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "prompts": len(prompts),
        "drafters": figures(model, drafter, written),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
