"""The engine's block drafter and the recipe's compute the same, and propose the same drafts, from one file of weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.pocket.recipe import weights
from models.pocket.recipe.block import BlockDrafter, BlockShape, Places
from models.pocket.recipe.block_loss import embed_blocks
from models.pocket.recipe.compare import propose
from models.pocket.recipe.layers import Layout
from models.pocket.recipe.model import Pocket
from services.gpu_worker.engine.batch import BlockAsk
from services.gpu_worker.engine.models.block import BlockDrafter as EngineDrafter
from services.gpu_worker.engine.models.block import ContextView
from services.gpu_worker.engine.models.block_context import BlockContext
from services.gpu_worker.engine.models.block_loader import load_block
from services.gpu_worker.engine.models.loader import LoadedModel, load_model
from tests.unit.models.pocket.test_block import seeded

FOLDER = Path(__file__).parents[4] / "models" / "pocket"
ROWS = 300
"""More than the window."""
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def trunk() -> Pocket:
    return weights.load(FOLDER / "model.safetensors")


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_model(FOLDER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, trunk: Pocket) -> Path:
    """The shipped config with seeded weights in which every part matters."""
    made = tmp_path_factory.mktemp("block")
    shutil.copy(FOLDER / "block" / "config.json", made)
    drafter = BlockDrafter(BlockShape.load(made))
    drafter.initialise(3, 1.0 + trunk.model.norm.weight.detach())
    with torch.no_grad():
        seeded(drafter, 4)
    weights.save(drafter, made / "model.safetensors")
    return made


@pytest.fixture(scope="module")
def ours(folder: Path) -> BlockDrafter:
    return weights.load_block(folder / "model.safetensors", folder)


@pytest.fixture(scope="module")
def theirs(folder: Path, target: LoadedModel) -> EngineDrafter:
    return load_block(folder, target.model)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(10, 4096, (1, ROWS + 8), generator=torch.Generator().manual_seed(1))


def taps_of(trunk: Pocket, ids: Tensor) -> tuple[list[Tensor], Layout]:
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[:, 0] = True
    layout = Layout.of(starts, trunk.shape)
    return trunk.model.outputs(ids, layout), layout


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def view_of(drafter: EngineDrafter, features: Tensor, start: int) -> ContextView:
    """All rows before `start` as context."""
    block, window = drafter.dims.block, drafter.dims.window
    positions = torch.arange(start)
    keys, values = drafter.context_rows(features[:start], positions)
    own = start + torch.arange(block)
    far = positions[None] <= own[:, None] - window
    later = torch.ones(block, block, dtype=torch.bool).triu(1)
    return ContextView(
        keys=[keys[:, layer].transpose(0, 1)[None] for layer in range(drafter.dims.layers)],
        values=[values[:, layer].transpose(0, 1)[None] for layer in range(drafter.dims.layers)],
        hidden=torch.cat((far, later), 1)[None, None, None],
        cos_sin=drafter.rope[own],
    )


@pytest.mark.parametrize("start", [1, 40, ROWS])
def test_features_and_rows_of_a_block_are_the_same(
    trunk: Pocket, ours: BlockDrafter, theirs: EngineDrafter, ids: Tensor, start: int
) -> None:
    outputs, layout = taps_of(trunk, ids)
    taps = [outputs[layer] for layer in ours.shape.target_layer_ids]
    context = ours.context(taps)
    features = theirs.features(torch.cat(taps, -1)[0])
    assert error(features, context[0]) < TOLERANCE
    anchors = torch.tensor([[start]])
    embedded = embed_blocks(trunk, ours, ids.gather(1, anchors))
    expected = ours(embedded, context, Places.of(anchors, layout.documents, ours.shape))[0]
    assert error(theirs.forward(embedded[0], view_of(theirs, features, start)), expected) < TOLERANCE


def test_the_ring_proposes_what_the_whole_history_does(
    trunk: Pocket, ours: BlockDrafter, theirs: EngineDrafter, target: LoadedModel, ids: Tensor
) -> None:
    outputs, _ = taps_of(trunk, ids)
    taps = torch.cat([outputs[layer] for layer in ours.shape.target_layer_ids], -1)[0]
    for start in (20, ROWS):
        context = BlockContext(theirs, target.model, num_slots=1, num_snapshots=1)
        context.reset(0)
        context.primed(0, 0, taps[:start])
        anchor = int(ids[0, start])
        proposal = context.propose([BlockAsk(slot=0, start=start, anchor=anchor, k=7)])[0]
        drafts, before = [], anchor
        for k in range(proposal.count):
            before = int(proposal.row(k, before).argmax())
            drafts.append(before)
        assert drafts == propose(trunk, ours, ids, torch.tensor([[start]]))[0, 0].tolist()
