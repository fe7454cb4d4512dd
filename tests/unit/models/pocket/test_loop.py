"""The training loop: a resumed stage ends where an unbroken one does, and one fitted to a time equals one of as many steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from models.pocket.recipe import loop
from models.pocket.recipe.batches import Batch, Mixture
from models.pocket.recipe.loop import Run, Work
from models.pocket.recipe.stages import Stage

STAGE = Stage(
    name="tiny", after=None, steps=12, length=8, shares={}, other_weight=1.0, rate=1e-2, decay_from=0.5, seed=4
)  # fmt: skip


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


def test_a_resumed_stage_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    whole = work()
    assert Run(STAGE, whole, folder=tmp_path).finish(mixture())
    broken = Run(STAGE, work(), folder=tmp_path)
    while broken.step < 5:
        broken.advance(mixture().batch(broken.step, STAGE.length))
    broken.keep()
    resumed = work()
    assert Run(STAGE, resumed, folder=tmp_path).finish(mixture())
    assert all(map(torch.equal, weights(resumed), weights(whole)))
    assert not list(tmp_path.iterdir())


def test_a_paused_stage_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts of a stage end where one does; the log is of all of them, its seconds those that passed in them."""
    whole, parts = work(), work()
    assert Run(STAGE, whole, folder=tmp_path).finish(mixture())
    monkeypatch.setattr(loop, "time", Clock())
    steps: list[int] = []
    done = False
    while not done:
        parts = work()
        run = Run(STAGE, parts, folder=tmp_path)
        done = run.finish(mixture(), pause=5.0)
        steps.append(run.step)
    assert len(steps) > 2
    assert steps == [*sorted(set(steps[:-1])), STAGE.steps]
    assert all(map(torch.equal, weights(parts), weights(whole)))
    assert [entry["step"] for entry in run.log] == [0, STAGE.steps - 1]
    assert run.log[-1]["seconds"] > len(steps) * 5.0 - 5.0


def test_a_run_that_is_cut_off_has_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint every KEEP_SECONDS: the run that follows begins there, not at the start."""
    monkeypatch.setattr(loop, "time", Clock())
    monkeypatch.setattr(loop, "KEEP_SECONDS", 3.0)

    class CutError(Exception):
        pass

    class Cut(Mixture):
        def batch(self, step: int, length: int) -> Batch:
            if step == 7:
                raise CutError
            return super().batch(step, length)

    with pytest.raises(CutError):
        Run(STAGE, work(), folder=tmp_path).finish(
            Cut([torch.arange(400, dtype=torch.int32)], [2], dialogue=[False], other_weight=1.0, seed=4)
        )
    after = Run(STAGE, work(), folder=tmp_path)
    after.resume()
    assert 3 <= after.step <= 7


def test_a_stage_fitted_to_a_time_is_one_of_as_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MEASURED", (2, 4))
    monkeypatch.setattr(loop, "time", Clock())
    long = replace(STAGE, steps=500, warmup=6)
    fitted = work()
    run = Run(long, fitted, folder=tmp_path)
    assert run.finish(mixture(), seconds=20.0)
    assert 4 < run.stage.steps < 500
    assert run.log[-1]["step"] == run.stage.steps - 1
    asked = work()
    assert Run(replace(long, steps=run.stage.steps), asked, folder=tmp_path).finish(mixture())
    assert all(map(torch.equal, weights(fitted), weights(asked)))


def test_matrices_and_tables_have_their_own_optimisers() -> None:
    """Codebooks are looked up by row: AdamW's; a matrix is Muon's."""
    muon, adam = loop.optimisers(work().trained, 1e-3)
    assert [tuple(p.shape) for p in muon.param_groups[0]["params"]] == [(64, 64)]
    assert [tuple(p.shape) for p in adam.param_groups[0]["params"]] == [(10, 64)]
