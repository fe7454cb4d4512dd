"""Reading and writing the pocket model's weights: model.safetensors in bfloat16, Hugging Face names."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from models.pocket.recipe.block import BlockDrafter, BlockShape
from models.pocket.recipe.layers import Shape
from models.pocket.recipe.model import Pocket

FOLDER = Path(__file__).parent.parent


def save(model: nn.Module, path: Path) -> None:
    """Writes every parameter rounded to bfloat16. The head is tied, so there is no lm_head tensor."""
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def load_block(path: Path, folder: Path = FOLDER / "block") -> BlockDrafter:
    """A float32 block drafter of `folder`'s config with the weights of `path`; a missing or unknown tensor is an error."""
    drafter = BlockDrafter(BlockShape.load(folder))
    drafter.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    return drafter


def load(path: Path, folder: Path = FOLDER) -> Pocket:
    """A float32 model of `folder`'s config with the weights of `path`; a missing or unknown tensor is an error."""
    model = Pocket(Shape.load(folder))
    model.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    return model


def main() -> None:
    """Writes seeded random weights, the start of training."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--out", type=Path, default=FOLDER / "model.safetensors")
    arguments = parser.parse_args()
    model = Pocket(Shape.load(FOLDER))
    model.initialise(arguments.seed)
    save(model, arguments.out)
    print(sum(p.numel() for p in model.parameters()), "parameters ->", arguments.out)


if __name__ == "__main__":
    main()
