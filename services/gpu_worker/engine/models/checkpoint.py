"""Reading safetensors folders: which file holds a tensor, its shape against what is wanted, its bytes once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.gpu_worker.engine.models.tensors import Shapes
from shared.errors import EngineFault

_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
"""Of the text model in vision-language checkpoints, today's and older ones -> what stands there without."""

_FLOATS = {torch.float32, torch.bfloat16, torch.float16}


class Checkpoint:
    """The tensors of a folder under their text-model names. Raises `EngineFault` when there are none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stored = {_plain(name): (name, file) for name, file in _index(folder).items()}

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def names(self) -> frozenset[str]:
        """All tensor names, prefixes of vision-language checkpoints removed."""
        return frozenset(self._stored)

    def load(self, shapes: Shapes) -> tuple[dict[str, Tensor], str]:
        """Read the tensors one by one as float32, and the SHA-256 (hex) over their names, dtypes, shapes and bytes.

        Raises `EngineFault` naming the tensor, its file and the expected and actual shape.
        """
        missing = sorted(set(shapes) - set(self._stored))
        if missing:
            raise EngineFault(f"{self.folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
        content, weights = hashlib.sha256(), {}
        for file in sorted({self._stored[name][1] for name in shapes}):
            try:
                with safe_open(self.folder / file, framework="pt") as opened:
                    for name in (name for name in shapes if self._stored[name][1] == file):
                        weights[name] = self._read(
                            opened.get_tensor(self._stored[name][0]), name, shapes[name], file
                        )
            except (SafetensorError, OSError) as error:
                raise EngineFault(f"{self.folder / file}: not readable as safetensors: {error}") from error
        for name in sorted(shapes):
            tensor = weights[name]
            content.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
            content.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return {name: tensor.to(torch.float32) for name, tensor in weights.items()}, content.hexdigest()

    def _read(self, tensor: Tensor, name: str, shape: tuple[int, ...], file: str) -> Tensor:
        if tuple(tensor.shape) != shape:
            raise EngineFault(
                f"{self.folder / file}: tensor {name} has shape {tuple(tensor.shape)}, expected {shape}"
            )
        if tensor.dtype not in _FLOATS:
            raise EngineFault(
                f"{self.folder / file}: tensor {name} is {tensor.dtype}, expected a 16- or 32-bit float"
            )
        return tensor


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file of the folder; raises `EngineFault` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineFault(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise EngineFault(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value


def _plain(name: str) -> str:
    for prefix, plain in _PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or from the single file."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise EngineFault(f"{index}: weight_map is missing")
        return {str(name): str(file) for name, file in weight_map.items()}
    if not single.exists():
        raise EngineFault(f"{folder}: neither model.safetensors nor model.safetensors.index.json is there")
    try:
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single.name)
    except (SafetensorError, OSError) as error:
        raise EngineFault(f"{single}: not readable as safetensors: {error}") from error
