"""Trains the pocket model in stages on one device; each is seeded and resumes from its last checkpoint.

    base        prose and dialogues, every token counts
    chat        mostly dialogues, the assistant's tokens count most
    mtp         the draft head alone, unrolled three steps, against the frozen trunk's own distribution
    polish      the trunk once more, on the last edition of the dialogues
    mtp_polish  the draft head once more, against the polished trunk

`python -m models.pocket.recipe.train base chat mtp polish mtp_polish` writes .work/<stage>.safetensors after each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.pocket.recipe import weights
from models.pocket.recipe.batches import Batch, Mixture, load_shard
from models.pocket.recipe.corpus import WORK
from models.pocket.recipe.layers import Layout, Shape
from models.pocket.recipe.model import Pocket

CHAIN_WEIGHTS: Final = (
    1.0,
    0.8,
    0.65,
)  # loss of chain steps 1, 2, 3: a later draft counts only after the earlier ones
CHECKPOINT_STEPS: Final = 1000


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One run. `after` names the stage whose weights it starts from; `draft` trains the draft head alone, otherwise the
    trunk alone; `shares` are rows of a batch from the shards named; until `decay_from` of the run the rate is constant.
    """

    name: str
    after: str | None
    draft: bool = False
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
            name="mtp", after="chat", draft=True, steps=2000, length=1024,
            shares={"text_train": 8, "chat_train": 14, "own_train": 10},
            other_weight=0.2, rate=4e-3, decay_from=0.3, seed=13,
        ),
        Stage(
            name="polish", after="mtp", steps=800, length=2048, shares={"text_train": 6, "chat_train": 26},
            other_weight=0.1, rate=1.2e-3, decay_from=0.1, warmup=20, seed=14,
        ),
        Stage(
            name="mtp_polish", after="polish", draft=True, steps=700, length=1024,
            shares={"text_train": 8, "chat_train": 14, "own_train": 10},
            other_weight=0.2, rate=2e-3, decay_from=0.1, warmup=20, seed=15,
        ),
    )
}  # fmt: skip


def optimisers(parameters: list[tuple[str, nn.Parameter]], rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for embedding, norms, convolutions and decays."""
    matrices = [p for name, p in parameters if p.ndim == 2 and "embed" not in name and min(p.shape) >= 64]
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


def draft_loss(model: Pocket, batch: Batch) -> Tensor:
    """Cross-entropy of each chain step against the trunk: half its whole distribution, half its argmax."""
    layout = Layout.of(batch.starts, model.shape)
    with torch.no_grad():
        hidden = model.model(batch.ids, layout)
        teacher = model.logits(hidden).float()
        soft, hard = teacher.softmax(-1), teacher.argmax(-1)
        embedded = model.model.embed_tokens(batch.ids)
    total = hidden.new_zeros(())
    for share, y in zip(
        CHAIN_WEIGHTS, model.mtp.unroll(embedded, hidden, layout, len(CHAIN_WEIGHTS)), strict=True
    ):
        log_p = model.logits(y).float().log_softmax(-1)
        losses = -0.5 * (soft * log_p).sum(-1) - 0.5 * log_p.gather(-1, hard[..., None])[..., 0]
        total = total + share * (losses * batch.weights).sum() / batch.weights.sum()
    return total / sum(CHAIN_WEIGHTS)


def compile_blocks(model: Pocket) -> None:
    """Compiles each block on its own: one graph for the three delta-net blocks, one for attention."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def run_stage(
    stage: Stage, model: Pocket, mixture: Mixture, loss_of: Callable[[Pocket, Batch], Tensor]
) -> list[dict[str, float]]:
    """Runs or resumes one stage; returns the log (step, loss, seconds)."""
    device = next(model.parameters()).device
    trained = [(name, p) for name, p in model.named_parameters() if name.startswith("mtp.") == stage.draft]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("mtp.") == stage.draft)
    opts = optimisers(trained, stage.rate)
    checkpoint = WORK / f"{stage.name}.checkpoint.pt"
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
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
            loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_([p for _, p in trained], 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == stage.steps - 1:
            log.append(
                {
                    "step": step,
                    "loss": round(loss.item(), 4),
                    "seconds": round(time.perf_counter() - began, 1),
                }
            )
            print(stage.name, log[-1], flush=True)
        if (step + 1) % CHECKPOINT_STEPS == 0:
            state = {
                "model": model.state_dict(),
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
    """The weights of the stage before, or a seeded random start."""
    if stage.after is None:
        model = Pocket(Shape.load(weights.FOLDER))
        model.initialise(20261129)
    else:
        model = weights.load(WORK / f"{stage.after}.safetensors")
    return model.to(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="+", choices=list(STAGES))
    parser.add_argument("--steps", type=int, help="another number of steps, for a trial run")
    parser.add_argument("--rows", type=int, help="at most this many rows of a shard, for a trial run")
    parser.add_argument("--length", type=int, help="another row length, for a trial run")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    for name in arguments.stages:
        stage = STAGES[name]
        shares = {k: min(v, arguments.rows or v) for k, v in stage.shares.items()}
        changed = {
            "steps": arguments.steps or stage.steps,
            "length": arguments.length or stage.length,
            "shares": shares,
        }
        stage = Stage(**{**stage.__dict__, **changed})
        model = start_model(stage, device)
        if stage.draft:
            from models.pocket.recipe.own import write_own_streams

            write_own_streams(model, trial=arguments.rows is not None)
        if arguments.compile:
            compile_blocks(model)
        log = run_stage(
            stage, model, build_mixture(stage, device), draft_loss if stage.draft else language_loss
        )
        weights.save(model, WORK / f"{name}.safetensors")
        (WORK / f"{name}.log.json").write_text(json.dumps(log))


if __name__ == "__main__":
    main()
