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
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.pocket.recipe import weights
from models.pocket.recipe.batches import Batch, Mixture, load_shard
from models.pocket.recipe.block import BlockDrafter, BlockShape
from models.pocket.recipe.block_loss import block_loss
from models.pocket.recipe.corpus import WORK
from models.pocket.recipe.layers import Layout, Shape
from models.pocket.recipe.model import Pocket
from models.pocket.recipe.own import write_own_streams

CHAIN_WEIGHTS: Final = (1.0, 0.8, 0.65, 0.5, 0.4)
"""Loss of chain steps 1 to 5: a later draft counts only after the earlier ones."""
CHECKPOINT_STEPS: Final = 1000
SHIPPED: Final = "shipped"
TABLES: Final = ("embed_tokens.weight", "codebook")
"""Rows of these are looked up: no matrices for Muon."""
Part = Literal["trunk", "mtp", "block"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One run. `after` names the stage whose weights it starts from, SHIPPED those of the folder; `part` is what is trained,
    the rest stands still; `shares` are rows of a batch from the shards named; until `decay_from` of the run the rate is
    constant. `chain`: steps that the draft head is unrolled; `anchors`: blocks drawn from a row.
    """

    name: str
    after: str | None
    part: Part = "trunk"
    chain: int = 3
    anchors: int = 0
    steps: int
    length: int
    shares: dict[str, int]
    other_weight: float
    rate: float
    decay_from: float
    warmup: int = 100
    seed: int


STAGES: Final = {
    stage.name: stage
    for stage in (
        Stage(
            name="base", after=None, steps=3000, length=2048, shares={"text_train": 18, "chat_train": 14},
            other_weight=0.3, rate=4e-3, decay_from=0.6, seed=11,
        ),
        Stage(
            name="chat", after="base", steps=2800, length=2048, shares={"text_train": 6, "chat_train": 26},
            other_weight=0.1, rate=2e-3, decay_from=0.1, seed=12,
        ),
        Stage(
            name="mtp", after="chat", part="mtp", steps=2000, length=1024,
            shares={"text_train": 8, "chat_train": 14, "own_train": 10},
            other_weight=0.2, rate=4e-3, decay_from=0.3, seed=13,
        ),
        Stage(
            name="polish", after="mtp", steps=800, length=2048, shares={"text_train": 6, "chat_train": 26},
            other_weight=0.1, rate=1.2e-3, decay_from=0.1, warmup=20, seed=14,
        ),
        Stage(
            name="mtp_polish", after="polish", part="mtp", steps=700, length=1024,
            shares={"text_train": 8, "chat_train": 14, "own_train": 10},
            other_weight=0.2, rate=2e-3, decay_from=0.1, warmup=20, seed=15,
        ),
        Stage(
            name="mtp_five", after=SHIPPED, part="mtp", chain=5, steps=1800, length=1024,
            shares={"text_train": 4, "chat_train": 10, "own_prose": 10, "own_chat": 8},
            other_weight=0.1, rate=2e-3, decay_from=0.2, warmup=50, seed=16,
        ),
        Stage(
            name="block", after=SHIPPED, part="block", anchors=128, steps=6000, length=1024,
            shares={"text_train": 4, "chat_train": 10, "own_prose": 10, "own_chat": 8},
            other_weight=0.02, rate=4e-3, decay_from=0.4, warmup=200, seed=17,
        ),
    )
}  # fmt: skip


def optimisers(parameters: list[tuple[str, nn.Parameter]], rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for embedding, norms, convolutions and decays."""
    matrices = [
        p for name, p in parameters if p.ndim == 2 and not name.endswith(TABLES) and min(p.shape) >= 64
    ]
    chosen = {id(p) for p in matrices}
    rest = [p for _, p in parameters if id(p) not in chosen]
    muon = torch.optim.Muon(
        matrices, lr=rate, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=rest[0].is_cuda)
    return [muon, adam]


def rate_at(stage: Stage, step: int) -> float:
    """Linear warm-up, a constant part, then linear decay to 2 %."""
    if step < stage.warmup:
        return stage.rate * (step + 1) / stage.warmup
    done = step / stage.steps
    left = 1.0 if done < stage.decay_from else (1.0 - done) / (1.0 - stage.decay_from)
    return stage.rate * max(left, 0.02)


def language_loss(model: Pocket, batch: Batch) -> Tensor:
    """Weighted mean cross-entropy of the next token."""
    logits = model.logits(model.model(batch.ids, Layout.of(batch.starts, model.shape)))
    losses = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="none")
    return (losses * batch.weights.flatten()).sum() / batch.weights.sum()


