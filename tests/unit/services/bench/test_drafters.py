"""The table of drafters: figures by group, bars that can fail, exit codes, streams that must be the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services import cli
from services.bench import command, drafters
from services.bench.alone import Streams, Told
from services.bench.counts import Counts
from services.bench.drafters import BLOCK, MTP, PLAIN, arms, bars, run_drafters
from services.bench.held_out import FREE, TEMPLATES, Prompt
from services.bench.history import History
from services.bench.spec import StreamsDiffer
from services.gpu_worker.engine.models.loader import LoadedModel, load_model
from services.gpu_worker.engine.models.random import TINY, write_random_model
from shared.errors import EngineFault
from tests.engine_kit import prompt

PROMPTS = [
    Prompt(kind="tools", template=True, tokens=prompt(40, seed=1)),
    Prompt(kind="text", template=False, tokens=prompt(30, seed=2) * 2),
]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, History]:
    folder = write_random_model(tmp_path_factory.mktemp("tied"), replace(TINY, tie_embeddings=True))
    return load_model(folder), History(folder)


def test_every_drafter_has_its_figures_by_group(tied: tuple[LoadedModel, History]) -> None:
    model, history = tied
    results, launches = run_drafters(model, PROMPTS, history, kinds=("mtp", "ngram"), budget=8)
    assert list(results) == [PLAIN, *(f"mtp K={k}" for k in range(1, 6)), "n-gram K=7"]
    for name, groups in results.items():
        assert list(groups)[:4] == ["tools", "text", TEMPLATES, FREE]
        for figures in groups.values():
            assert figures["tokens"] <= 7
            assert figures["tokens_per_verify"] >= 1.0
            assert figures["expected_speed_up"] > 0
            assert ("reference" in figures) is (name != PLAIN)
    assert results[PLAIN][FREE]["expected_speed_up"] == 1.0
    assert launches["plain"] > 0
    assert {bar.holds for bar in bars(results) if "no cache" in bar.name} == {True}


def test_a_stream_that_differs_is_no_result(
    tied: tuple[LoadedModel, History], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = Streams.tell

    def other(self: Streams, asked: Prompt, name: str, *rest: Any) -> Told:
        told = tell(self, asked, name, *rest)
        return replace(told, tokens=(*told.tokens[:-1], 1)) if name == MTP else told

    monkeypatch.setattr(Streams, "tell", other)
    with pytest.raises(StreamsDiffer, match=MTP):
        run_drafters(tied[0], PROMPTS, tied[1], kinds=("mtp",), referenced=0, budget=4)


def test_a_model_without_a_block_drafter_cannot_be_asked_for_it(tied: tuple[LoadedModel, History]) -> None:
    with pytest.raises(EngineFault, match="no block drafter"):
        arms(("block",), tied[0])


def results_of(mtp: float = 3.0, best: float = 3.5, block: float = 4.0, lost: float = 0.0) -> Any:
    """Figures of the drafters that bars ask for."""

    def groups(value: float) -> dict[str, Any]:
        figures = {
            **Counts(streams=1, rounds=1, tokens=1).figures(),
            "tokens_per_verify": value,
            "cpu_speed_up_over_plain": 1.0,
            "expected_speed_up": 1.0,
            "reference": {"streams": 1, "tokens_per_verify": value, "with_cache": value, "lost": lost},
        }
        return {name: dict(figures) for name in ("tools", TEMPLATES, FREE)}

    return {MTP: groups(mtp), "mtp K=5": groups(best), BLOCK: groups(block)}


@pytest.mark.parametrize(
    ("figures", "broken"),
    [
        ({}, set()),
        ({"mtp": 2.1}, {"tokens a verify, mtp K=3"}),
        ({"block": 2.7, "best": 2.5, "mtp": 2.5}, {"tokens a verify, block"}),
        ({"block": 3.4}, {"block over the best MTP width"}),
        ({"lost": 0.03}, {"tokens a verify against no cache"}),
        ({"lost": -0.03}, {"tokens a verify against no cache"}),
    ],
    ids=["all hold", "mtp", "block", "block below mtp", "caching loses", "caching gains"],
)
def test_bars_hold_or_not(figures: Mapping[str, float], broken: set[str]) -> None:
    fallen = {bar.name.rsplit(", ", 1)[0] for bar in bars(results_of(**figures)) if not bar.holds}
    assert {name for name in broken if any(one.startswith(name) for one in fallen)} == broken
    assert all(any(one.startswith(name) for name in broken) for one in fallen)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """`burstline bench spec` with figures that are given."""

    def go(*options: str, **figures: float) -> tuple[int, str]:
        monkeypatch.setattr(command, "shipped", lambda kinds: None)
        monkeypatch.setattr(command, "without_cache", lambda kinds: None)
        monkeypatch.setattr(
            command, "run_drafters", lambda *_, **__: (results_of(**figures), {"plain": 0.01})
        )
        answer = CliRunner().invoke(command.app, ["spec", "--each", "1", *options])
        return answer.exit_code, answer.output

    return go


def test_0_and_a_file_when_bars_hold(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    code, output = run("--json", str(file))
    assert code == 0, output
    told = json.loads(file.read_text(encoding="utf-8"))
    assert told["command"] == "bench spec --each 1"
    assert told["results"]["prompts"] == 4
    assert told["bars"]
    assert all(bar["holds"] for bar in told["bars"])


def test_1_when_one_does_not(run: Callable[..., tuple[int, str]]) -> None:
    code, output = run(lost=0.5)
    assert code == 1
    assert "NOT AS PROMISED" in output


def test_2_without_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(drafters, "POCKET", tmp_path)
    answer = CliRunner().invoke(cli.app, ["bench", "spec", "--each", "1", "--drafter", "ngram"])
    assert answer.exit_code == 2, answer.output


@pytest.mark.parametrize(
    "options", [("--drafter", "magic"), ("--text", "poems"), ("--batch", "1", "--drafter", "mtp")]
)
def test_2_for_what_there_is_not(run: Callable[..., tuple[int, str]], options: Sequence[str]) -> None:
    assert run(*options)[0] == 2
