"""The pocket model for training: the `qwen3_5` trunk and its MTP head over packed rows of documents.

Parameter names are those of a Hugging Face checkpoint, so `state_dict()` is the file. A row of the batch may hold
several documents: `starts` marks their first tokens, where the recurrent state, the convolution window and the
attention begin anew, so each document computes what it would compute alone.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.pocket.recipe.layers import Attention, DeltaNet, Layout, Norm, Shape


class Mlp(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """h += mixer(norm(h)); h += mlp(norm(h)). The residual stream stays float32."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        if kind == "linear_attention":
            self.linear_attn = DeltaNet(shape)
        else:
            self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)

    @property
    def mixer(self) -> DeltaNet | Attention:
        return self.linear_attn if hasattr(self, "linear_attn") else self.self_attn

    def feed(self, h: Tensor) -> Tensor:
        """The second half of the block."""
        return h + self.mlp(self.post_attention_layernorm(h))

    def forward(self, h: Tensor, layout: Layout) -> Tensor:
        return self.feed(h + self.mixer(self.input_layernorm(h), layout))


class Trunk(nn.Module):
    """Embedding, blocks, final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape, kind) for kind in shape.layer_types)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def outputs(self, ids: Tensor, layout: Layout) -> list[Tensor]:
        """ids [B, T] -> the output of every layer [B, T, H], float32; what a block drafter taps."""
        h, outputs = self.embed_tokens(ids), []
        for layer in self.layers:
            h = layer(h, layout)
            outputs.append(h)
        return outputs

    def forward(self, ids: Tensor, layout: Layout) -> Tensor:
        """ids [B, T] -> hidden states after the final norm [B, T, H], float32."""
        return self.norm(self.outputs(ids, layout)[-1])


class Mtp(nn.Module):
    """The draft head. Row p takes (embedding of x_p, hidden of p-1) and its output y_p predicts x_(p+1)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.pre_fc_norm_embedding = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.pre_fc_norm_hidden = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList([Block(shape, "full_attention")])
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def unroll(self, embedded: Tensor, hidden: Tensor, layout: Layout, steps: int) -> list[Tensor]:
        """Outputs y of chain steps 1..`steps`, each [B, T, H]; `embedded` and `hidden` (after the final norm) are
        [B, T, H] of the same positions.

        Step 1 pairs x_p with the trunk's h_(p-1); step s > 1 pairs x_p with y_(p-1) of step s-1. A step-s row at p
        sees what it sees when serving: true rows up to p-s+1, then one row of each earlier chain step, then itself.
        """
        block = self.layers[0]
        begins = layout.starts[..., None]
        positions = torch.arange(embedded.shape[1], device=embedded.device)
        distance = positions[:, None] - positions[None, :]
        previous, keys, values, outputs = hidden, [], [], []
        for step in range(steps):
            before = torch.where(begins, 0.0, F.pad(previous[:, :-1], (0, 0, 1, 0)))
            pair = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(before)), -1)
            h = self.fc(pair)
            q, k, v, gate = block.self_attn.project(block.input_layernorm(h), layout.cos, layout.sin)
            keys.append(k)
            values.append(v)
            masks = [layout.visible & (distance >= step)]
            masks += [layout.visible & (distance == step - s) for s in range(1, step + 1)]
            out = block.self_attn.attend(
                q, torch.cat(keys, 2), torch.cat(values, 2), gate, torch.cat(masks, -1)
            )
            previous = self.norm(block.feed(h + out))
            outputs.append(previous)
        return outputs


class Pocket(nn.Module):
    """Trunk and draft head; the language-model head is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.mtp = Mtp(shape)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V]."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def initialise(self, seed: int) -> None:
        """Seeded start: matrices N(0, 0.02), outputs scaled by depth, decays spread over 1/16 to 16 tokens and more."""
        generator = torch.Generator().manual_seed(seed)
        depth = math.sqrt(2 * len(self.shape.layer_types))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("A_log"):
                    parameter.copy_(
                        torch.empty_like(parameter).uniform_(1.0, 16.0, generator=generator).log()
                    )
                elif name.endswith("dt_bias"):
                    low, high = math.log(1e-3), math.log(1e-1)
                    step = torch.empty_like(parameter).uniform_(low, high, generator=generator).exp()
                    parameter.copy_(step + torch.log(-torch.expm1(-step)))  # inverse softplus
                elif name.endswith("conv1d.weight"):
                    parameter.copy_(torch.empty_like(parameter).uniform_(-0.5, 0.5, generator=generator))
                elif parameter.ndim == 2:
                    out = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                    scale = 0.02 / depth if out else 0.02
                    parameter.copy_(torch.empty_like(parameter).normal_(0.0, scale, generator=generator))
