"""A block drafter's weights in their place: context features, its layers over one block, and what its rows propose.

The maths is that of `block_config`. Stateless between calls: context rows lie in a ring (`block_context`). Its bits never
reach a stream, so products take whatever number of rows there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import matmul, norm_rope
from kernels.norm_rope import qk_norm_rope
from services.gpu_worker.engine.models.block_config import BlockDims
from services.gpu_worker.engine.models.rope import scaled_rope_table
from services.gpu_worker.engine.placement import Placement

Product = Callable[[Tensor], Tensor]
"""[..., K] -> [..., N] of one weight [N, K]."""


class ContextView(NamedTuple):
    """What the slots of S blocks see of their context, and where the blocks stand."""

    keys: list[Tensor]
    """One a layer, [S, kv_heads, R, head_dim]."""
    values: list[Tensor]
    hidden: Tensor
    """bool [S, 1, 1, B, R + B]: keys that a slot does not see, context first, then the block's own."""
    cos_sin: Tensor
    """[S * B, 2, head_dim / 2]."""


class DynamicConv:
    """The two causal convolutions around a sublayer, whose kernels follow from the sublayer's input."""

    def __init__(self, base: Tensor, projection: Product, taps: int, group: int) -> None:
        """base [2, taps, H]; projection [2 * taps * groups, H]."""
        self._base = base.unflatten(-1, (-1, group))
        self._projection = projection
        self._taps = taps

    def kernels(self, x: Tensor) -> Tensor:
        """[S, B, H] -> [2, S, B, taps, H]: before the sublayer, after it."""
        shifts = self._projection(x).view(*x.shape[:2], 2, self._taps, -1, 1)
        return (shifts + self._base).flatten(-2).movedim(2, 0)

    @staticmethod
    def apply(x: Tensor, kernel: Tensor) -> Tensor:
        """x [S, B, H], kernel [S, B, taps, H]; zeros before the block."""
        out = kernel[:, :, 0] * x
        for back in range(1, kernel.shape[2]):
            out[:, back:] += kernel[:, back:, back] * x[:, :-back]
        return out


