"""The hybrid's MTP head as slow torch, for the head that the engine runs."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from services.gpu_worker.engine.config import ModelDims


class PlainMTP:
    """The head over a whole sequence, written from the formula: no cache, no packing, torch's own softmax."""

    def __init__(self, folder: Path, dims: ModelDims) -> None:
        self.weights = load_file(folder / "model.safetensors")
        self.dims = dims

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.dims.eps).rsqrt() * (1 + self.weights[name])

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"mtp.layers.0.{name}.weight"].T

    def rope(self, x: Tensor) -> Tensor:
        half = self.dims.rotary_dim // 2
        angles = torch.arange(len(x))[:, None] * self.dims.rope_theta ** -(torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., :half], x[..., half : 2 * half]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], dim=-1)

    def attention(self, x: Tensor) -> Tensor:
        dims, at = self.dims, "mtp.layers.0.self_attn."
        query, gate = self.linear(x, "self_attn.q_proj").view(-1, dims.heads, 2, dims.head_dim).unbind(2)
        key = self.linear(x, "self_attn.k_proj").view(-1, dims.kv_heads, dims.head_dim)
        value = self.linear(x, "self_attn.v_proj").view(-1, dims.kv_heads, dims.head_dim)
        query = self.rope(self.norm(query, at + "q_norm.weight")).transpose(0, 1)
        key = self.rope(self.norm(key, at + "k_norm.weight")).repeat_interleave(dims.group, 1).transpose(0, 1)
        scores = query @ key.transpose(1, 2) * dims.head_dim**-0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -torch.inf)
        out = scores.softmax(-1) @ value.repeat_interleave(dims.group, 1).transpose(0, 1)
        return self.linear((out.transpose(0, 1) * gate.sigmoid()).flatten(1), "self_attn.o_proj")

    def __call__(self, ids: list[int], hiddens: Tensor) -> Tensor:
        """Row p from (x_p, h_{p-1}), the embedding half first, zeros in front of row 0."""
        before = torch.cat([torch.zeros(1, self.dims.hidden), hiddens[: len(ids) - 1]])
        embedded = self.weights["model.embed_tokens.weight"][ids]
        pair = torch.cat(
            [
                self.norm(embedded, "mtp.pre_fc_norm_embedding.weight"),
                self.norm(before, "mtp.pre_fc_norm_hidden.weight"),
            ],
            dim=-1,
        )
        x = pair @ self.weights["mtp.fc.weight"].T
        x = x + self.attention(self.norm(x, "mtp.layers.0.input_layernorm.weight"))
        y = self.norm(x, "mtp.layers.0.post_attention_layernorm.weight")
        y = self.mixture(y) if self.dims.mixes(len(self.dims.layer_types)) else self.mlp(y, "mlp.")
        return self.norm(x + y, "mtp.norm.weight")

    def mlp(self, x: Tensor, at: str) -> Tensor:
        return self.linear(
            F.silu(self.linear(x, at + "gate_proj")) * self.linear(x, at + "up_proj"), at + "down_proj"
        )

    def expert(self, x: Tensor, number: int) -> Tensor:
        """Stored with the others, or alone."""
        stacked = self.weights.get("mtp.layers.0.mlp.experts.gate_up_proj")
        if stacked is None:
            return self.mlp(x, f"mlp.experts.{number}.")
        gate, up = (x @ stacked[number].T).chunk(2, dim=-1)
        return F.silu(gate) * up @ self.weights["mtp.layers.0.mlp.experts.down_proj"][number].T

    def mixture(self, x: Tensor) -> Tensor:
        """Every expert on every row, weighed by a softmax of which the chosen parts are kept."""
        weights, ids = self.linear(x, "mlp.gate").softmax(-1).topk(self.dims.experts_per_row)
        if self.dims.expert_weights_sum_to_one:
            weights = weights / weights.sum(-1, keepdim=True)
        share = torch.zeros(len(x), self.dims.experts).scatter(1, ids, weights)
        each = [self.expert(x, expert) for expert in range(self.dims.experts)]
        shared = self.linear(x, "mlp.shared_expert_gate").sigmoid() * self.mlp(x, "mlp.shared_expert.")
        return shared + (share[..., None] * torch.stack(each, 1)).sum(1)
