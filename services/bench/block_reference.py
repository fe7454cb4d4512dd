"""A block drafter run the slow way: the whole history in every pass, no ring, no cache, nothing shared with the engine's own.

Written from the equations of `models.block_config` alone, on the checkpoint's tensors by name, one block at a time in float32.
What the cached drafter loses against it, if anything, is what caching costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.gpu_worker.engine.models.block_config import BlockDims, Harvest


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowBlock:
    """A drafter over a target's embedding [V, H] and head [V, H]."""

    dims: BlockDims
    weights: Mapping[str, Tensor]
    embedding: Tensor
    head: Tensor

    @torch.no_grad()
    def rows(self, taps: Tensor, anchor: int) -> Tensor:
        """Final-normed rows y [B, H] of the block after `taps` [P, taps * H], the tapped rows of everything before."""
        dims, weights = self.dims, self.weights
        context = _norm(taps @ weights["fc.weight"].t(), weights["hidden_norm.weight"], dims.eps)
        ids = torch.tensor([anchor] + [dims.mask_token] * (dims.block - 1))
        x = self.embedding[ids]
        for index in range(dims.layers):
            at = f"layers.{index}."
            x = x + self._between(at + "attention_conv", at + "input_layernorm", x, at, context)
            x = x + self._between(at + "mlp_conv", at + "post_attention_layernorm", x, at, None)
        return _norm(x, weights["norm.weight"], dims.eps)

    @torch.no_grad()
    def drafts(self, taps: Tensor, anchor: int, count: int) -> list[int]:
        """Greedy drafts, left to right."""
        y = self.rows(taps, anchor)
        before, found = anchor, []
        first = 1 if self.dims.harvest is Harvest.DFLASH else 0
        for row in y[first : first + count]:
            before = self._pick(row, before)
            found.append(before)
        return found

    def _pick(self, row: Tensor, before: int) -> int:
        logits = (self.head @ row) * self.dims.output_multiplier
        if self.dims.logit_cap is not None:
            logits = self.dims.logit_cap * torch.tanh(logits / self.dims.logit_cap)
        if self.dims.selector_rank:
            at = "candidate_selector."
            values, ids = logits.topk(self.dims.selector_top)
            shift = self.weights[at + "hidden_projection.weight"] @ row
            weight = self.weights[at + "predecessor_codebook"][before] * shift
            scores = values + self.weights[at + "successor_codebook"][ids] @ weight
            return int(ids[scores.argmax()])
        if self.dims.markov_rank:
            first = self.weights["markov_head.markov_w1.weight"][before]
            logits = logits + self.weights["markov_head.markov_w2.weight"] @ first
        return int(logits.argmax())

    def _between(self, conv: str, norm: str, x: Tensor, at: str, context: Tensor | None) -> Tensor:
        """A sublayer between its two convolutions; `context` null = the mlp."""
        normed = _norm(x, self.weights[norm + ".weight"], self.dims.eps)
        inner = normed if not self.dims.conv_taps else self._convolved(conv, 0, normed, normed)
        out = self._mlp(inner, at) if context is None else self._attention(inner, at, context)
        return out if not self.dims.conv_taps else self._convolved(conv, 1, out, normed)

    def _convolved(self, name: str, side: int, x: Tensor, source: Tensor) -> Tensor:
        dims = self.dims
        shifts = (source @ self.weights[name + ".kernel_projection.weight"].t()).view(
            len(x), 2, dims.conv_taps, -1
        )
        base, out = self.weights[name + ".base_kernel"], torch.zeros_like(x)
        for row in range(len(x)):
            for back in range(min(dims.conv_taps, row + 1)):
                kernel = base[side, back] + shifts[row, side, back].repeat_interleave(dims.conv_group)
                out[row] += kernel * x[row - back]
        return out

    def _mlp(self, x: Tensor, at: str) -> Tensor:
        gate, up, down = (self.weights[f"{at}mlp.{name}_proj.weight"].t() for name in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down

    def _attention(self, x: Tensor, at: str, context: Tensor) -> Tensor:
        dims, start = self.dims, len(context)
        every = torch.cat([context, x])
        positions = torch.arange(len(every))
        query = self._heads(x, at, "q", dims.heads, positions[start:])
        keys = self._heads(every, at, "k", dims.kv_heads, positions)
        values = (every @ self.weights[at + "self_attn.v_proj.weight"].t()).view(
            len(every), dims.kv_heads, -1
        )
        group = dims.heads // dims.kv_heads
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("bhd,khd->hbk", query, keys) * dims.head_dim**-0.5
        distance = positions[start:, None] - positions[None]
        own = positions >= start
        seen = torch.where(
            own,
            (distance >= 0) if dims.causal else torch.ones_like(distance, dtype=torch.bool),
            distance < dims.window,
        )
        mixed = torch.einsum("hbk,khd->bhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
        return mixed.flatten(1) @ self.weights[at + "self_attn.o_proj.weight"].t()

    def _heads(self, x: Tensor, at: str, name: str, heads: int, positions: Tensor) -> Tensor:
        dims = self.dims
        rows = (x @ self.weights[f"{at}self_attn.{name}_proj.weight"].t()).view(len(x), heads, dims.head_dim)
        rows = _norm(rows, self.weights[f"{at}self_attn.{name}_norm.weight"], dims.eps)
        angles = positions[:, None] * dims.scaling.frequencies(dims.head_dim, dims.rope_theta)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        left, right = rows.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
