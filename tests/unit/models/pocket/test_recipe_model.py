"""The training model computes qwen3_5: against transformers, packed against alone, stepwise against at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.pocket.recipe import weights
from models.pocket.recipe.decode import Stepper, generate
from models.pocket.recipe.evaluate import Acceptance, chain_hits
from models.pocket.recipe.layers import Layout, Shape
from models.pocket.recipe.model import Pocket

FOLDER = Path(__file__).parents[4] / "models" / "pocket"
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> Pocket:
    """The real shape with seeded weights larger than a fresh start's, so that every part matters."""
    pocket = Pocket(Shape.load(FOLDER))
    pocket.initialise(5)
    generator = torch.Generator().manual_seed(6)
    for parameter in pocket.parameters():
        noise = torch.empty_like(parameter).normal_(0.0, 0.05, generator=generator)
        parameter.requires_grad_(False).add_(noise if parameter.ndim >= 2 else 0.3 * noise)
    return pocket


def ids_of(model: Pocket, rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, model.shape.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def layout_of(model: Pocket, ids: Tensor, *starts: int) -> Layout:
    marks = torch.zeros_like(ids, dtype=torch.bool)
    marks[:, [0, *starts]] = True
    return Layout.of(marks, model.shape)


def test_logits_equal_transformers(model: Pocket) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(FOLDER)
    config.dtype = "float32"
    oracle = transformers.Qwen3_5ForCausalLM(config).float().eval()
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("mtp.")}
    assert oracle.load_state_dict(state, strict=False).missing_keys in ([], ["lm_head.weight"])
    ids = ids_of(model, 2, 150)
    ours = model.logits(model.model(ids, layout_of(model, ids)))
    assert (ours - oracle(ids).logits).abs().max() < TOLERANCE


def test_a_packed_document_computes_what_it_computes_alone(model: Pocket) -> None:
    ids = ids_of(model, 1, 140)
    packed = model.model(ids, layout_of(model, ids, 50, 51, 100))
    for start, end in ((0, 50), (50, 51), (51, 100), (100, 140)):
        alone = ids[:, start:end]
        assert (packed[:, start:end] - model.model(alone, layout_of(model, alone))).abs().max() < TOLERANCE


def test_one_position_at_a_time_equals_all_at_once(model: Pocket) -> None:
    ids = ids_of(model, 2, 80)
    stepper = Stepper(model, 2, 80)
    stepped = torch.stack([stepper.step(ids[:, p], p) for p in range(80)], 1)
    assert (stepped - model.model(ids, layout_of(model, ids))).abs().max() < TOLERANCE


def draft_rows(model: Pocket, embedded: Tensor, before: Tensor) -> Tensor:
    """The draft head as it serves: rows of (embedding of x_p, hidden before p), plain causal attention. [1, T, H]."""
    layout = layout_of(model, torch.zeros(embedded.shape[:2], dtype=torch.long))
    head = model.mtp
    pair = torch.cat((head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(before)), -1)
    return head.norm(head.layers[0](head.fc(pair), layout))


def test_unrolled_chain_equals_drafting_one_by_one(model: Pocket) -> None:
    """For an anchor P: true rows up to P, then two rows that feed the head's own output back."""
    ids = ids_of(model, 1, 40)
    layout = layout_of(model, ids)
    hidden, embedded = model.model(ids, layout), model.model.embed_tokens(ids)
    unrolled = model.mtp.unroll(embedded, hidden, layout, 3)
    for anchor in (0, 1, 17, 36):
        before = torch.cat((torch.zeros_like(hidden[:, :1]), hidden[:, :anchor]), 1)
        for step in range(3):
            y = draft_rows(model, embedded[:, : anchor + step + 1], before)[:, -1:]
            assert (y - unrolled[step][:, anchor + step : anchor + step + 1]).abs().max() < TOLERANCE
            before = torch.cat((before, y), 1)


def test_generation_stops_and_keeps_the_prompt(model: Pocket) -> None:
    prompts = [[5, 6, 7], [9] * 12]
    streams = generate(model, prompts, 6, (0,))
    assert [s[: len(p)] for s, p in zip(streams, prompts, strict=True)] == prompts
    first = streams[0][3]
    stopped = generate(model, prompts, 6, (first,))
    assert stopped[0] == [5, 6, 7, first]
    assert generate(model, [prompts[1]], 6, (0,))[0] == streams[1]


def test_chain_hits_have_one_row_a_position(model: Pocket) -> None:
    hits = chain_hits(model, [[1, 2, 3, 4], [5, 6]])
    assert [len(stream) for stream in hits] == [3, 3]
    assert all(len(row) == 3 for row in hits[0])


def test_acceptance_counts_rounds_as_a_verify_would() -> None:
    yes, no = [True] * 10, [False] * 10
    every = Acceptance()
    every.walk([yes, yes, yes], 2, 11)  # positions 3..10: two full rounds of four
    assert (every.rounds, every.tokens) == (2, 8)
    none = Acceptance()
    none.walk([no, yes, yes], 2, 6)
    assert (none.rounds, none.tokens, none.accepted) == (3, 3, [0, 0, 0])
    one = Acceptance()
    one.walk([yes, no, no], 0, 5)  # drafts clamp to what is left
    assert (one.rounds, one.tokens) == (2, 4)


def test_saved_weights_load_back(model: Pocket, tmp_path: Path) -> None:
    weights.save(model, tmp_path / "w.safetensors")
    loaded = weights.load(tmp_path / "w.safetensors")
    for (name, a), (_, b) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(a.bfloat16().float(), b), name
