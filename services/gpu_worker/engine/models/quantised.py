"""Float8 checkpoints: weights of 8 bits with scales beside them, widened as they are read.

    w = q * s      s one number for the tensor, one an output row, or one a block of `weight_block_size` rows and columns

`{name}_scale_inv` (DeepSeek's layout, blocks) and `{name}_scale` (compressed-tensors, rows or one) both multiply. What a
checkpoint says of activations is not needed, since they are not quantised here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from shared.errors import EngineFault

FLOAT8: Final = "F8_E4M3"
"""As safetensors names the type."""
SCALES: Final = ("_scale_inv", "_scale")
"""What follows the weight's name in that of its scales."""
_UNUSED: Final = (".input_scale", ".k_scale", ".v_scale", ".q_scale", ".output_scale")
_BLOCK: Final = (128, 128)
_READ: Final = ("fp8", "compressed-tensors")


def read_block(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block that shares a scale. Raises `EngineFault` for other kinds of quantisation than float8."""
    quantised = config.get("quantization_config") or config.get("compression_config")
    if not quantised:
        return _BLOCK
    method = quantised.get("quant_method")
    if method not in _READ or quantised.get("format", "float-quantized") != "float-quantized":
        raise EngineFault(
            f"model config: quantization_config: quant_method {method!r}, format {quantised.get('format')!r}: only "
            "float8 weights are read"
        )
    block = quantised.get("weight_block_size") or _BLOCK
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise EngineFault(f"model config: weight_block_size must be two positive integers, not {block!r}")
    return int(block[0]), int(block[1])


def is_scale(name: str) -> bool:
    """Whether a tensor belongs to quantisation."""
    return name.endswith(SCALES) or name.endswith(_UNUSED)


def scales_fit(scale: tuple[int, ...], weight: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Whether scales of this shape are any of a weight's [N, K]."""
    grid = tuple(-(-size // step) for size, step in zip(weight, block, strict=True))
    return scale in ((), (1,), (weight[0],), (weight[0], 1), grid)


def widened(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """float8 [N, K] and its scales -> float32 [N, K]."""
    out, scale = weight.to(torch.float32), scale.to(torch.float32)
    rows, columns = weight.shape
    if scale.dim() < 2 or tuple(scale.shape) == (rows, 1):
        return out.mul_(scale.view(-1, 1))
    wide = scale.repeat_interleave(block[1], dim=1)[:, :columns]
    for first in range(0, rows, block[0]):
        out[first : first + block[0]].mul_(wide[first // block[0]])
    return out
