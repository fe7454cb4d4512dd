"""The block drafter of the recipe: layout of its file, many anchors at once against one alone, what it is taught."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.pocket.recipe.batches import Batch
from models.pocket.recipe.block import BlockDrafter, BlockShape, Places
from models.pocket.recipe.block_loss import Task, block_loss, draw_anchors, embed_blocks, make_task
from models.pocket.recipe.compare import block_hits, propose
from models.pocket.recipe.data import END_OF_TEXT, IM_END
from models.pocket.recipe.evaluate import Acceptance
from models.pocket.recipe.layers import Layout, Shape
from models.pocket.recipe.model import Pocket
from services.gpu_worker.engine.models.block_config import BlockDims
from services.gpu_worker.engine.models.block_tensors import block_shapes

FOLDER = Path(__file__).parents[4] / "models" / "pocket"
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def seeded(module: torch.nn.Module, seed: int) -> None:
    """Weights larger than a fresh start's, so that every part matters."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.empty_like(parameter).normal_(0.0, 0.05, generator=generator)
        parameter.requires_grad_(False).add_(noise if parameter.ndim >= 2 else 0.3 * noise)


@pytest.fixture(scope="module")
def model() -> Pocket:
    pocket = Pocket(Shape.load(FOLDER))
    pocket.initialise(5)
    seeded(pocket, 6)
    return pocket


@pytest.fixture(scope="module")
def drafter(model: Pocket) -> BlockDrafter:
    """The shipped shape with a window that the tests' rows exceed."""
    made = BlockDrafter(replace(BlockShape.load(FOLDER / "block"), sliding_window=12))
    made.initialise(7, 1.0 + model.model.norm.weight)
    seeded(made, 8)
    return made


