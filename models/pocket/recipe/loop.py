"""The training loop that all stages share: two optimisers, a rate by step, checkpoints, a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from models.pocket.recipe.batches import Batch, Mixture
from models.pocket.recipe.corpus import WORK
from models.pocket.recipe.stages import Stage

KEEP_SECONDS: Final = 45.0
"""Between checkpoints: what a run that is cut off loses at most."""
LOG_STEPS: Final = 50
MEASURED: Final = (51, 101)
"""Steps between which the pace of a stage is measured: each follows one whose loss was read, so that nothing is pending."""
TABLES: Final = ("embed_tokens.weight", "codebook")
"""Rows of these are looked up: no matrices for Muon."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a stage trains: the module whose state is kept, its trained parameters by name, the tensors that the loss takes
    of a batch, the loss of them."""

    module: nn.Module
    trained: list[tuple[str, nn.Parameter]]
    inputs: Callable[[Batch], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]

    def gradients(self, *inputs: Tensor) -> Tensor:
        """The loss [] of `inputs`; leaves clipped gradients in the parameters."""
        kind = inputs[0].device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda", cache_enabled=False):
            loss = self.loss(*inputs)
        loss.backward()
        nn.utils.clip_grad_norm_([p for _, p in self.trained], 1.0)
        return loss.detach()

    def clear(self) -> None:
        """No gradients."""
        for _, parameter in self.trained:
            parameter.grad = None


class Captured:
    """`work.gradients` as a CUDA graph: a model this small waits for launches otherwise. Every call has the same shapes."""

    def __init__(self, work: Work, example: tuple[Tensor, ...]) -> None:
        self._inputs = tuple(tensor.clone() for tensor in example)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # lazy initialisation must not fall into the capture
                work.clear()
                work.gradients(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        work.clear()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = work.gradients(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The loss; the gradients lie where they lay in the capture."""
        for held, given in zip(self._inputs, inputs, strict=True):
            held.copy_(given)
        self._graph.replay()
        return self._loss


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


class Run:
    """A stage on its way: `step` steps are done, `log` has (step, loss, seconds) of some, the seconds of all its parts."""

    def __init__(self, stage: Stage, work: Work, *, captured: bool = False, folder: Path = WORK) -> None:
        """`captured` = gradients are computed by replaying a graph; `folder` holds the checkpoint."""
        self.stage = stage
        self.work = work
        self.step = 0
        self.log: list[dict[str, float]] = []
        self._opts = optimisers(work.trained, stage.rate)
        self._device = work.trained[0][1].device
        self._checkpoint = folder / f"{stage.name}.checkpoint.pt"
        self._gradients: Callable[..., Tensor] | None = None if captured else work.gradients
        self._began = self._mark = self._kept = time.perf_counter()
        self._earlier = 0.0

    @property
    def seconds(self) -> float:
        """Since the stage began, times between its parts left out."""
        return self._earlier + time.perf_counter() - self._began

    def resume(self) -> None:
        """Goes on from the stage's checkpoint, if it left one."""
        if not self._checkpoint.exists():
            return
        state = torch.load(self._checkpoint, map_location=self._device, weights_only=True)
        self.work.module.load_state_dict(state["model"])
        for opt, saved in zip(self._opts, state["optimisers"], strict=True):
            opt.load_state_dict(saved)
        self.step, self.log, self._earlier = state["step"], state["log"], state["seconds"]
        print(f"{self.stage.name}: goes on from step {self.step}", flush=True)

    def keep(self) -> None:
        """Writes the checkpoint, whole or not at all."""
        state = {
            "model": self.work.module.state_dict(),
            "optimisers": [opt.state_dict() for opt in self._opts],
            "step": self.step,
            "log": self.log,
            "seconds": self.seconds,
        }
        beside = self._checkpoint.with_suffix(".new")
        torch.save(state, beside)
        beside.replace(self._checkpoint)
        self._kept = time.perf_counter()

    def fit(self, seconds: float) -> None:
        """As many steps as `seconds` from the start hold, at the pace between the MEASURED ones. Those only warm up, so
        the result is that of a stage with as many steps from the beginning.
        """
        if self.step == MEASURED[0]:
            self._mark = time.perf_counter()
        elif self.step == MEASURED[1]:
            now = time.perf_counter()
            pace = (now - self._mark) / (MEASURED[1] - MEASURED[0])
            steps = min(self.stage.steps, self.step + int((seconds - (now - self._began)) / pace))
            self.stage = replace(self.stage, steps=steps)
            print(f"{self.stage.name}: {1000 * pace:.1f} ms a step, {steps} steps", flush=True)

    def advance(self, batch: Batch) -> None:
        """One step."""
        for opt in self._opts:
            for group in opt.param_groups:
                group["lr"] = rate_at(self.stage, self.step)
        inputs = self.work.inputs(batch)
        if self._gradients is None:
            self._gradients = Captured(self.work, inputs)
        loss = self._gradients(*inputs)
        for opt in self._opts:
            opt.step()
        if not isinstance(self._gradients, Captured):
            self.work.clear()
        if self.step % LOG_STEPS == 0 or self.step == self.stage.steps - 1:
            entry = {"step": self.step, "loss": round(loss.item(), 4)}
            self.log.append({**entry, "seconds": round(self.seconds, 1)})
            print(self.stage.name, self.log[-1], flush=True)
        self.step += 1

    def finish(self, mixture: Mixture, seconds: float | None = None, pause: float | None = None) -> bool:
        """Runs what is left, within `seconds` if that is given. With `pause`, stops after so many seconds and leaves a
        checkpoint to go on from; returns whether all steps are done.
        """
        self.resume()
        while self.step < self.stage.steps:
            if seconds is not None:
                self.fit(seconds)
            self.advance(mixture.batch(self.step, self.stage.length))
            now = time.perf_counter()
            if pause is not None and now - self._began >= pause and self.step < self.stage.steps:
                self.keep()
                return False
            if now - self._kept >= KEEP_SECONDS:
                self.keep()
        self._checkpoint.unlink(missing_ok=True)
        return True