class DraftLayer:
    """One layer: attention over context and block, then SwiGLU, each perhaps between two convolutions."""

    def __init__(
        self, dims: BlockDims, weights: Mapping[str, Tensor], at: str, product: Callable[[Tensor], Product]
    ) -> None:
        self._dims = dims
        self._attention_scale = weights[at + "input_layernorm.weight"]
        self._mlp_scale = weights[at + "post_attention_layernorm.weight"]
        own = [weights[f"{at}self_attn.{name}_proj.weight"] for name in "qkv"]
        self._qkv, self._kv = product(torch.cat(own)), product(torch.cat(own[1:]))
        self._output = product(weights[at + "self_attn.o_proj.weight"])
        query = weights[at + "self_attn.q_norm.weight"] * dims.head_dim**-0.5
        self._key_scale = weights[at + "self_attn.k_norm.weight"].expand(dims.kv_heads, -1)
        self._scale = torch.cat([query.expand(dims.heads, -1), self._key_scale])
        self._gate_up = product(
            torch.cat([weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")])
        )
        self._down = product(weights[at + "mlp.down_proj.weight"])
        self._convs = [
            DynamicConv(
                weights[f"{at}{name}.base_kernel"],
                product(weights[f"{at}{name}.kernel_projection.weight"]),
                dims.conv_taps,
                dims.conv_group,
            )
            for name in (("attention_conv", "mlp_conv") if dims.conv_taps else ())
        ]

    def context_rows(self, context: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Context features [M, H] -> keys, values [M, kv_heads, head_dim]."""
        dims = self._dims
        keys, values = self._kv(context).view(len(context), 2, dims.kv_heads, dims.head_dim).unbind(1)
        return _turned(keys, self._key_scale, cos_sin, dims.eps), values

    def __call__(self, x: Tensor, layer: int, view: ContextView) -> Tensor:
        """[S, B, H] -> [S, B, H]."""
        x = x + self._around(0, x, self._attention_scale, partial(self._attend, layer=layer, view=view))
        return x + self._around(1, x, self._mlp_scale, self._mlp)

    def _around(self, part: int, x: Tensor, scale: Tensor, inner: Product) -> Tensor:
        normed = norm_rope.rms_norm(x.view(-1, x.shape[-1]), scale, self._dims.eps).view(x.shape)
        if not self._convs:
            return inner(normed)
        before, after = self._convs[part].kernels(normed)
        return DynamicConv.apply(inner(DynamicConv.apply(normed, before)), after)

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(F.silu(gate) * up)

    def _attend(self, x: Tensor, *, layer: int, view: ContextView) -> Tensor:
        dims, (sequences, block, _) = self._dims, x.shape
        rows = self._qkv(x).view(sequences * block, -1, dims.head_dim)
        turned = _turned(rows[:, : dims.heads + dims.kv_heads], self._scale, view.cos_sin, dims.eps)
        own_keys = turned[:, dims.heads :].view(sequences, block, dims.kv_heads, -1).transpose(1, 2)
        own_values = rows[:, dims.heads + dims.kv_heads :].view(sequences, block, dims.kv_heads, -1)
        query = turned[:, : dims.heads].view(sequences, block, dims.kv_heads, -1, dims.head_dim)
        query = query.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [S, kv_heads, group * B, head_dim]
        parts = [query @ keys.transpose(2, 3) for keys in (view.keys[layer], own_keys)]
        scores = torch.cat(parts, dim=3).float().unflatten(2, (-1, block))
        weights = scores.masked_fill_(view.hidden, -torch.inf).softmax(-1).to(rows.dtype).flatten(2, 3)
        context = view.keys[layer].shape[2]
        mixed = weights[..., :context] @ view.values[layer] + weights[..., context:] @ own_values.transpose(
            1, 2
        )
        mixed = mixed.unflatten(2, (-1, block)).permute(0, 3, 1, 2, 4)
        return self._output(mixed.reshape(sequences, block, -1))


class BlockDrafter:
    """`weights` as `block_shapes` names them."""

    def __init__(
        self,
        dims: BlockDims,
        weights: Mapping[str, Tensor],
        placement: Placement,
        recipe: matmul.Recipe,
        *,
        ids: Tensor | None = None,
        mask_row: Tensor | None = None,
    ) -> None:
        """`ids` [draft_vocab]: target ids that it can propose, null = all; `mask_row` [H]: its own embedding of a mask,
        null = the target's of `mask_token`."""
        self.dims = dims
        self.placement = placement
        self.ids = ids
        self.mask_row = None if mask_row is None else placement.matrix(mask_row)

        def product(weight: Tensor) -> Product:
            if placement.on_card:
                return partial(_linear, weight=placement.matrix(weight))
            return partial(_packed_linear, packed=matmul.pack(weight, recipe=recipe))

        placed = {
            name: placement.vector(weight) if weight.dim() == 1 else placement.matrix(weight)
            for name, weight in weights.items()
        }
        self._fc = product(placed["fc.weight"])
        self._context_scale = placed["hidden_norm.weight"]
        self._final_scale = placed["norm.weight"]
        self._layers = [DraftLayer(dims, placed, f"layers.{index}.", product) for index in range(dims.layers)]
        table = scaled_rope_table(dims.head_dim, dims.rope_theta, dims.max_positions, dims.scaling)
        self.rope = placement.vector(table)
        self.heads = {
            name: weight for name, weight in placed.items() if "_head." in name or "selector." in name
        }
        """The selector's, the Markov head's and the confidence head's tensors."""

    def features(self, taps: Tensor) -> Tensor:
        """Tapped rows [M, taps * H] -> context features [M, H]."""
        return norm_rope.rms_norm(self._fc(taps), self._context_scale, self.dims.eps)

    def context_rows(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Features [M, H] of rows at `positions` [M] -> keys, values [M, layers, kv_heads, head_dim]."""
        cos_sin = self.rope.index_select(0, positions.clamp(max=len(self.rope) - 1))
        rows = [layer.context_rows(features, cos_sin) for layer in self._layers]
        return torch.stack([keys for keys, _ in rows], 1), torch.stack([values for _, values in rows], 1)

    def forward(self, x: Tensor, view: ContextView) -> Tensor:
        """Embedded blocks [S, B, H] -> y [S, B, H] after the final norm."""
        for number, layer in enumerate(self._layers):
            x = layer(x, number, view)
        return norm_rope.rms_norm(x.view(-1, x.shape[-1]), self._final_scale, self.dims.eps).view(x.shape)


def _turned(x: Tensor, scale: Tensor, cos_sin: Tensor, eps: float) -> Tensor:
    """Heads [M, n, head_dim], normed and turned in float32, in their own type again."""
    return qk_norm_rope(x.float(), scale, cos_sin, eps).to(x.dtype)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def _packed_linear(x: Tensor, packed: matmul.Packed) -> Tensor:
    rows = matmul.linear(x.reshape(-1, x.shape[-1]).contiguous(), packed)
    return rows.view(*x.shape[:-1], -1)
