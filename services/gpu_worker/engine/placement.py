"""Where a model lives and in which types: decided once, at load. Nothing after it asks what the device is.

On the CPU all is float32 and every verify folds what is pending. On a card weights, activations and KV are bfloat16 (or
float32, for tests), recurrent states, accumulators and logits stay float32, and a state is written back only every few
rows: the rows between are replayed from the store, in the same loop and with the same bits (`StatePool`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Final

import torch
from torch import Tensor

from kernels import matmul
from shared.errors import EngineFault

CARD_FOLD_ROWS: Final = 6
"""Accepted rows that wait for a fold on a card. At 64 sequences a state written costs 0.8 us a layer and sequence, a row
replayed 0.02 to 0.04 us: steps are fastest between 6 and 8, and at 1 and 16 sequences it makes no difference."""

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}
"""By the name in the settings; `float8` is of weights alone, whose products widen them again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Device and types of one engine."""

    device: torch.device
    dtype: torch.dtype
    """Of weights, activations and KV."""
    on_card: bool = False
    """Whether launches read fixed-address tensors and pools are laid out for device kernels."""
    fold_rows: int = 0
    """Pending rows from which a verify stores the state; 0 = it always does, as the twin must."""
    recipe: matmul.Recipe | None = None
    """How products are computed; null = what the self-test of the machine finds."""
    draft_vocab: int = 0
    """Drafts that are picked on the card come from the first so many ids, which tokenizers number by frequency; 0 = from
    all. Costs acceptance where it leaves an id out, never a bit of the output."""

    @property
    def graphs(self) -> bool:
        """Whether launches can be kept as graphs."""
        return self.device.type == "cuda"

    @property
    def dtype_name(self) -> str:
        """For fingerprints and tables."""
        return str(self.dtype).removeprefix("torch.")

    def identity(self) -> dict[str, str]:
        """What the bits depend on beyond the model, for the fingerprint."""
        kind = {"dtype": self.dtype_name, "backend": "card" if self.on_card else "cpu-torch-twin"}
        if not self.graphs:
            return kind | {"instruction_set": torch.backends.cpu.get_cpu_capability()}
        name, capability = (
            torch.cuda.get_device_name(self.device),
            torch.cuda.get_device_capability(self.device),
        )
        return kind | {
            "card": f"{name} sm_{capability[0]}{capability[1]}",
            "cuda": str(torch.version.cuda),
            "triton": metadata.version("triton"),
        }

    def matrix(self, weight: Tensor) -> Tensor:
        """A weight of a product or an embedding table, in the activations' type."""
        return weight.to(device=self.device, dtype=self.dtype)

    def vector(self, weight: Tensor) -> Tensor:
        """A norm, bias or filter, kept in float32."""
        return weight.to(device=self.device, dtype=torch.float32)

    def recipe_for(self, shapes: Iterable[tuple[int, int]]) -> matmul.Recipe:
        """The matmul recipe of weights (N, K). Raises `EngineFault` when none is row-exact here."""
        if self.recipe is not None:
            return self.recipe
        try:
            return matmul.choose_recipe(shapes)
        except matmul.NotRowExact as error:
            raise EngineFault(str(error)) from error


CPU: Final = Placement(device=torch.device("cpu"), dtype=torch.float32)


def place(device: str = "cpu", dtype: str | None = None, *, draft_vocab: int = 0) -> Placement:
    """The placement a setting names. Raises `EngineFault` for a device that is not there or a type that is not run."""
    if device == "cpu":
        if dtype not in (None, "float32"):
            raise EngineFault(f"the CPU computes in float32, not in {dtype}")
        return CPU
    if not device.startswith("cuda"):
        raise EngineFault(f"device {device!r} is neither cpu nor cuda")
    if not torch.cuda.is_available():
        raise EngineFault(f"device {device!r}: torch sees no card here")
    name = dtype or "bfloat16"
    if name not in _DTYPES:
        raise EngineFault(f"dtype {dtype!r} is none of {sorted(_DTYPES)}")
    return Placement(
        device=torch.device(device),
        dtype=_DTYPES[name],
        on_card=True,
        fold_rows=CARD_FOLD_ROWS,
        recipe="card-fp8" if name == "float8" else "card",
        draft_vocab=draft_vocab,
    )
