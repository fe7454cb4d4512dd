"""Reading safetensors folders: which file holds a tensor, its shape against what is wanted, its bytes once and in turn.

    Checkpoint(folder).open(shapes) ──> Weights: names checked, shapes and types checked, nothing read
        weights[name] ──> that tensor, a view of its file's pages until whoever builds the model has converted it
        weights.digest() ──> SHA-256 over all of them

Nothing here keeps a tensor, so that a model is built while only the layer that is being packed lies in memory twice.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.gpu_worker.engine.models.quantised import FLOAT8, SCALES, is_scale, scales_fit, widened
from services.gpu_worker.engine.models.tensors import Shapes
from shared.errors import EngineFault

_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
"""Of the text model in vision-language checkpoints, today's and older ones -> what stands there without."""

_OTHER: Final = (
    r"(model\.)?(visual|vision_tower|vision_model|audio_tower|multi_modal_projector|embed_vision|embed_audio)\..*",
    r".*\.rotary_emb\.inv_freq",
)
"""Other towers than the text model, and tables that are computed."""

_SIZES: Final = {"F32": 4, "BF16": 2, "F16": 2, FLOAT8: 1}
"""Bytes by the types that are read, as safetensors names them."""

Progress = Callable[[int, int], None]
"""(bytes read, bytes in all), after every tensor."""


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

    def where(self, name: str) -> tuple[str, Path]:
        """The name in its file, and the file."""
        stored, file = self._stored[name]
        return stored, self.folder / file

    def open(
        self,
        shapes: Shapes,
        *,
        unused: Collection[str] | None = None,
        block: tuple[int, int] = (128, 128),
        progress: Progress | None = None,
    ) -> Weights:
        """Check that the tensors are there, of these shapes and of a type that is read; to be used as a context.

        `unused` = patterns of names that may be there besides; null = any may. `block` as `quantised.read_block` says.
        Raises `EngineFault` naming the tensor, its file and the expected and actual shape.
        """
        missing = sorted(set(shapes) - set(self._stored))
        if missing:
            raise EngineFault(f"{self.folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
        if unused is not None:
            self._refuse_others(shapes, unused)
        return Weights(self, shapes, block, progress)

    def load(self, shapes: Shapes) -> tuple[dict[str, Tensor], str]:
        """All of them at once as float32, for what is small, and their digest (see `Weights`)."""
        with self.open(shapes) as weights:
            return {name: weights[name].to(torch.float32) for name in shapes}, weights.digest()

    def same(self, one: str, other: str) -> bool:
        """Whether two of its tensors hold the same."""
        tensors = []
        for name in (one, other):
            stored, path = self.where(name)
            with safe_open(path, framework="pt") as opened:
                tensors.append(opened.get_tensor(stored))
        return tensors[0].shape == tensors[1].shape and torch.equal(*tensors)

    def _refuse_others(self, shapes: Shapes, unused: Collection[str]) -> None:
        known = re.compile("|".join(f"(?:{pattern})" for pattern in (*_OTHER, *unused)))
        others = sorted(
            name
            for name in set(self._stored) - set(shapes)
            if not known.fullmatch(name) and not is_scale(name)
        )
        if others:
            raise EngineFault(
                f"{self.folder}: {len(others)} tensors that this model does not have, the first is {others[0]}"
            )


class Weights(Mapping[str, Tensor]):
    """Tensors by name, read when they are asked for: in the type they are stored in, float8 as float32."""

    def __init__(
        self, checkpoint: Checkpoint, shapes: Shapes, block: tuple[int, int], progress: Progress | None
    ) -> None:
        self._checkpoint = checkpoint
        self._shapes = shapes
        self._block = block
        self._progress = progress
        self._files: dict[Path, Any] = {}
        self._open = ExitStack()
        self._scales: dict[str, str] = {}
        self._sums: dict[str, bytes] = {}
        self._read = 0
        try:
            self._total = sum(self._check(name, shape) for name, shape in shapes.items())
        except EngineFault:
            self._open.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._open.close()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensor(name)
        scale = self._scales.get(name)
        return tensor if scale is None else widened(tensor, self._tensor(scale), self._block)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def digest(self) -> str:
        """SHA-256, hex, over names, types, shapes and bytes as stored, whatever the files; reads what nobody asked for."""
        for name in (*self._shapes, *self._scales.values()):
            if name not in self._sums:
                self._tensor(name)
        content = hashlib.sha256()
        for name in sorted(self._sums):
            content.update(self._sums[name])
        return content.hexdigest()

    def _tensor(self, name: str) -> Tensor:
        stored, path = self._checkpoint.where(name)
        try:
            tensor: Tensor = self._file(path).get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise EngineFault(f"{path}: tensor {name} is not readable: {error}") from error
        if name not in self._sums:
            content = hashlib.sha256(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
            content.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
            self._sums[name] = content.digest()
            self._read += tensor.nbytes
            if self._progress is not None:
                self._progress(self._read, self._total)
        return tensor

    def _check(self, name: str, shape: tuple[int, ...]) -> int:
        """Compare what the file's header says; answers bytes, with those of scales."""
        path, kind, actual = self._header(name)
        if actual != shape:
            raise EngineFault(f"{path}: tensor {name} has shape {actual}, expected {shape}")
        if kind not in _SIZES:
            raise EngineFault(f"{path}: tensor {name} is {kind}, expected a float of 32, 16 or 8 bits")
        size = _SIZES[kind]
        for length in shape:
            size *= length
        return size + (self._check_scale(name, shape, path) if kind == FLOAT8 else 0)

    def _check_scale(self, name: str, shape: tuple[int, ...], path: Path) -> int:
        scale = next((name + end for end in SCALES if name + end in self._checkpoint), None)
        if scale is None or len(shape) != 2:
            raise EngineFault(
                f"{path}: tensor {name} is float8 without a tensor {name}_scale_inv or {name}_scale"
            )
        where, kind, actual = self._header(scale)
        if kind not in _SIZES or kind == FLOAT8 or not scales_fit(actual, (shape[0], shape[1]), self._block):
            raise EngineFault(
                f"{where}: tensor {scale} is {kind} of shape {actual}, expected floats for a weight of shape {shape} in "
                f"blocks of {self._block}"
            )
        self._scales[name] = scale
        return _SIZES[kind] * torch.Size(actual).numel()

    def _header(self, name: str) -> tuple[Path, str, tuple[int, ...]]:
        stored, path = self._checkpoint.where(name)
        try:
            found = self._file(path).get_slice(stored)
            return path, found.get_dtype(), tuple(found.get_shape())
        except (SafetensorError, OSError) as error:
            raise EngineFault(f"{path}: tensor {name} is not readable: {error}") from error

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = self._open.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise EngineFault(f"{path}: not readable as safetensors: {error}") from error
        return self._files[path]


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
