"""The block drafter for training: one causal pass over an anchor and seven masks, many anchors of a row at once.

The layout is the published DFlash2 one and `state_dict()` is its file: `fc` and `hidden_norm` turn the trunk's taps into
context features; every layer projects its keys and values from those features before the anchor and from the block
itself; a dynamic depthwise convolution stands before and behind each sublayer; a selector scores the 16 best
candidates of a slot given the token before it. Embedding and head are the trunk's and are not part of the file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.pocket.recipe.layers import rotate
from models.pocket.recipe.model import Mlp


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """The sizes that the drafter's config.json states."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    sliding_window: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int

    @classmethod
    def load(cls, folder: Path) -> BlockShape:
        """Reads config.json of `folder`."""
        config = json.loads((folder / "config.json").read_text())
        merged = {**config, **config["rope_parameters"], **config["dflash_config"]}
        rest = {name: merged[name] for name in cls.__dataclass_fields__ if name != "target_layer_ids"}
        return cls(**rest, target_layer_ids=tuple(merged["target_layer_ids"]))


@dataclass(frozen=True)
class Places:
    """Where the blocks of a batch stand, made once a forward.

    `anchors` [B, A] int64: the row's position of each anchor. `visible` [B, 1, A*S, T + A*S] bool: what a slot sees, first
    the context features, then the slots of all blocks. `cos`, `sin` [T + S, d] of the row's positions; `slots` [B, A*S]
    int64 are the slots' positions.
    """

    anchors: Tensor
    visible: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor

    @classmethod
    def of(cls, anchors: Tensor, documents: Tensor, shape: BlockShape) -> Places:
        """`documents` [B, T] int: the running number of the document that each position belongs to."""
        batch, count = anchors.shape
        length, size, device = documents.shape[1], shape.block_size, anchors.device
        within = torch.arange(size, device=device)
        slots = (anchors[..., None] + within).flatten(1)
        anchor = anchors.repeat_interleave(size, 1)[..., None]
        keys = torch.arange(length, device=device)
        same = documents.gather(1, anchors).repeat_interleave(size, 1)[..., None] == documents[:, None]
        context = same & (keys < anchor) & (keys > slots[..., None] - shape.sliding_window)
        number = torch.arange(count * size, device=device)
        block = (number[:, None] // size == number // size) & (number[:, None] >= number)
        visible = torch.cat((context, block.expand(batch, -1, -1)), -1)[:, None]
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
        angle = (
            torch.arange(length + size, dtype=torch.float32, device=device)[:, None] / shape.rope_theta**half
        )
        angle = torch.cat((angle, angle), -1)
        return cls(anchors, visible, angle.cos(), angle.sin(), slots)


class PlainNorm(nn.Module):
    """RMSNorm over the last axis in float32: x * rsqrt(mean(x^2) + eps) * w."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)


class DynamicConv(nn.Module):
    """Depthwise causal convolution inside a block, its taps partly computed from the sublayer's input.

    Side 0 convolves the sublayer's input x, side 1 its output; both kernels are read from x:
    y_i[c] = sum over taps t of (base[side, t, c] + delta_i[side, t, c // group]) * x_(i-t)[c], zero before the anchor.
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.taps, self.group = shape.conv_kernel_size, shape.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, shape.hidden_size))
        width = 2 * self.taps * (shape.hidden_size // self.group)
        self.kernel_projection = nn.Linear(shape.hidden_size, width, bias=False)

    def deltas(self, x: Tensor) -> Tensor:
        """x [..., S, H] -> [2, ..., S, taps, H // group]."""
        return self.kernel_projection(x).unflatten(-1, (2, self.taps, -1)).movedim(-3, 0)

    def convolve(self, x: Tensor, delta: Tensor, side: int) -> Tensor:
        """x [..., S, H], delta [..., S, taps, H // group] -> [..., S, H]."""
        y = torch.zeros_like(x)
        for tap in range(self.taps):
            kernel = self.base_kernel[side, tap] + delta[..., tap, :].repeat_interleave(self.group, -1)
            y = y + kernel * (F.pad(x[..., : x.shape[-2] - tap, :], (0, 0, tap, 0)))
        return y


class BlockAttention(nn.Module):
    """Attention of the slots over context features and their own block."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, shape.hidden_size, bias=False)
        self.q_norm = PlainNorm(self.width, shape.rms_norm_eps)
        self.k_norm = PlainNorm(self.width, shape.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, places: Places) -> Tensor:
        """x [B, A*S, H], context [B, T, H] -> [B, A*S, H]."""
        length = context.shape[1]
        slots_cos, slots_sin = (t[places.slots][:, None] for t in (places.cos, places.sin))
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1))).transpose(1, 2)
        keys, values = [], []
        for source, cos, sin in (
            (context, places.cos[:length], places.sin[:length]),
            (x, slots_cos, slots_sin),
        ):
            k = self.k_norm(self.k_proj(source).unflatten(-1, (self.kv_heads, -1))).transpose(1, 2)
            v = self.v_proj(source).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
            keys.append(rotate(k, cos, sin).to(v.dtype))
            values.append(v)
        q = rotate(q, slots_cos, slots_sin).to(values[0].dtype)
        repeat = self.heads // self.kv_heads
        k, v = (torch.cat(t, 2).repeat_interleave(repeat, 1) for t in (keys, values))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=places.visible)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class BlockLayer(nn.Module):
    """Attention and feed-forward, each between two convolutions; the residual stream stays float32."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.block_size = shape.block_size
        self.input_layernorm = PlainNorm(shape.hidden_size, shape.rms_norm_eps)
        self.attention_conv = DynamicConv(shape)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = PlainNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp_conv = DynamicConv(shape)
        self.mlp = Mlp(shape)

    def forward(self, h: Tensor, context: Tensor, places: Places) -> Tensor:
        """h [B, A, S, H], context [B, T, H] -> [B, A, S, H]."""
        x = self.input_layernorm(h)
        before, behind = self.attention_conv.deltas(x)
        x = self.attention_conv.convolve(x, before, 0).flatten(1, 2)
        out = self.self_attn(x, context, places).unflatten(1, (-1, self.block_size))
        h = h + self.attention_conv.convolve(out, behind, 1)
        x = self.post_attention_layernorm(h)
        before, behind = self.mlp_conv.deltas(x)
        out = self.mlp(self.mlp_conv.convolve(x, before, 0))
        return h + self.mlp_conv.convolve(out, behind, 1)


class Selector(nn.Module):
    """Scores a slot's candidates given the token before it: logit + <pred[previous] * project(hidden), succ[candidate]>."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.top_k = shape.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(shape.vocab_size, shape.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(shape.vocab_size, shape.selector_rank))
        self.hidden_projection = nn.Linear(shape.hidden_size, shape.selector_rank, bias=False)

    def scores(self, hidden: Tensor, logits: Tensor, candidates: Tensor, previous: Tensor) -> Tensor:
        """hidden [..., H], logits and candidates [..., C], previous [...] -> [..., C] float32."""
        mixed = F.embedding(previous, self.predecessor_codebook) * self.hidden_projection(hidden)
        against = F.embedding(candidates, self.successor_codebook)
        return logits.float() + (against * mixed[..., None, :]).sum(-1).float()


class BlockDrafter(nn.Module):
    """The drafter without embedding and head, which are the trunk's."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        taps = len(shape.target_layer_ids)
        self.fc = nn.Linear(taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = PlainNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = PlainNorm(shape.hidden_size, shape.rms_norm_eps)
        self.candidate_selector = Selector(shape)

    def context(self, taps: list[Tensor]) -> Tensor:
        """Context features of the outputs of the tapped layers, each [B, T, H] -> [B, T, H]."""
        return self.hidden_norm(self.fc(torch.cat(taps, -1)))

    def forward(self, embedded: Tensor, context: Tensor, places: Places) -> Tensor:
        """embedded [B, A, S, H] of anchor and masks -> hidden after the final norm [B, A, S, H]; slot j of a block at P
        predicts the token at P + j, slot 0 predicts nothing."""
        h = embedded
        for layer in self.layers:
            h = layer(h, context, places)
        return self.norm(h)

    @torch.no_grad()
    def walk(self, hidden: Tensor, logits: Tensor, anchor: Tensor) -> Tensor:
        """Greedy drafts [..., S-1]: per slot the best-scored of the candidates, left to right. hidden and logits
        [..., S-1, H or V] of slots 1 and up, anchor [...] token ids."""
        best, candidates = logits.float().topk(self.candidate_selector.top_k, -1)
        previous, drafts = anchor, []
        for slot in range(hidden.shape[-2]):
            at = (hidden[..., slot, :], best[..., slot, :], candidates[..., slot, :])
            chosen = self.candidate_selector.scores(*at, previous).argmax(-1, keepdim=True)
            previous = candidates[..., slot, :].gather(-1, chosen)[..., 0]
            drafts.append(previous)
        return torch.stack(drafts, -1)

    def initialise(self, seed: int, last_norm: Tensor) -> None:
        """Seeded start: matrices N(0, 0.02), outputs scaled by depth, convolutions the identity, the selector silent;
        `last_norm` [H] is the factor that the trunk's final norm multiplies by, which its head is used to."""
        generator = torch.Generator().manual_seed(seed)
        depth = math.sqrt(2 * len(self.layers))
        with torch.no_grad():
            self.norm.weight.copy_(last_norm)
            for name, parameter in self.named_parameters():
                if name.endswith("base_kernel"):
                    parameter[:, 0] = 1.0
                elif name.endswith("predecessor_codebook"):
                    parameter.normal_(0.0, 0.5, generator=generator)
                elif name.endswith(("successor_codebook", "kernel_projection.weight")):
                    parameter.zero_()
                elif parameter.ndim == 2:
                    out = name.endswith(("o_proj.weight", "down_proj.weight"))
                    parameter.normal_(0.0, 0.02 / depth if out else 0.02, generator=generator)
