"""One example of every message, made from its type, so that a new message has one too."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

from shared.protocol.messages import Message


def example(kind: type[Message]) -> Message:
    """A message in which every field of its first form is set, to values that depend on the fields' names alone. Fields that
    came later are absent, as in what older builds wrote."""
    made = _value(inspect.type_info(kind), kind.__name__)
    assert isinstance(made, kind)
    return made


def _value(kind: inspect.Type, name: str) -> Any:
    match kind:
        case inspect.StructType():
            return kind.cls(
                **{field.name: _value(field.type, field.name) for field in kind.fields if field.required}
            )
        case inspect.UnionType():
            return _value(next(one for one in kind.types if not isinstance(one, inspect.NoneType)), name)
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.VarTupleType():
            return (_value(kind.item_type, name), _value(kind.item_type, f"{name}+"))
        case inspect.TupleType():
            return tuple(_value(one, f"{name}{index}") for index, one in enumerate(kind.item_types))
        case _:
            return _scalar(kind, name)


def _scalar(kind: inspect.Type, name: str) -> Any:
    match kind:
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return sum(name.encode()) * 1_000_003
        case inspect.FloatType():
            return sum(name.encode()) / 8
        case inspect.StrType():
            return name
        case inspect.BytesType():
            return name.encode().ljust(32, b"\0")
        case _:
            raise msgspec.ValidationError(f"the wire has no type {kind}")
