"""Trains the pocket model in stages on one device; each is seeded and resumes from its last checkpoint.

    base        prose and dialogues, every token counts
    chat        mostly dialogues, the assistant's tokens count most
    mtp         the draft head alone, unrolled three steps, against the frozen trunk's own distribution
    polish      the trunk once more, on the last edition of the dialogues
    mtp_polish  the draft head once more, against the polished trunk
    mtp_five    the draft head unrolled five steps, on the wider own streams
    block       the block drafter, against the frozen trunk

`python -m models.pocket.recipe.train base chat mtp polish mtp_polish` writes .work/<stage>.safetensors after each;
`mtp_five` and `block` start from the weights that ship and want the shards that `own` writes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.pocket.recipe import weights as checkpoints
from models.pocket.recipe.batches import Mixture, load_shard
from models.pocket.recipe.block import BlockDrafter, BlockShape
from models.pocket.recipe.block_loss import block_loss, draw_anchors
from models.pocket.recipe.corpus import WORK
from models.pocket.recipe.layers import Layout, Shape
from models.pocket.recipe.loop import Run, Work
from models.pocket.recipe.model import Pocket
from models.pocket.recipe.own import write_own_streams
from models.pocket.recipe.stages import SHIPPED, STAGES, Stage

CHAIN_WEIGHTS: Final = (1.0, 0.8, 0.65, 0.5, 0.4)
"""Loss of chain steps 1 to 5: a later draft counts only after the earlier ones."""


def language_loss(model: Pocket, ids: Tensor, starts: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy of the next token."""
    logits = model.logits(model.model(ids, Layout.of(starts, model.shape)))
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def draft_loss(model: Pocket, steps: int, ids: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy of `steps` chain steps against the trunk: half its whole distribution, half its argmax."""
    layout = Layout.of(starts, model.shape)
    with torch.no_grad():
        hidden = model.model(ids, layout)
        teacher = model.logits(hidden).float()
        soft, hard = teacher.softmax(-1), teacher.argmax(-1)
        embedded = model.model.embed_tokens(ids)
    total = hidden.new_zeros(())
    shares = CHAIN_WEIGHTS[:steps]
    for share, y in zip(shares, model.mtp.unroll(embedded, hidden, layout, steps), strict=True):
        log_p = model.logits(y).float().log_softmax(-1)
        losses = -0.5 * (soft * log_p).sum(-1) - 0.5 * log_p.gather(-1, hard[..., None])[..., 0]
        total = total + share * (losses * weights).sum() / weights.sum()
    return total / sum(shares)


def plan(stage: Stage, model: Pocket) -> Work:
    """What the stage trains; everything else stands still."""
    device = model.model.norm.weight.device
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(stage.part == ("mtp" if name.startswith("mtp.") else "trunk"))
    if stage.part == "block":
        drafter = BlockDrafter(BlockShape.load(checkpoints.FOLDER / "block"))
        drafter.initialise(20261130, 1.0 + model.model.norm.weight.cpu())
        drafter.to(device)
        return Work(
            module=drafter,
            trained=list(drafter.named_parameters()),
            inputs=lambda b: (b.ids, b.starts, draw_anchors(b, stage.anchors, drafter.shape.block_size)),
            loss=partial(block_loss, model, drafter),
        )
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if stage.part == "mtp":
        return Work(
            module=model,
            trained=trained,
            inputs=lambda b: (b.ids, b.starts, b.weights),
            loss=partial(draft_loss, model, stage.chain),
        )
    return Work(
        module=model,
        trained=trained,
        inputs=lambda b: (b.ids, b.starts, b.targets, b.weights),
        loss=partial(language_loss, model),
    )


def compile_blocks(layers: nn.ModuleList) -> None:
    """Compiles each layer on its own: one graph for those of a kind."""
    for layer in layers:
        layer.compile(dynamic=False)


def build_mixture(stage: Stage, device: torch.device) -> Mixture:
    shards = [load_shard(name, device) for name in stage.shares]
    dialogue = [not name.startswith("text") for name in stage.shares]
    return Mixture(
        shards,
        list(stage.shares.values()),
        dialogue=dialogue,
        other_weight=stage.other_weight,
        seed=stage.seed,
    )


def start_model(stage: Stage, device: torch.device) -> Pocket:
    """The weights of the stage before, those that ship, or a seeded random start."""
    if stage.after is None:
        model = Pocket(Shape.load(checkpoints.FOLDER))
        model.initialise(20261129)
    elif stage.after == SHIPPED:
        model = checkpoints.load(checkpoints.FOLDER / "model.safetensors")
    else:
        model = checkpoints.load(WORK / f"{stage.after}.safetensors")
    return model.to(device)


def train(
    stage: Stage,
    device: torch.device,
    *,
    trial: bool,
    compiled: bool,
    captured: bool,
    seconds: float | None,
    pause: float | None,
    checkpoints_at: Path,
) -> bool:
    """One stage from its start, or its checkpoint, to its file and its log; whether it came so far before `pause`."""
    model = start_model(stage, device)
    if "own_train" in stage.shares:
        write_own_streams(model, trial=trial)
    work = plan(stage, model)
    if compiled:
        compile_blocks(model.model.layers)
        if stage.part == "block":
            compile_blocks(work.module.layers)
    run = Run(stage, work, captured=captured, folder=checkpoints_at)
    if not run.finish(build_mixture(stage, device), seconds, pause):
        print(f"{stage.name}: {run.step} of {run.stage.steps} steps, paused", flush=True)
        return False
    checkpoints.save(work.module, WORK / f"{stage.name}.safetensors")
    (WORK / f"{stage.name}.log.json").write_text(json.dumps(run.log))
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="+", choices=list(STAGES))
    parser.add_argument("--steps", type=int, help="another number of steps, for a trial run")
    parser.add_argument("--rows", type=int, help="at most this many rows of a shard, for a trial run")
    parser.add_argument("--length", type=int, help="another row length, for a trial run")
    parser.add_argument("--anchors", type=int, help="another number of blocks a row, for a trial run")
    parser.add_argument("--seconds", type=float, help="fewer steps if the stage would take longer")
    parser.add_argument("--pause", type=float, help="stop after so many seconds; the same command goes on")
    parser.add_argument("--checkpoints", type=Path, default=WORK, help="the folder for checkpoints")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--capture", action="store_true", help="replay loss and gradients as one CUDA graph")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    for name in arguments.stages:
        stage = STAGES[name]
        stage = replace(
            stage,
            steps=arguments.steps or stage.steps,
            length=arguments.length or stage.length,
            anchors=arguments.anchors or stage.anchors,
            shares={k: min(v, arguments.rows or v) for k, v in stage.shares.items()},
        )
        done = train(
            stage,
            device,
            trial=arguments.rows is not None,
            compiled=arguments.compile,
            captured=arguments.capture,
            seconds=arguments.seconds,
            pause=arguments.pause,
            checkpoints_at=arguments.checkpoints,
        )
        if not done:
            break


if __name__ == "__main__":
    main()
