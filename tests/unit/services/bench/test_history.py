"""The engine's drafters propose what the slow ones do from the whole history, round by round, and count the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from services.bench.alone import Streams
from services.bench.drafters import PLAIN, arms
from services.bench.held_out import Prompt
from services.bench.history import History, repeated
from services.bench.rounds import reference_counts
from services.gpu_worker.engine.drafters import propose as proposing
from services.gpu_worker.engine.models.block_loader import load_block
from services.gpu_worker.engine.models.loader import LoadedModel, load_model
from services.gpu_worker.engine.models.random import TINY, write_random_model
from services.gpu_worker.engine.models.random_block import block_hf_config, write_random_block
from services.gpu_worker.engine.sessions import rounds as round_loop
from tests.engine_kit import prompt

BUDGET = 10
PROMPTS = [(*prompt(70, seed=1), *prompt(20, seed=2) * 2), prompt(150, seed=3)]
"""One that repeats itself, one longer than the block drafter's window."""


@dataclass(frozen=True)
class Rig:
    """A tiny model that ties its head, as the pocket model does, with a random block drafter beside it."""

    model: LoadedModel
    history: History


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("tied")
    loaded = load_model(write_random_model(folder / "model", replace(TINY, tie_embeddings=True)))
    block = write_random_block(folder / "block", block_hf_config(loaded.dims))
    return Rig(replace(loaded, drafter=load_block(block, loaded.model)), History(folder / "model", block))


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Every proposal of the engine's drafters, in the order of the rounds."""
    made: list[list[int]] = []

    def recorded(jobs: Sequence[Any], runner: Any) -> list[list[int]]:
        drafts = proposing.propose(jobs, runner)
        made.extend(drafts)
        return drafts

    monkeypatch.setattr(round_loop, "propose", recorded)
    return made


@pytest.mark.parametrize("tokens", PROMPTS, ids=["repeats itself", "longer than the window"])
def test_r_d2_cached_drafters_propose_what_the_whole_history_does(
    rig: Rig, proposed: list[list[int]], monkeypatch: pytest.MonkeyPatch, tokens: tuple[int, ...]
) -> None:
    drafters = arms(("mtp", "block", "ngram"), rig.model)
    streams, asked = Streams(rig.model, BUDGET), Prompt(kind="text", template=False, tokens=tokens)
    said = streams.tell(asked, PLAIN, drafters[PLAIN]).tokens
    slow: list[list[int]] = []
    draw = History.drafts

    def recorded(self: History, *wanted: Any) -> list[int]:
        slow.append(draw(self, *wanted))
        return slow[-1]

    monkeypatch.setattr(History, "drafts", recorded)
    for name, drafting in drafters.items():
        if not drafting.k:
            continue
        proposed.clear()
        slow.clear()
        told = streams.tell(asked, name, drafting)
        counted = reference_counts(rig.history, {name: drafting}, tokens, said, budget=BUDGET)[name]
        assert told.tokens == said
        ours, theirs = ([one for one in made if one] for made in (proposed, slow))
        assert len(ours) == len(theirs) > 0, name
        # The slow ones draft in full near the budget's end, where a round takes fewer.
        assert ours == [drafts[: len(mine)] for drafts, mine in zip(theirs, ours, strict=True)], name
        assert (counted.rounds, counted.tokens) == (told.counts.rounds, told.counts.tokens), name
        assert counted.accepted_at[: len(told.counts.accepted_at)] == told.counts.accepted_at


def test_a_hit_restores_the_drafters_too(rig: Rig, proposed: list[list[int]]) -> None:
    """The second answer to a prompt begins with what the first left in the cache, and drafts as it did."""
    drafters, streams = arms(("block", "mtp"), rig.model), Streams(rig.model, BUDGET)
    asked = Prompt(kind="text", template=False, tokens=PROMPTS[1])
    for name in ("block", "mtp K=3"):
        streams.tell(asked, name, drafters[name])
        cold = list(proposed)
        proposed.clear()
        streams.tell(asked, f"{name} again", drafters[name])
        assert proposed == cold
        proposed.clear()
        streams.forget()


def test_rows_of_a_pass_do_not_depend_on_what_follows(rig: Rig) -> None:
    """So that a pass over the history is what a pass over more would say of it."""
    whole, part = rig.history.rows(PROMPTS[1]), rig.history.rows(PROMPTS[1][:100])
    assert torch.allclose(whole.hidden[:100], part.hidden, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4], []),
        ([1, 2, 9, 1, 2], [9, 1, 2]),
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2]),
        ([7, 1, 2, 8, 5, 1, 2, 9, 7, 1, 2], [8, 5, 1]),
        ([4, 4, 4], [4, 4, 4]),
    ],
    ids=["nothing", "two", "the latest", "the longest", "on into itself"],
)
def test_the_longest_and_latest_run_is_followed(tokens: list[int], drafts: list[int]) -> None:
    assert repeated(tokens, 3) == drafts
