"""What the gate runs over: the shapes of a 27B hybrid on the card, and a tiny table for triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.gated_delta import DeltaShape
from kernels.testing import CUTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Shapes of the products and heads, and the counts, columns and edges that are tried."""

    hidden: int
    ffn: int
    weights: tuple[tuple[str, int, int], ...]  #: (name, N, K)
    heads: int
    kv_heads: int
    head_dim: int
    rotary_half: int
    latent: tuple[int, int, int]  #: heads, rank, elements that RoPE turns
    index: tuple[int, int, int]  #: of sparse attention: heads, width, keys that a row sees
    delta: DeltaShape
    vocab: int
    vocab_split: int  #: ids of one program of a pick
    experts: int
    top_k: int
    expert_hidden: int
    expert_ffn: int
    rank: int
    counts: tuple[int, ...]  #: rows of decode and verify
    product_counts: tuple[int, ...]  #: the same of products, whose row tile follows the count
    prefill_counts: tuple[int, ...]
    columns: tuple[int, ...]
    edges: tuple[int, ...]  #: lengths of sequences
    cuts: tuple[tuple[int, ...], ...]  #: of one prompt
    windows: tuple[int, ...]
    float8: bool


_COUNTS: Final = (*range(1, 65), 65, 100, 129, 256)

CARD: Final = Sizes(
    hidden=5120,
    ffn=17408,
    weights=(
        ("qkv", 14336, 5120),
        ("mix", 16480, 5120),
        ("o", 5120, 6144),
        ("down", 5120, 17408),
        ("head", 248320, 5120),
    ),
    heads=24,
    kv_heads=4,
    head_dim=256,
    rotary_half=32,
    latent=(20, 512, 64),
    index=(32, 128, 200),
    delta=DeltaShape(16, 48, 128, 128),
    vocab=248320,
    vocab_split=4096,
    experts=256,
    top_k=8,
    expert_hidden=2048,
    expert_ffn=512,
    rank=16,
    counts=_COUNTS,
    product_counts=_COUNTS,
    prefill_counts=(1, 63, 64, 65, 127, 128, 129, 500, 1000, 2048),
    columns=tuple(range(1, 17)),
    edges=(1, 2, 16, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1025),
    cuts=(*CUTS, (448, 52)),
    windows=(0, 100),
    float8=True,
)

TINY: Final = Sizes(
    hidden=72,
    ffn=40,
    weights=(("o", 40, 72), ("down", 72, 1096)),
    heads=4,
    kv_heads=2,
    head_dim=16,
    rotary_half=4,
    latent=(3, 24, 8),
    index=(2, 8, 40),
    delta=DeltaShape(1, 2, 16, 16),
    vocab=70,
    vocab_split=32,
    experts=8,
    top_k=2,
    expert_hidden=40,
    expert_ffn=24,
    rank=8,
    counts=(1, 3, 17),
    # Tiles of one height: the interpreter's products are numpy's, which adds in another order in another height.
    product_counts=(65, 70, 100),
    prefill_counts=(1, 65),
    columns=(1, 3),
    edges=(1, 64, 257),
    cuts=((130,), (64, 66), (128, 2)),
    windows=(0,),
    float8=False,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the gate runs: a device, its type of weights and activations, and random numbers."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes

    def normal(self, *shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Gaussian values, another set for every seed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        made = torch.randn(*shape, generator=generator, device=self.device)
        return (made * scale).to(dtype or self.dtype)

    def ints(self, *values: int) -> Tensor:
        """int32 on the device."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def nan(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """What nobody wrote."""
        return torch.full(shape, torch.nan, dtype=dtype or self.dtype, device=self.device)

    def limit(self, *, half: float = 4e-3, single: float = 2e-5) -> float:
        """Error allowed: a bfloat16 result is rounded to 8 bits, a float32 one is not."""
        return half if self.dtype == torch.bfloat16 else single