def ids_of(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(10, 4096, (rows, length), generator=torch.Generator().manual_seed(seed))


def layout_of(model: Pocket, ids: Tensor, *starts: int) -> Layout:
    marks = torch.zeros_like(ids, dtype=torch.bool)
    marks[:, [0, *starts]] = True
    return Layout.of(marks, model.shape)


def test_config_and_tensors_are_those_of_the_published_layout(drafter: BlockDrafter) -> None:
    config = json.loads((FOLDER / "block" / "config.json").read_text())
    dims = BlockDims.from_hf(config)
    assert {name: tuple(value.shape) for name, value in drafter.state_dict().items()} == block_shapes(dims)
    shape = BlockShape.load(FOLDER / "block")
    assert (dims.block, dims.window, dims.taps, dims.mask_token, dims.causal) == (
        shape.block_size,
        shape.sliding_window,
        shape.target_layer_ids,
        shape.mask_token_id,
        True,
    )
    assert dims.drafts == 7
    assert (dims.conv_taps, dims.conv_group) == (shape.conv_kernel_size, shape.conv_group_size)
    assert (dims.selector_rank, dims.selector_top) == (shape.selector_rank, shape.selector_top_k)


def blocks_at(
    model: Pocket, drafter: BlockDrafter, ids: Tensor, anchors: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """(context features, slots' hidden [B, A, S, H])."""
    outputs = model.model.outputs(ids, layout)
    context = drafter.context([outputs[layer] for layer in drafter.shape.target_layer_ids])
    places = Places.of(anchors, layout.documents, drafter.shape)
    return context, drafter(embed_blocks(model, drafter, ids.gather(1, anchors)), context, places)


def test_r_d2_rows_before_the_window_change_nothing(model: Pocket, drafter: BlockDrafter) -> None:
    """Drafting from the last window of context features is drafting from all of them; one row less is not."""
    ids, at = ids_of(1, 60), 50
    context, whole = blocks_at(model, drafter, ids, torch.tensor([[at]]), layout_of(model, ids))
    embedded = embed_blocks(model, drafter, ids[:, at : at + 1])
    for kept, same in ((drafter.shape.sliding_window - 1, True), (drafter.shape.sliding_window - 2, False)):
        known = torch.zeros_like(context)
        known[:, at - kept : at] = context[:, at - kept : at]
        places = Places.of(torch.tensor([[at]]), torch.ones_like(ids), drafter.shape)
        again = drafter(embedded, known, places)
        assert torch.allclose(again, whole, atol=1e-5) is same


def test_anchors_of_a_packed_row_draft_as_each_does_alone(model: Pocket, drafter: BlockDrafter) -> None:
    ids = ids_of(2, 60)
    anchors = torch.tensor([[3, 20, 33, 52], [0, 31, 32, 47]])
    _, packed = blocks_at(model, drafter, ids, anchors, layout_of(model, ids, 32))
    for row in range(2):
        for index, anchor in enumerate(anchors[row].tolist()):
            first = 32 if anchor >= 32 else 0
            alone = ids[row : row + 1, first : anchor + 1]
            at = torch.tensor([[anchor - first]])
            _, single = blocks_at(model, drafter, alone, at, layout_of(model, alone))
            error = (packed[row, index] - single[0, 0]).norm() / single.norm()
            assert error < TOLERANCE


def test_a_slot_depends_on_no_later_slot(model: Pocket, drafter: BlockDrafter) -> None:
    ids = ids_of(1, 40)
    layout = layout_of(model, ids)
    anchors = torch.tensor([[30]])
    context, hidden = blocks_at(model, drafter, ids, anchors, layout)
    embedded = embed_blocks(model, drafter, ids.gather(1, anchors))
    embedded[:, :, 5:] += 1.0
    changed = drafter(embedded, context, Places.of(anchors, layout.documents, drafter.shape))
    assert torch.equal(changed[:, :, :5], hidden[:, :, :5])
    assert not torch.allclose(changed[:, :, 5], hidden[:, :, 5])


def batch_of(ids: Tensor, starts: tuple[int, ...] = ()) -> Batch:
    marks = torch.zeros_like(ids, dtype=torch.bool)
    marks[:, [0, *starts]] = True
    weights = torch.zeros(ids.shape)
    weights[:, 8:40] = 1.0
    return Batch(ids=ids, targets=ids.roll(-1, 1), starts=marks, weights=weights, seed=3)


def task_of(model: Pocket, drafter: BlockDrafter, batch: Batch) -> Task:
    return make_task(model, drafter, batch.ids, batch.starts, draw_anchors(batch, 64, 8))


def test_anchors_are_seeded_and_a_block_fits() -> None:
    batch = batch_of(ids_of(2, 48))
    drawn = draw_anchors(batch, 200, 8)
    assert torch.equal(drawn, draw_anchors(batch, 200, 8))
    assert drawn.min() >= 8
    assert drawn.max() <= 40


def test_a_label_counts_while_the_text_is_what_the_trunk_would_write(
    model: Pocket, drafter: BlockDrafter
) -> None:
    """On the trunk's own greedy text every slot counts; a foreign token at one place ends the slots behind it."""
    ids = ids_of(1, 12, seed=2)
    while ids.shape[1] < 48:
        hidden = model.model(ids, layout_of(model, ids))
        ids = torch.cat((ids, model.logits(hidden[:, -1:]).argmax(-1)), 1)
    assert not torch.isin(ids, torch.tensor([IM_END, END_OF_TEXT])).any()
    foreign = ids.clone()
    foreign[0, 30] = (ids[0, 30] + 1) % 4096
    for text, cut in ((ids, 48), (foreign, 30)):
        task = task_of(model, drafter, batch_of(text))
        for at, anchor in enumerate(task.places.anchors[0].tolist()):
            if 12 <= anchor < cut:
                count = min(7, cut - anchor)
                assert (task.weights[0, at] > 0).tolist() == [True] * count + [False] * (7 - count)
                expected = ids[0, anchor + 1 : anchor + 1 + count].tolist()
                assert task.labels[0, at, :count].tolist() == expected


def test_no_label_reaches_behind_an_answer_or_into_the_next_document(
    model: Pocket, drafter: BlockDrafter
) -> None:
    ids = ids_of(1, 48)
    ids[0, 20], ids[0, 34] = IM_END, END_OF_TEXT
    task = task_of(model, drafter, batch_of(ids, (35,)))
    for anchor, weights in zip(task.places.anchors[0].tolist(), task.weights[0], strict=True):
        if anchor in (20, 34):
            assert not weights.any()
        for end in (20, 34):
            if anchor <= end < anchor + 7:
                assert not weights[end - anchor :].any()


def test_loss_reaches_every_parameter(model: Pocket) -> None:
    drafter = BlockDrafter(BlockShape.load(FOLDER / "block"))
    drafter.initialise(7, 1.0 + model.model.norm.weight)
    with torch.no_grad():
        seeded(drafter, 9)
    with torch.enable_grad():
        for parameter in drafter.parameters():
            parameter.requires_grad_(True)
        batch = batch_of(ids_of(1, 48))
        anchors = draw_anchors(batch, 16, 8)
        block_loss(model, drafter, batch.ids, batch.starts, anchors).backward()  # type: ignore[no-untyped-call]
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert bool(parameter.grad.any()), name


def test_the_walk_takes_the_best_scored_candidate_left_to_right(model: Pocket, drafter: BlockDrafter) -> None:
    ids = ids_of(1, 30)
    anchors = torch.tensor([[25]])
    _, hidden = blocks_at(model, drafter, ids, anchors, layout_of(model, ids))
    drafts = propose(model, drafter, ids, anchors)[0, 0].tolist()
    selector, previous = drafter.candidate_selector, int(ids[0, 25])
    for slot, draft in enumerate(drafts):
        y = hidden[0, 0, slot + 1]
        logits = model.logits(y)
        mixed = selector.predecessor_codebook[previous] * selector.hidden_projection(y)
        top = logits.topk(selector.top_k).indices
        scores = {int(c): float(logits[c] + mixed @ selector.successor_codebook[c]) for c in top}
        assert draft == max(scores, key=lambda c: scores[c])
        previous = draft


def test_hits_are_where_the_drafts_of_an_anchor_equal_the_stream(
    model: Pocket, drafter: BlockDrafter
) -> None:
    first, ids = 10, ids_of(1, 24)
    drafts = propose(model, drafter, ids, torch.tensor([[first]]))[0, 0].tolist()
    stream = ids[0, : first + 1].tolist() + drafts[:3] + [(drafts[3] + 1) % 4096, 20, 21]
    hits = block_hits(model, drafter, [stream], [first])[0]
    acceptance = Acceptance(k=7)
    acceptance.walk(hits, first, len(stream))
    assert acceptance.tokens == len(stream) - 1 - first
    assert [hits[step][first + step] for step in range(4)] == [True, True, True, False]
