"""Reader of GGUF files (version 2 and 3, little-endian): the fields, and where each tensor's bytes lie.

    header   "GGUF", version u32, tensors u64, fields u64
    field    name, type u32, value          string = length u64 + UTF-8; array = type u32, length u64, items
    tensor   name, dimensions u32, each u64 (the fastest first), format u32, offset u64
    data     from the next multiple of `general.alignment` (32) on; offsets count from there

The file is mapped, not read: a tensor costs memory when it is asked for. Every length is held against the file's end before
anything is made of it, so that a cut or forged file is a fault and not a crash.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from services.models.blocks import FORMATS, BlockFormat
from services.models.faults import ModelFault

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]
T = TypeVar("T")

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
_NUMBERS: Final = {
    code: struct.Struct("<" + letter)
    for code, letter in {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}.items()
}  # fmt: skip
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_MOST_DIMENSIONS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """`shape` as torch has it, the slowest dimension first; `offset` in bytes from the file's begin."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    offset: int


class GgufFile:
    """An open file; closed by `with`."""

    def __init__(self, path: Path) -> None:
        """Raises ModelFault naming the file and what is wrong in it."""
        self.path: Final = path
        with path.open("rb") as file:
            if path.stat().st_size < len(_MAGIC):
                raise ModelFault(f"{path}: not a GGUF file")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.fields, self.tensors = _parse(_Cursor(self._map, path))
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._map.close()

    def read(self, name: str) -> NDArray[np.float32]:
        """A tensor's values in its shape; a copy. Raises ModelFault when there is none of this name."""
        info = self.tensors.get(name)
        if info is None:
            raise ModelFault(f"{self.path}: tensor {name} is missing")
        count = math.prod(info.shape)
        raw = self._map[info.offset : info.offset + info.format.size(count)]
        return info.format.decode(raw).reshape(info.shape)

    def text(self, name: str) -> str:
        """A field that is a string. Raises ModelFault when it is missing or of another type."""
        return self._field(name, str)

    def integer(self, name: str) -> int:
        """A field that is a whole number; raises as `text` does."""
        return self._field(name, int)

    def number(self, name: str) -> float:
        """A float32 field as the shortest decimal that it is nearest to (1e-05, not 9.99e-06); raises as `text` does."""
        return float(str(np.float32(self._field(name, float))))

    def strings(self, name: str) -> list[str]:
        """A field that is an array of strings; raises as `text` does."""
        return self._array(name, str)

    def integers(self, name: str) -> list[int]:
        """A field that is an array of whole numbers; raises as `text` does."""
        return self._array(name, int)

    def _field(self, name: str, kind: type[T]) -> T:
        value = self.fields.get(name)
        if not isinstance(value, kind):
            found = "missing" if value is None else f"a {type(value).__name__}"
            raise ModelFault(f"{self.path}: field {name} is {found}, expected a {kind.__name__}")
        return value

    def _array(self, name: str, kind: type[T]) -> list[T]:
        items = self._field(name, list)
        if not all(isinstance(item, kind) for item in items):
            raise ModelFault(f"{self.path}: field {name} is no array of {kind.__name__}")
        return items


class _Cursor:
    """Reads forward; whatever would pass the end is a fault."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data: Final = data
        self._path: Final = path
        self.at = 0

    def fault(self, what: str) -> ModelFault:
        return ModelFault(f"{self._path}: {what} (byte {self.at:,} of {len(self._data):,})")

    def require(self, size: int) -> None:
        """Raise unless `size` more bytes are there."""
        if size > len(self._data) - self.at:
            raise self.fault("the file ends early")

    def take(self, size: int) -> bytes:
        self.require(size)
        begin, self.at = self.at, self.at + size
        return self._data[begin : self.at]

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def count(self) -> int:
        return int(self.number(_U64))

    def string(self) -> str:
        try:
            return self.take(self.count()).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fault(f"a string is not UTF-8: {error.reason}") from error

    def value(self) -> Value:
        kind = self.number(_U32)
        if kind != _ARRAY:
            return self._scalar(kind)
        item, length = self.number(_U32), self.count()
        self.require(length)  # an item has at least one byte
        return [self._scalar(item) for _ in range(length)]

    def _scalar(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self.string()
        form = _NUMBERS.get(kind)
        if form is None:
            raise self.fault(f"a value of the unknown type {kind}")
        value: Scalar = self.number(form)
        return value


def _parse(cursor: _Cursor) -> tuple[dict[str, Value], dict[str, TensorInfo]]:
    if cursor.take(len(_MAGIC)) != _MAGIC:
        raise cursor.fault("not a GGUF file")
    version = cursor.number(_U32)
    if version not in _VERSIONS:
        raise cursor.fault(f"GGUF version {version}; read are {_VERSIONS}")
    tensors, fields = cursor.count(), cursor.count()
    table = {cursor.string(): cursor.value() for _ in range(fields)}
    raw = [_tensor(cursor) for _ in range(tensors)]
    alignment = table.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise cursor.fault(f"general.alignment is {alignment!r}")
    begin = -(-cursor.at // alignment) * alignment
    infos = {}
    for name, shape, form, offset in raw:
        cursor.at = begin + offset
        count = math.prod(shape)
        if shape[-1] % form.values:
            raise cursor.fault(f"tensor {name}: rows of {shape[-1]} are no multiple of {form.values}")
        cursor.require(form.size(count))
        infos[name] = TensorInfo(name=name, shape=shape, format=form, offset=cursor.at)
    return table, infos


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], BlockFormat, int]:
    name, dimensions = cursor.string(), cursor.number(_U32)
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise cursor.fault(f"tensor {name} has {dimensions} dimensions")
    shape = tuple(reversed([cursor.count() for _ in range(dimensions)]))
    code = cursor.number(_U32)
    if code not in FORMATS:
        known = ", ".join(form.name for form in FORMATS.values())
        raise cursor.fault(f"tensor {name} has format {code}; read are {known}")
    return name, shape, FORMATS[code], cursor.count()