def draft_loss(model: Pocket, batch: Batch, steps: int) -> Tensor:
    """Cross-entropy of `steps` chain steps against the trunk: half its whole distribution, half its argmax."""
    layout = Layout.of(batch.starts, model.shape)
    with torch.no_grad():
        hidden = model.model(batch.ids, layout)
        teacher = model.logits(hidden).float()
        soft, hard = teacher.softmax(-1), teacher.argmax(-1)
        embedded = model.model.embed_tokens(batch.ids)
    total = hidden.new_zeros(())
    shares = CHAIN_WEIGHTS[:steps]
    for share, y in zip(shares, model.mtp.unroll(embedded, hidden, layout, steps), strict=True):
        log_p = model.logits(y).float().log_softmax(-1)
        losses = -0.5 * (soft * log_p).sum(-1) - 0.5 * log_p.gather(-1, hard[..., None])[..., 0]
        total = total + share * (losses * batch.weights).sum() / batch.weights.sum()
    return total / sum(shares)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a stage trains: the module whose state is kept, its trained parameters by name, the loss of a batch."""

    module: Pocket | BlockDrafter
    trained: list[tuple[str, nn.Parameter]]
    loss: Callable[[Batch], Tensor]


def plan(stage: Stage, model: Pocket) -> Work:
    """Freezes what the stage leaves alone."""
    device = model.model.norm.weight.device
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(stage.part == ("mtp" if name.startswith("mtp.") else "trunk"))
    if stage.part == "block":
        drafter = BlockDrafter(BlockShape.load(weights.FOLDER / "block"))
        drafter.initialise(20261130, 1.0 + model.model.norm.weight.cpu())
        drafter.to(device)
        return Work(
            module=drafter,
            trained=list(drafter.named_parameters()),
            loss=lambda batch: block_loss(model, drafter, batch, stage.anchors),
        )
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if stage.part == "mtp":
        return Work(module=model, trained=trained, loss=lambda batch: draft_loss(model, batch, stage.chain))
    return Work(module=model, trained=trained, loss=lambda batch: language_loss(model, batch))


def compile_blocks(layers: nn.ModuleList) -> None:
    """Compiles each layer on its own: one graph for those of a kind."""
    for layer in layers:
        layer.compile(dynamic=False)


def run_stage(stage: Stage, work: Work, mixture: Mixture) -> list[dict[str, float]]:
    """Runs or resumes one stage; returns the log (step, loss, seconds)."""
    device = work.trained[0][1].device
    opts = optimisers(work.trained, stage.rate)
    checkpoint = WORK / f"{stage.name}.checkpoint.pt"
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        work.module.load_state_dict(state["model"])
        for opt, saved in zip(opts, state["optimisers"], strict=True):
            opt.load_state_dict(saved)
        first = state["step"]
    log: list[dict[str, float]] = []
    began = time.perf_counter()
    for step in range(first, stage.steps):
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = rate_at(stage, step)
        batch = mixture.batch(step, stage.length)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = work.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_([p for _, p in work.trained], 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == stage.steps - 1:
            seconds = round(time.perf_counter() - began, 1)
            log.append({"step": step, "loss": round(loss.item(), 4), "seconds": seconds})
            print(stage.name, log[-1], flush=True)
        if (step + 1) % CHECKPOINT_STEPS == 0:
            state = {
                "model": work.module.state_dict(),
                "optimisers": [o.state_dict() for o in opts],
                "step": step + 1,
            }
            torch.save(state, checkpoint)
    checkpoint.unlink(missing_ok=True)
    return log


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
        model = Pocket(Shape.load(weights.FOLDER))
        model.initialise(20261129)
    elif stage.after == SHIPPED:
        model = weights.load(weights.FOLDER / "model.safetensors")
    else:
        model = weights.load(WORK / f"{stage.after}.safetensors")
    return model.to(device)


def train(stage: Stage, device: torch.device, *, trial: bool, compiled: bool) -> None:
    """One stage from its start to its file and its log."""
    model = start_model(stage, device)
    if "own_train" in stage.shares:
        write_own_streams(model, trial=trial)
    work = plan(stage, model)
    if compiled:
        compile_blocks(model.model.layers)
        if stage.part == "block":
            compile_blocks(work.module.layers)
    log = run_stage(stage, work, build_mixture(stage, device))
    weights.save(work.module, WORK / f"{stage.name}.safetensors")
    (WORK / f"{stage.name}.log.json").write_text(json.dumps(log))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="+", choices=list(STAGES))
    parser.add_argument("--steps", type=int, help="another number of steps, for a trial run")
    parser.add_argument("--rows", type=int, help="at most this many rows of a shard, for a trial run")
    parser.add_argument("--length", type=int, help="another row length, for a trial run")
    parser.add_argument("--anchors", type=int, help="another number of blocks a row, for a trial run")
    parser.add_argument("--compile", action="store_true")
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
        train(stage, device, trial=arguments.rows is not None, compiled=arguments.compile)


if __name__ == "__main__":
    main()
