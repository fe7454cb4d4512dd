"""RoPE tables with the scalings that public folders use: none, linear (gemma3) and llama3's.

Sources: transformers 5.24, `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.errors import EngineFault


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How the frequencies of longer contexts are stretched."""

    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    """Positions that the model was first trained for; with `low` and `high`, of llama3's."""

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any]) -> RopeScaling:
        """Read `rope_parameters` or `rope_scaling`. Raises `EngineFault` on a type that is not computed."""
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        match kind:
            case "default":
                return cls()
            case "linear":
                return cls(kind=kind, factor=float(rope.get("factor", 1.0)))
            case "llama3":
                return cls(
                    kind=kind,
                    factor=float(rope["factor"]),
                    low=float(rope["low_freq_factor"]),
                    high=float(rope["high_freq_factor"]),
                    original=int(rope["original_max_position_embeddings"]),
                )
        raise EngineFault(f"model config: rope_type {kind!r}: only default, linear and llama3 are computed")

    def frequencies(self, rotary_dim: int, theta: float) -> Tensor:
        """[rotary_dim / 2] radians a position."""
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        plain = 1.0 / (theta**exponents)
        match self.kind:
            case "linear":
                return plain / self.factor
            case "llama3":
                return self._llama3(plain)
        return plain

    def _llama3(self, plain: Tensor) -> Tensor:
        """Slow turns are stretched by `factor`, fast ones not at all, those between by a mixture of both."""
        length = 2 * math.pi / plain
        share = (self.original / length - self.low) / (self.high - self.low)
        mixed = (1 - share) * plain / self.factor + share * plain
        slow, fast = length > self.original / self.low, length < self.original / self.high
        return torch.where(slow, plain / self.factor, torch.where(fast, plain, mixed))


def scaled_rope_table(rotary_dim: int, theta: float, positions: int, scaling: RopeScaling) -> Tensor:
    """As `norm_rope.rope_table`: [positions, 2, rotary_dim / 2], cos first."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * scaling.frequencies(rotary_dim, theta)
    return torch.stack([angles.cos(), angles.sin()], dim=1)
