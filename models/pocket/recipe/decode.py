"""Greedy or sampled generation of many streams in lockstep, for evaluation and for the draft head's own-stream data.

Every stream consumes one token a step, its prompt first; nothing is prefetched, so ragged prompts need no padding rules.
Slow for one stream, quick for a thousand on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.pocket.recipe.layers import Attention, DeltaNet
from models.pocket.recipe.model import Pocket


@dataclass
class Recurrent:
    """A delta-net layer's memory: `window` [B, 3, C] pre-convolution inputs, `state` [B, heads, dk, dv] float32."""

    window: Tensor
    state: Tensor


@dataclass
class Cache:
    """An attention layer's memory, each [B, kv heads, capacity, d]."""

    keys: Tensor
    values: Tensor


def _recurrent_step(mixer: DeltaNet, x: Tensor, memory: Recurrent) -> Tensor:
    """x [B, 1, H] -> [B, 1, H]; updates `memory`."""
    rows = torch.cat((memory.window, mixer.in_proj_qkv(x)), 1)
    memory.window = rows[:, 1:]
    mixed = F.silu((rows * mixer.conv1d.weight[:, 0].t()).sum(1, keepdim=True))
    q, k, v = (t[:, 0] for t in mixer.heads(mixed))
    g, beta = (t[:, 0, :, None] for t in mixer.gates(x))
    state = memory.state * g[..., None].exp()
    delta = beta * (v - torch.einsum("bhkv,bhk->bhv", state, k))
    memory.state = state + k[..., None] * delta[..., None, :]
    out = torch.einsum("bhkv,bhk->bhv", memory.state, q * q.shape[-1] ** -0.5)
    return mixer.finish(out[:, None], x)


def _attention_step(
    mixer: Attention, x: Tensor, memory: Cache, position: int, cos: Tensor, sin: Tensor
) -> Tensor:
    """x [B, 1, H] at `position` -> [B, 1, H]; writes its key and value."""
    q, k, v, gate = mixer.project(x, cos[position : position + 1], sin[position : position + 1])
    memory.keys[:, :, position : position + 1] = k
    memory.values[:, :, position : position + 1] = v
    seen = position + 1
    visible = torch.ones(1, 1, 1, seen, dtype=torch.bool, device=x.device)
    return mixer.attend(q, memory.keys[:, :, :seen], memory.values[:, :, :seen], gate, visible)


class Stepper:
    """The trunk one position at a time, for `streams` rows and at most `capacity` positions."""

    def __init__(self, model: Pocket, streams: int, capacity: int) -> None:
        self.model = model
        shape = model.shape
        device = model.model.embed_tokens.weight.device
        half = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32, device=device) / shape.rotary_dim
        angle = torch.arange(capacity, dtype=torch.float32, device=device)[:, None] / shape.rope_theta**half
        angle = torch.cat((angle, angle), -1)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.memories: list[Recurrent | Cache] = []
        for layer in model.model.layers:
            if isinstance(layer.mixer, DeltaNet):
                channels = layer.mixer.in_proj_qkv.out_features
                window = torch.zeros(streams, shape.linear_conv_kernel_dim - 1, channels, device=device)
                size = (
                    streams,
                    shape.linear_num_value_heads,
                    shape.linear_key_head_dim,
                    shape.linear_value_head_dim,
                )
                self.memories.append(Recurrent(window, torch.zeros(size, device=device)))
            else:
                size = (streams, shape.num_key_value_heads, capacity, shape.head_dim)
                self.memories.append(
                    Cache(torch.zeros(size, device=device), torch.zeros(size, device=device))
                )

    def step(self, ids: Tensor, position: int) -> Tensor:
        """ids [B] at `position` -> hidden after the final norm [B, H]."""
        h = self.model.model.embed_tokens(ids)[:, None]
        for layer, memory in zip(self.model.model.layers, self.memories, strict=True):
            x = layer.input_layernorm(h)
            if isinstance(memory, Recurrent):
                h = layer.feed(h + _recurrent_step(layer.mixer, x, memory))
            else:
                h = layer.feed(h + _attention_step(layer.mixer, x, memory, position, self.cos, self.sin))
        return self.model.model.norm(h)[:, 0]


@torch.no_grad()
def generate(
    model: Pocket,
    prompts: list[list[int]],
    budget: int,
    stops: tuple[int, ...],
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Prompt and continuation of every stream, cut after its first stop token or `budget` new tokens."""
    device = model.model.embed_tokens.weight.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    capacity = int(lengths.max()) + budget
    ids = torch.zeros(len(prompts), capacity, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    ids = ids.to(device)
    stepper = Stepper(model, len(prompts), capacity)
    generator = torch.Generator(device).manual_seed(seed)
    ends = lengths + budget
    stop_ids = torch.tensor(stops, device=device)
    for position in range(capacity - 1):
        logits = model.logits(stepper.step(ids[:, position], position)).float()
        if temperature > 0:
            uniform = torch.rand(logits.shape, generator=generator, device=device).clamp_min(1e-20)
            logits = logits / temperature - (-uniform.log()).log()
        picked = logits.argmax(-1)
        free = (position + 1 >= lengths) & (position + 1 < ends)
        ids[:, position + 1] = torch.where(free, picked, ids[:, position + 1])
        stopped = free & torch.isin(picked, stop_ids)
        ends = torch.where(stopped, position + 2, ends)
        if position % 16 == 0 and bool((ends <= position + 1).all()):
            break
    kept = ids.tolist()
    return [row[: int(end)] for row, end in zip(kept, ends.tolist(), strict=True)]
