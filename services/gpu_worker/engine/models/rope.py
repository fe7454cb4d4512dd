"""RoPE tables with the scalings that public folders use: none, linear (gemma3), llama3's and yarn (deepseek, qwen3).

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
    """Of llama3's and yarn: turns within `original` below which a frequency is slow, above which it is fast."""
    original: int = 8192
    """Positions that the model was first trained for."""
    whole: bool = True
    """Of yarn: whether slow and fast begin at whole frequencies."""
    amplitude: float = 1.0
    """What cosines and sines are multiplied by."""

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
                    factor=_number(rope, "factor"),
                    low=_number(rope, "low_freq_factor"),
                    high=_number(rope, "high_freq_factor"),
                    original=int(_number(rope, "original_max_position_embeddings")),
                )
            case "yarn":
                return cls._from_yarn(rope)
        raise EngineFault(
            f"model config: rope_type {kind!r}: only default, linear, llama3 and yarn are computed"
        )

    @classmethod
    def _from_yarn(cls, rope: Mapping[str, Any]) -> RopeScaling:
        factor, amplitude = _number(rope, "factor"), rope.get("attention_factor")
        if amplitude is None:
            both = rope.get("mscale") and rope.get("mscale_all_dim")
            one, other = (rope["mscale"], rope["mscale_all_dim"]) if both else (1.0, 0.0)
            amplitude = yarn_magnitude(factor, one) / yarn_magnitude(factor, other)
        return cls(
            kind="yarn",
            factor=factor,
            low=float(rope.get("beta_slow") or 1),
            high=float(rope.get("beta_fast") or 32),
            original=int(_number(rope, "original_max_position_embeddings")),
            whole=bool(rope.get("truncate", True)),
            amplitude=float(amplitude),
        )

    def frequencies(self, rotary_dim: int, theta: float) -> Tensor:
        """[rotary_dim / 2] radians a position."""
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        plain = 1.0 / (theta**exponents)
        match self.kind:
            case "linear":
                return plain / self.factor
            case "llama3":
                return self._llama3(plain)
            case "yarn":
                return self._yarn(plain, rotary_dim, theta)
        return plain

    def _llama3(self, plain: Tensor) -> Tensor:
        """Slow turns are stretched by `factor`, fast ones not at all, those between by a mixture of both."""
        length = 2 * math.pi / plain
        share = (self.original / length - self.low) / (self.high - self.low)
        mixed = (1 - share) * plain / self.factor + share * plain
        slow, fast = length > self.original / self.low, length < self.original / self.high
        return torch.where(slow, plain / self.factor, torch.where(fast, plain, mixed))

    def _yarn(self, plain: Tensor, rotary_dim: int, theta: float) -> Tensor:
        """As llama3's, but the mixture is linear in the number of the frequency, between those that turn `high` and `low`
        times within the original context."""

        def number(turns: float) -> float:
            return rotary_dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = number(self.high), number(self.low)
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)
        width = last - first or 0.001
        slow = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
        return plain / self.factor * slow + plain * (1 - slow)


def _number(rope: Mapping[str, Any], name: str) -> float:
    value = rope.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise EngineFault(f"model config: {name} of rope must be a positive number, not {value!r}")
    return float(value)


def yarn_magnitude(factor: float, scale: float) -> float:
    """By how much attention is sharpened over a context `factor` times as long."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def scaled_rope_table(rotary_dim: int, theta: float, positions: int, scaling: RopeScaling) -> Tensor:
    """As `norm_rope.rope_table`: [positions, 2, rotary_dim / 2], cos first."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * scaling.frequencies(rotary_dim, theta)
    table = torch.stack([angles.cos(), angles.sin()], dim=1)
    return table if scaling.amplitude == 1.0 else table.mul_(scaling.amplitude)
