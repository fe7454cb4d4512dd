"""What the block drafter learns: to propose, from any anchor, what the trunk would write greedily from there.

A slot's label is the trunk's own choice after the true text. It counts only while the text before it, from the anchor on,
is what the trunk would have written too: then the label is exactly the token that a verify would compare with. So prose,
dialogues and the trunk's own streams all teach serving behaviour, however far a text is from the trunk's taste.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from models.pocket.recipe.batches import Batch
from models.pocket.recipe.block import BlockDrafter, Places
from models.pocket.recipe.data import END_OF_TEXT, IM_END
from models.pocket.recipe.layers import Layout
from models.pocket.recipe.model import Pocket

DECAY: Final = 4.0
"""Slot j weighs exp(-(j - 1) / DECAY): a later draft counts only after the earlier ones."""
SOFT: Final = 0.25
"""Share of the trunk's whole distribution in a slot's loss; its first choice has the rest."""
SELECTOR: Final = 1.0
"""Weight of the selector's loss beside the head's."""


@dataclass(frozen=True)
class Task:
    """Blocks drawn from a batch. `places`; `embedded` [B, A, S, H]; `context` inputs `taps`; per draft slot j = 1 .. S-1:
    `labels` and `previous` [B, A, S-1] int64 (the trunk's choice, the true token before it), `weights` [B, A, S-1] float32,
    `hidden` [B, A, S-1, H] of the trunk, whose logits are the soft label.
    """

    places: Places
    embedded: Tensor
    taps: list[Tensor]
    labels: Tensor
    previous: Tensor
    weights: Tensor
    hidden: Tensor


def embed_blocks(model: Pocket, drafter: BlockDrafter, anchors: Tensor) -> Tensor:
    """Token ids of anchors [B, A] -> embeddings of anchor and masks [B, A, S, H]."""
    shape = drafter.shape
    masks = anchors.new_full((*anchors.shape, shape.block_size - 1), shape.mask_token_id)
    return model.model.embed_tokens(torch.cat((anchors[..., None], masks), -1))


def draw_anchors(batch: Batch, count: int, block: int) -> Tensor:
    """`count` positions a row [B, count], likelier where the next token's loss weighs more; a block from there fits."""
    likely = batch.weights[:, : batch.ids.shape[1] - block + 1] + 1e-6
    generator = torch.Generator(likely.device).manual_seed(batch.seed)
    return torch.multinomial(likely, count, replacement=True, generator=generator)


@torch.no_grad()
def make_task(model: Pocket, drafter: BlockDrafter, ids: Tensor, starts: Tensor, anchors: Tensor) -> Task:
    """Runs the trunk over the rows `ids` [B, T] and cuts a block out of them at each of `anchors` [B, A]."""
    layout = Layout.of(starts, model.shape)
    outputs = model.model.outputs(ids, layout)
    hidden = model.model.norm(outputs[-1])
    choice = model.logits(hidden).argmax(-1)
    size = drafter.shape.block_size
    rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    before = anchors[..., None] + torch.arange(size - 1, device=anchors.device)  # of slot j: P + j - 1
    previous, labels = ids[rows, before], choice[rows, before]
    same = layout.documents[rows, before] == layout.documents.gather(1, anchors)[..., None]
    ended = (previous == IM_END) | (previous == END_OF_TEXT)
    agreed = (previous[..., 1:] == labels[..., :-1]) & ~ended[..., 1:]
    agreed = torch.cat((~ended[..., :1], agreed), -1) & same
    decay = torch.exp(-torch.arange(size - 1, device=anchors.device) / DECAY)
    return Task(
        places=Places.of(anchors, layout.documents, drafter.shape),
        embedded=embed_blocks(model, drafter, ids.gather(1, anchors)),
        taps=[outputs[layer] for layer in drafter.shape.target_layer_ids],
        labels=labels,
        previous=previous,
        weights=agreed.cumprod(-1) * decay,
        hidden=hidden[rows, before],
    )


def selector_loss(drafter: BlockDrafter, hidden: Tensor, logits: Tensor, task: Task) -> Tensor:
    """Cross-entropy among the candidates [B, A, S-1]; a label that is not among them takes the last one's place."""
    selector = drafter.candidate_selector
    candidates = logits.topk(selector.top_k, -1).indices
    absent = (candidates != task.labels[..., None]).all(-1)
    candidates[..., -1] = torch.where(absent, task.labels, candidates[..., -1])
    scores = selector.scores(hidden, logits.gather(-1, candidates), candidates, task.previous)
    gold = (candidates == task.labels[..., None]).int().argmax(-1)
    return F.cross_entropy(scores.flatten(0, -2), gold.flatten(), reduction="none").view_as(task.weights)


def block_loss(model: Pocket, drafter: BlockDrafter, ids: Tensor, starts: Tensor, anchors: Tensor) -> Tensor:
    """Weighted mean over the slots that count: the head's loss and the selector's."""
    task = make_task(model, drafter, ids, starts, anchors)
    hidden = drafter(task.embedded, drafter.context(task.taps), task.places)[..., 1:, :]
    logits = model.logits(hidden).float()
    log_p = logits.log_softmax(-1)
    hard = -log_p.gather(-1, task.labels[..., None])[..., 0]
    with torch.no_grad():
        teacher = model.logits(task.hidden).float().softmax(-1)
    soft = -(teacher * log_p).sum(-1)
    losses = (1 - SOFT) * hard + SOFT * soft + SELECTOR * selector_loss(drafter, hidden, logits, task)
    return (losses * task.weights).sum() / task.weights.sum().clamp_min(math.exp(-DECAY))
