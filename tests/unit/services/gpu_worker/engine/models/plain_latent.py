"""Latent attention's MTP head as slow torch: keys and values made for every head, no cache, no packing."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.models.latent_config import LatentTraits


class PlainLatentMTP:
    """Row p from (x_p, h_{p-1}), the embedding half first, zeros in front of row 0."""

    def __init__(self, folder: Path, dims: ModelDims, traits: LatentTraits) -> None:
        self.weights = load_file(folder / "model.safetensors")
        self.dims = dims
        self.traits = traits
        self.at = f"model.layers.{len(dims.layer_types)}."

    def __call__(self, ids: list[int], hiddens: Tensor) -> Tensor:
        before = torch.cat([torch.zeros(1, self.dims.hidden), hiddens[: len(ids) - 1]])
        embedded = self.weights["model.embed_tokens.weight"][ids]
        pair = torch.cat([self.norm(embedded, "enorm"), self.norm(before, "hnorm")], dim=-1)
        x = self.linear(pair, "eh_proj")
        x = x + self.attention(self.norm(x, "input_layernorm"))
        x = x + self.mixture(self.norm(x, "post_attention_layernorm"))
        return self.norm(x, "shared_head.norm")

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        eps = self.dims.eps if eps is None else eps
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * self.weights[f"{self.at}{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{self.at}{name}.weight"].T

    def rope(self, x: Tensor) -> Tensor:
        """[T, heads, rope_dim], neighbours turned together."""
        half = self.dims.rotary_dim // 2
        angles = torch.arange(len(x))[:, None] * self.dims.rope_theta ** -(torch.arange(half) / half)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], half, 2).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    def attention(self, x: Tensor) -> Tensor:
        widths, heads = self.dims.latent, self.dims.heads
        assert widths is not None
        inner = self.norm(self.linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm", 1e-6)
        query = self.linear(inner, "self_attn.q_b_proj").unflatten(1, (heads, -1))
        latent, shared = self.linear(x, "self_attn.kv_a_proj_with_mqa").split(
            [widths.rank, widths.rope_dim], 1
        )
        both = self.linear(self.norm(latent, "self_attn.kv_a_layernorm", 1e-6), "self_attn.kv_b_proj")
        keys, values = both.unflatten(1, (heads, -1)).split([widths.nope_dim, widths.value_dim], dim=2)
        keys = torch.cat([keys, self.rope(shared[:, None]).expand(-1, heads, -1)], dim=2)
        query = torch.cat([query[..., : widths.nope_dim], self.rope(query[..., widths.nope_dim :])], dim=2)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * (widths.nope_dim + widths.rope_dim) ** -0.5
        scores = scores.masked_fill(~self.seen(x, inner), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return self.linear(mixed.flatten(1), "self_attn.o_proj")

    def seen(self, x: Tensor, inner: Tensor) -> Tensor:
        """bool [T, T]: earlier keys, of sparse attention those that the index chooses."""
        earlier = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        assert self.dims.latent is not None
        index = self.dims.latent.index
        if index is None:
            return earlier
        at, rope = "self_attn.indexer.", self.dims.rotary_dim
        key = F.layer_norm(
            self.linear(x, at + "wk"),
            (index.width,),
            *(self.weights[f"{self.at}{at}k_norm.{part}"] for part in ("weight", "bias")),
            eps=1e-6,
        )[:, None]
        query = self.linear(inner, at + "wq_b").unflatten(1, (index.heads, -1))
        key, query = (
            torch.cat([self.rope(rows[..., :rope]), rows[..., rope:]], dim=-1) for rows in (key, query)
        )
        each = torch.einsum("qhd,kd->qhk", query, key[:, 0]).relu()
        scores = (each * self.linear(x, at + "weights_proj")[..., None]).sum(1)
        best = scores.masked_fill(~earlier, -torch.inf).topk(min(index.most, len(x))).indices
        return earlier & torch.zeros_like(earlier).scatter(1, best, True)

    def mixture(self, x: Tensor) -> Tensor:
        scores = self.linear(x, "mlp.gate").sigmoid()
        chosen_by = scores + self.weights[self.at + "mlp.gate.e_score_correction_bias"]
        ids = chosen_by.topk(self.dims.experts_per_row).indices
        weights = scores.gather(1, ids)
        weights = weights / weights.sum(-1, keepdim=True) * self.traits.routed_factor
        share = torch.zeros_like(scores).scatter(1, ids, weights)
        each = [self.mlp(x, f"mlp.experts.{expert}.") for expert in range(self.dims.experts)]
        return self.mlp(x, "mlp.shared_experts.") + (share[..., None] * torch.stack(each, 1)).sum(1)

    def mlp(self, x: Tensor, at: str) -> Tensor:
        return self.linear(
            F.silu(self.linear(x, at + "gate_proj")) * self.linear(x, at + "up_proj"), at + "down_proj"
        )
