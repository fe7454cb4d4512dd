"""The trunk against transformers' own Qwen3.5, and the MTP head against a plain implementation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.models.loader import LoadedModel, load_model
from services.gpu_worker.engine.models.random import TINY, write_random_model
from tests.unit.services.gpu_worker.engine.models.oracle import assert_the_oracles_logits_and_ids, relative
from tests.unit.services.gpu_worker.engine.models.plain_mtp import PlainMTP
from tests.unit.services.gpu_worker.engine.rig import ODD, Line, Rig, table_of, tokens

transformers = pytest.importorskip("transformers")

POCKET = Path(__file__).parents[6] / "models" / "pocket"
VARIANTS = [TINY, ODD, replace(TINY, tie_embeddings=True), replace(TINY, gdn_value_heads=2, heads=2)]
IDS = ["tiny", "odd", "tied", "ungrouped"]


def _oracle(folder: Path) -> Any:
    return transformers.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _line(model: LoadedModel) -> Line:
    return Rig(model).start(2, table_of(2))


@torch.no_grad()
def _check(folder: Path, model: LoadedModel, prompt: list[int]) -> None:
    """Prefill logits within 1e-5 of the oracle's, then 64 greedy ids of both, ours by verifies of one column."""
    assert_the_oracles_logits_and_ids(_line(model), _oracle(folder), prompt, (128, len(prompt) - 128))


@pytest.mark.parametrize("dims", VARIANTS, ids=IDS)
def test_logits_and_greedy_ids_of_transformers(dims: ModelDims, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, dims, seed=3)
    _check(folder, load_model(folder), tokens(300))


def test_pocket_model_is_transformers() -> None:
    _check(POCKET, load_model(POCKET), tokens(300))


@torch.no_grad()
def test_decode_logits_of_transformers_at_every_column_count(tmp_path: Path) -> None:
    """Rows by verify, with rejected drafts between them, against one forward over the accepted ids."""
    folder = write_random_model(tmp_path, TINY, seed=5)
    ids = tokens(170, seed=1)
    expected = _oracle(folder)(torch.tensor([ids])).logits[0]
    line = _line(load_model(folder))
    line.prefill(ids[:100])
    for right in (1, 3, 8, 5, 2) * 3:
        at = line.length
        out = line.verify([*ids[at : at + right], *tokens(8 - right, seed=at)], accept=right)
        assert relative(line.rig.runner.logits(out[:right]), expected[at : at + right]) <= 1e-5


MIXTURE = replace(TINY, intermediate=32, experts=8, experts_per_row=3, expert_width=24)


@pytest.mark.parametrize("dims", [TINY, ODD, MIXTURE], ids=["tiny", "odd", "mixture"])
def test_mtp_rows_are_the_plain_head(dims: ModelDims, tmp_path: Path) -> None:
    """Rows 0..99 written by prefill in two chunks, the rest by draft calls, some of them twice (true hiddens later)."""
    folder = write_random_model(tmp_path, dims, seed=4)
    ids, line = tokens(130, seed=2), _line(load_model(folder))
    hidden = line.prefill(ids[:100], (64, 36))
    hidden = torch.cat([hidden, line.verify(ids[100:108])])
    for first in range(108, 130, 4):
        hidden = torch.cat([hidden, line.verify(ids[first : min(first + 4, 130)])])
    expected = PlainMTP(folder, dims)(ids, hidden)
    line.draft(100, ids[100:103], torch.randn(3, dims.hidden))
    got = torch.cat(
        [line.draft(100, ids[100:108], hidden[99:107]), line.draft(108, ids[108:], hidden[107:129])]
    )
    torch.testing.assert_close(got, expected[100:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_mixture_of_experts_is_transformers(tmp_path: Path) -> None:
    """Logits of a prompt, and of its rows by verifies of any width."""
    folder = write_random_model(tmp_path, MIXTURE, seed=3)
    prompt = tokens(150)
    oracle = transformers.Qwen3_5MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = oracle(torch.tensor([prompt])).logits[0]
    line = _line(load_model(folder))
    logits = line.rig.runner.logits(line.prefill(prompt[:128]))
    assert relative(logits, expected[:128]) <= 1e-5
    for width in (1, 3, 8, 2, 8):
        rows = line.verify(prompt[line.length : line.length + width])
        end = line.length
        assert relative(line.rig.runner.logits(rows), expected[end - width : end]) <= 1e-5


@torch.no_grad()
def test_a_mixtures_rows_do_not_know_their_company(tmp_path: Path) -> None:
    """C1.1, C1.6: alone, among others, in wider verifies: the same bits, no expert drops a row."""
    model = load_model(write_random_model(tmp_path, MIXTURE, seed=4))
    alone, wide = _line(model), _line(model)
    for line in (alone, wide):
        line.prefill(tokens(100))
    ids = tokens(8, seed=9)
    single = torch.cat([alone.verify([token]) for token in ids])
    assert torch.equal(single, wide.verify(ids))
