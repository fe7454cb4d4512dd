"""The training loop: a resumed stage ends where an unbroken one does, and one fitted to a time equals one of as many steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from models.pocket.recipe import loop
from models.pocket.recipe.batches import Mixture
from models.pocket.recipe.loop import Run, Work
from models.pocket.recipe.stages import Stage

STAGE = Stage(
    name="tiny", after=None, steps=12, length=8, shares={}, other_weight=1.0, rate=1e-2, decay_from=0.5, seed=4
)  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "WORK", tmp_path)


@pytest.fixture(autouse=True)
def _thread() -> None:
    torch.set_num_threads(1)


class Clock:
    """Every reading is one second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


def work() -> Work:
    """A matrix that Muon moves and a table that AdamW moves, both to be 1."""
    module = nn.ParameterDict(
        {"matrix": nn.Parameter(torch.eye(64)), "codebook": nn.Parameter(torch.zeros(10, 64))}
    )

    def loss(ids: Tensor) -> Tensor:
        return (module["codebook"][ids % 10] @ module["matrix"] - 1.0).square().mean()

    return Work(module=module, trained=list(module.named_parameters()), inputs=lambda b: (b.ids,), loss=loss)


def mixture() -> Mixture:
    return Mixture([torch.arange(400, dtype=torch.int32)], [2], dialogue=[False], other_weight=1.0, seed=4)


def weights(done: Work) -> list[Tensor]:
    return [parameter.detach().clone() for _, parameter in done.trained]


def test_a_resumed_stage_ends_where_an_unbroken_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_STEPS", 5)
    whole = work()
    Run(STAGE, whole).finish(mixture(), None)
    broken = Run(STAGE, work())
    while broken.step < 5:
        broken.advance(mixture().batch(broken.step, STAGE.length))
    broken.keep()
    resumed = work()
    Run(STAGE, resumed).finish(mixture(), None)
    assert all(map(torch.equal, weights(resumed), weights(whole)))
    assert not list(loop.WORK.glob("*.checkpoint.pt"))


def test_a_stage_fitted_to_a_time_is_one_of_as_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MEASURED", (2, 4))
    monkeypatch.setattr(loop, "time", Clock())
    long = replace(STAGE, steps=500, warmup=6)
    fitted = work()
    run = Run(long, fitted)
    log = run.finish(mixture(), seconds=12.0)
    assert 4 < run.stage.steps < 500
    assert log[-1]["step"] == run.stage.steps - 1
    asked = work()
    Run(replace(long, steps=run.stage.steps), asked).finish(mixture(), None)
    assert all(map(torch.equal, weights(fitted), weights(asked)))


def test_matrices_and_tables_have_their_own_optimisers() -> None:
    """Codebooks are looked up by row: AdamW's; a matrix is Muon's."""
    muon, adam = loop.optimisers(work().trained, 1e-3)
    assert [tuple(p.shape) for p in muon.param_groups[0]["params"]] == [(64, 64)]
    assert [tuple(p.shape) for p in adam.param_groups[0]["params"]] == [(10, 64)]
