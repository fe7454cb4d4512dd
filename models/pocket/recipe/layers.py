"""The mixers and norms of the pocket model over packed rows: gated delta net and gated attention, as `qwen3_5` has them.

Zero-centred RMSNorm (1 + w), gated norm weight from ones, partial rotary, flat GDN projections. The gated delta rule
runs in chunks of 64 in float32. Formulae: Qwen3.5 as transformers' `models/qwen3_5` defines it; checked by a test.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK: Final = 64
RESET_LOG_DECAY: Final = (
    -60.0
)  # exp(-60) = 9e-27: forgets everything, yet cumulative sums keep their precision


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that config.json states."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    rotary_dim: int
    rope_theta: float

    @classmethod
    def load(cls, folder: Path) -> Shape:
        """Reads config.json of `folder`."""
        config = json.loads((folder / "config.json").read_text())
        rope = config["rope_parameters"]
        rest = {
            name: config[name] for name in cls.__dataclass_fields__ if name in config and name != "rope_theta"
        }
        rest["layer_types"] = tuple(config["layer_types"])
        rotary = int(config["head_dim"] * rope["partial_rotary_factor"])
        return cls(**rest, rotary_dim=rotary, rope_theta=rope["rope_theta"])


@dataclass(frozen=True)
class Layout:
    """What the layers need to know of a packed batch, made once a forward.

    `starts` [B, T] bool; `documents` [B, T] int (running document number); `visible` [B, 1, T, T] bool (causal and the
    same document); `cos`, `sin` [T, rotary_dim] float32 of the row's own positions (rotary is relative, so an offset
    of a packed document does not matter).
    """

    starts: Tensor
    documents: Tensor
    visible: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, starts: Tensor, shape: Shape) -> Layout:
        length = starts.shape[1]
        documents = starts.int().cumsum(1)
        causal = torch.ones(length, length, dtype=torch.bool, device=starts.device).tril()
        visible = (documents[:, :, None] == documents[:, None, :]) & causal
        half = (
            torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32, device=starts.device) / shape.rotary_dim
        )
        angle = (
            torch.arange(length, dtype=torch.float32, device=starts.device)[:, None] / shape.rope_theta**half
        )
        angle = torch.cat((angle, angle), -1)
        return cls(starts, documents, visible[:, None], angle.cos(), angle.sin())


class Norm(nn.Module):
    """Zero-centred RMSNorm over the last axis, in float32: x * rsqrt(mean(x^2) + eps) * (1 + w)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight.float(), self.eps)


class GatedNorm(nn.Module):
    """RMSNorm with weight from ones, times silu(gate), in float32; over the value-head axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps) * F.silu(gate.float())


class Conv(nn.Module):
    """Depthwise causal convolution of `kernel` taps, then silu; taps before a document's start read zero."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        """x [B, T, channels] -> the same shape."""
        kernel = self.weight.shape[-1]
        weight = self.weight[:, 0].to(x.dtype)
        y = x * weight[:, kernel - 1]
        for back in range(1, min(kernel, x.shape[1])):
            same = (documents[:, back:] == documents[:, :-back])[..., None]
            y = y + F.pad((x[:, :-back] * same) * weight[:, kernel - 1 - back], (0, 0, back, 0))
        return F.silu(y)


def l2norm(x: Tensor) -> Tensor:
    """x * rsqrt(sum(x^2) + 1e-6) over the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The chunked gated delta rule. q, k [B, T, H, dk] and v [B, T, H, dv] float32, g and beta [B, T, H]; T is a
    multiple of 64. Returns [B, T, H, dv]. Within a chunk the rank-one updates are solved as one triangular system, then the state is carried on.
    """
    batch, length, heads, width = q.shape
    count = length // CHUNK

    def chunked(x: Tensor) -> Tensor:
        return x.reshape(batch, count, CHUNK, heads, -1).permute(0, 3, 1, 2, 4)

    q, k, v = chunked(q) * width**-0.5, chunked(k), chunked(v)
    beta = chunked(beta)
    total = chunked(g).cumsum(3)  # [B, H, N, C, 1]
    decay = (total - total.transpose(3, 4)).tril().exp().tril()
    lower = (((k * beta) @ k.transpose(3, 4)) * decay).tril(-1)
    right = torch.cat((v * beta, k * beta * total.exp()), -1)
    eye = torch.eye(CHUNK, device=q.device, dtype=q.dtype)
    solved = torch.linalg.solve_triangular(lower + eye, right, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], width), -1)
    attend = (q @ k.transpose(3, 4)) * decay
    q_in = q * total.exp()
    last = total[:, :, :, -1:]
    k_out = (k * (last - total).exp()).transpose(3, 4)
    carry = last.exp()
    state = q.new_zeros(batch, heads, width, v.shape[-1])
    out = []
    for n in range(count):
        fresh = u[:, :, n] - w[:, :, n] @ state
        out.append(q_in[:, :, n] @ state + attend[:, :, n] @ fresh)
        state = carry[:, :, n] * state + k_out[:, :, n] @ fresh
    return torch.stack(out, 2).permute(0, 2, 3, 1, 4).reshape(batch, length, heads, -1)


