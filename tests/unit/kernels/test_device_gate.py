"""The gate itself: it passes on the kernels as they are, in the interpreter, and fails on what it is there to catch."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels import dispatch, matmul
from kernels.gate import command, latent, sparse
from kernels.gate.ledger import Ledger, run
from kernels.gate.sizes import TINY, Place
from kernels.matmul.packed import Packed


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", True)


def _gate(only: str, file: Path | None = None) -> tuple[int, str]:
    out = io.StringIO()
    return command.run_gate("interpreter", file=file, only=only, out=out), out.getvalue()


@pytest.mark.parametrize(
    "only",
    [
        "matmul",
        "rms_norm",
        "lora",
        "attention prefill",
        "latent prefill",
        "sparse verify",
        "sigmoid router",
        "end of a round",
        "checksum",
    ],
)
def test_kernels_as_they_are_hold(only: str) -> None:
    status, told = _gate(only)
    assert status == 0, told
    assert " 0 differences" in told


@pytest.mark.parametrize("part", [latent, sparse])
def test_latent_rows_too_long_for_whole_pages_hold(part: ModuleType) -> None:
    """Read 16 keys at a time, as a function of their length."""
    sizes = replace(TINY, latent=(3, 264, 8), edges=(1, 65), columns=(1, 3))
    place = Place(torch.device("cpu"), torch.float32, sizes)
    (verify,) = [check for name, check in part.checks(place) if name.endswith("verify")]
    report = run([("verify", verify)], lambda ledger: None)
    assert report.holds, report.ledgers


def _with_tile_by_rows(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A product that cuts K in two from 80 rows on, as libraries do."""

    def linear(
        x: Tensor, packed: Packed, *, prefill: bool = False, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if x.shape[0] < 80:
            return real(x, packed, prefill=prefill, out_dtype=out_dtype)
        half = x.shape[1] // 2
        front, back = x.clone(), x.clone()
        front[:, half:], back[:, :half] = 0, 0
        return real(front, packed, prefill=prefill) + real(back, packed, prefill=prefill)

    return linear


def test_a_tile_that_depends_on_the_row_count_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(matmul, "linear", _with_tile_by_rows(matmul.linear))
    status, told = _gate("matmul o", tmp_path / "gate.json")
    assert status == 1
    assert "FAILS" in told
    written = json.loads((tmp_path / "gate.json").read_text())
    assert written["results"]["checks"]["matmul o"]["differences"] > 0
    bars = {bar["name"]: bar for bar in written["bars"]}
    assert not bars["differences"]["holds"]
    assert bars["matmul o: error"]["value"] < bars["matmul o: error"]["limit"]


def test_a_kernel_that_leaks_a_neighbours_nan_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = matmul.linear
    monkeypatch.setattr(matmul, "linear", lambda x, *args, **given: real(x, *args, **given) + 0 * x.sum())
    status, told = _gate("matmul o")
    assert status == 1
    assert "rows among NaN" in told


def test_a_wrong_product_that_is_row_exact_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = matmul.linear
    monkeypatch.setattr(matmul, "linear", lambda *args, **given: real(*args, **given) * 1.001)
    assert _gate("matmul o")[0] == 1


def test_the_evidence_has_the_shape_of_all_evidence(tmp_path: Path) -> None:
    assert _gate("end of a round", tmp_path / "gate.json")[0] == 0
    told = json.loads((tmp_path / "gate.json").read_text())
    assert set(told) == {"command", "version", "date", "device", "results", "bars"}
    assert all(set(bar) == {"name", "value", "limit", "unit", "holds"} for bar in told["bars"])


def test_a_check_that_raises_is_a_difference_and_hides_no_other() -> None:
    def broken(ledger: Ledger) -> None:
        raise ValueError("no such tile")

    def fine(ledger: Ledger) -> None:
        ledger.equal(torch.ones(1), torch.ones(1), "one")

    told: list[Ledger] = []
    report = run([("broken", broken), ("fine", fine)], told.append)
    assert not report.holds
    assert report.differences == 1
    assert [ledger.holds for ledger in told] == [False, True]


def test_a_check_that_compares_nothing_does_not_hold() -> None:
    assert not run([("empty", lambda ledger: None)], lambda ledger: None).holds
    assert _gate("no such check")[0] == 1


def test_a_ledger_comes_back_from_another_process() -> None:
    ledger = command._run_one("interpreter", "end of a round")
    assert pickle.loads(pickle.dumps(ledger)) == ledger
    assert ledger.holds


def test_nan_equals_nan_and_nothing_else() -> None:
    ledger = Ledger("nan")
    ledger.equal(torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0]), "same")
    assert ledger.differences == 0
    ledger.equal(torch.tensor([torch.nan]), torch.tensor([1.0]), "other")
    ledger.close(torch.tensor([torch.nan]), torch.tensor([1.0]).double(), 1.0)
    assert ledger.differences == 1
    assert ledger.error == float("inf")


def test_without_a_card_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.run_gate("cuda", file=None, only="", out=io.StringIO()) == 2
