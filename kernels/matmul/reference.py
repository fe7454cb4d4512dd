"""Row-exact float32 matmul on the CPU.

Two recipes, other bits, so the choice is part of the fingerprint:

- `onednn`: weights reordered once for oneDNN. Row bits were equal for every row count tried, and small row counts are
  nearly free. It rests on a private torch operation, so it is believed only after a self-test on this machine.
- `tiled`: `F.linear` on 16 rows at a time, the last tile padded. MKL picks its kernel, and with several threads its cut
  of a long K, by the row count; here it only ever sees one. Several times slower at prefill, bits per thread count.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation.reference import swiglu
from kernels.matmul.packed import NotRowExact, Packed, Recipe
from kernels.tiles import MATMUL_TILE

_ONEDNN_HINT: Final = 16
"""Row count that oneDNN is told to lay the weights out for; only speed depends on it."""

TEST_ROWS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 31, 32, 33, 48, 63, 64, 65, 128, 448)
"""Row counts of the self-test: verify batches, tile edges, prefill chunks."""


_WIDEST: Final = 8192
"""Most outputs of a self-test weight, so that a head of 250,000 tokens does not cost seconds; columns are independent."""


def pack(weight: Tensor, recipe: Recipe, *, pairs: bool = False) -> Packed:
    """Lay out a float32 weight [N, K] (copied for `onednn`, made contiguous for `tiled`)."""
    n, k = weight.shape
    if recipe == "onednn":
        laid_out = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ONEDNN_HINT)
        return Packed(laid_out, recipe, n, k, pairs)
    return Packed(weight.contiguous(), recipe, n, k, pairs)


def linear(x: Tensor, packed: Packed) -> Tensor:
    """[M, K] contiguous float32 -> [M, N]."""
    if packed.recipe == "onednn":
        return torch.ops.mkldnn._linear_pointwise(x, packed.weight, None, "none", [], "")
    rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -rows % MATMUL_TILE))
    tiles = [F.linear(tile, packed.weight) for tile in padded.split(MATMUL_TILE)]
    return torch.cat(tiles)[:rows]


def linear_swiglu(x: Tensor, packed: Packed) -> Tensor:
    """[M, K] -> silu(gate) * up, [M, N / 2], of a weight whose rows are [gate; up]."""
    return swiglu(linear(x, packed))


def row_exact(packed: Packed, in_features: int) -> bool:
    """Whether rows keep their bits over `TEST_ROWS`, at the front and at the back of a larger product."""
    generator = torch.Generator().manual_seed(in_features * 1_000_003 + packed.out_features)
    most = max(TEST_ROWS) + 64
    x = torch.randn(most, in_features, generator=generator)
    whole = linear(x, packed)
    for rows in TEST_ROWS:
        for first in (0, most - rows):
            part = linear(x[first : first + rows].contiguous(), packed)
            if not torch.equal(part, whole[first : first + rows]):
                return False
    return True


def choose_recipe(shapes: Iterable[tuple[int, int]]) -> Recipe:
    """The first recipe that is row-exact for weights of all these shapes (N, K) under the current thread count.

    Raises `NotRowExact` when none is: serving would break the one-stream contract silently.
    """
    wanted = sorted(set(shapes))
    candidates: tuple[Recipe, ...] = (
        ("onednn", "tiled") if torch.backends.mkldnn.is_available() else ("tiled",)
    )
    for recipe in candidates:
        if all(_holds(recipe, min(n, _WIDEST), k, torch.get_num_threads()) for n, k in wanted):
            return recipe
    raise NotRowExact(f"no matmul recipe of {candidates} is row-exact for {wanted}")


@lru_cache(maxsize=256)
def _holds(recipe: Recipe, n: int, k: int, threads: int) -> bool:
    """The self-test of one shape, remembered: the answer belongs to machine, torch and thread count (the key's last part)."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * 31 + k))
    return row_exact(pack(weight, recipe), k)