class DeltaNet(nn.Module):
    """Gated delta net mixer. [B, T, H] -> [B, T, H]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.key_width = shape.linear_num_key_heads * shape.linear_key_head_dim
        value_width = shape.linear_num_value_heads * shape.linear_value_head_dim
        mixed = 2 * self.key_width + value_width
        self.in_proj_qkv = nn.Linear(shape.hidden_size, mixed, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden_size, value_width, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden_size, shape.linear_num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden_size, shape.linear_num_value_heads, bias=False)
        self.conv1d = Conv(mixed, shape.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.empty(shape.linear_num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(shape.linear_num_value_heads))
        self.norm = GatedNorm(shape.linear_value_head_dim, shape.rms_norm_eps)
        self.out_proj = nn.Linear(value_width, shape.hidden_size, bias=False)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(g, beta), each [B, T, value heads] float32."""
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        return g, self.in_proj_b(x).float().sigmoid()

    def heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits convolved channels [B, T, C] into normalised q, k and v, each [B, T, value heads, d] float32."""
        batch, length, _ = mixed.shape
        repeat = self.shape.linear_num_value_heads // self.shape.linear_num_key_heads
        q, k, v = mixed.float().split(
            (self.key_width, self.key_width, mixed.shape[-1] - 2 * self.key_width), -1
        )
        q, k = (
            l2norm(x.reshape(batch, length, self.shape.linear_num_key_heads, -1)).repeat_interleave(repeat, 2)
            for x in (q, k)
        )
        return q, k, v.reshape(batch, length, self.shape.linear_num_value_heads, -1)

    def finish(self, out: Tensor, x: Tensor) -> Tensor:
        """Gated norm and output projection of the rule's output [B, T, value heads, dv]."""
        z = self.in_proj_z(x).reshape(out.shape)
        return self.out_proj(self.norm(out, z).flatten(2).to(x.dtype))

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        length = x.shape[1]
        q, k, v = self.heads(self.conv1d(self.in_proj_qkv(x), layout.documents))
        g, beta = self.gates(x)
        g = torch.where(layout.starts[..., None], RESET_LOG_DECAY, g)
        pad = -length % CHUNK
        if pad:
            q, k, v = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (q, k, v))
            g, beta = (F.pad(t, (0, 0, 0, pad)) for t in (g, beta))
        with torch.autocast(x.device.type, enabled=False):
            out = gated_delta(q, k, v, g, beta)[:, :length]
        return self.finish(out, x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """NeoX rotary on the first `rotary_dim` of x [B, heads, T, d]; cos, sin [T, rotary_dim]."""
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    left, right = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-right, left), -1) * sin, rest), -1)


class Attention(nn.Module):
    """Gated full attention. [B, T, H] -> [B, T, H]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide = shape.num_attention_heads * shape.head_dim
        narrow = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, 2 * wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden_size, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q, k, v, gate): q [B, heads, T, d], k and v [B, kv heads, T, d] with rotary applied; gate [B, T, heads*d]."""
        batch, length, _ = x.shape
        pair = self.q_proj(x).reshape(batch, length, self.shape.num_attention_heads, -1)
        q, gate = pair.chunk(2, -1)
        k = self.k_proj(x).reshape(batch, length, self.shape.num_key_value_heads, -1)
        v = self.v_proj(x).reshape(batch, length, self.shape.num_key_value_heads, -1).transpose(1, 2)
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin).to(v.dtype)
        return q, k, v, gate.reshape(batch, length, -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, visible: Tensor) -> Tensor:
        """Softmax over `visible` [B, 1, T, keys], the gate, the output projection."""
        repeat = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = (t.repeat_interleave(repeat, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.o_proj(out.transpose(1, 2).flatten(2) * gate.sigmoid())

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        q, k, v, gate = self.project(x, layout.cos, layout.sin)
        return self.attend(q, k, v, gate, layout.visible)
