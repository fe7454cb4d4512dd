"""Fields of a `config.json`, read with their names in the faults. What they mean is each family's own. `of` = whose config it
is, as the fault says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gpu_worker.engine.models.kinds import MOST_COUNT, is_count
from shared.errors import EngineFault


def need(config: Mapping[str, Any], name: str, *, of: str = "model") -> int:
    """A positive integer. Raises `EngineFault` when it is missing or anything else."""
    value = optional(config, name, of=of)
    if value is None:
        raise EngineFault(f"{of} config: {name} must be a positive integer, not {config.get(name)!r}")
    return value


def optional(config: Mapping[str, Any], name: str, *, of: str = "model") -> int | None:
    """A positive integer, or None where the field is missing or null. Raises `EngineFault` when it is anything else."""
    value = config.get(name)
    if value is None:
        return None
    if not is_count(value):
        raise EngineFault(
            f"{of} config: {name} must be a positive integer, not {value!r} (at most {MOST_COUNT})"
        )
    return value


def count(
    config: Mapping[str, Any], name: str, default: int | None, *, least: int = 0, of: str = "model"
) -> int:
    """An integer from `least` on, `default` where the field is missing or null. Raises `EngineFault` when it is anything
    else, or missing without a default."""
    value = config.get(name)
    value = default if value is None else value
    if not is_count(value, least=least):
        raise EngineFault(
            f"{of} config: {name} must be an integer from {least} to {MOST_COUNT}, not {value!r}"
        )
    return value


def listed(types: object, layers: int, known: tuple[str, ...]) -> tuple[str, ...]:
    """`layer_types`, one of `known` a layer. Raises `EngineFault` when it is anything else."""
    if not isinstance(types, list | tuple) or len(types) != layers or not set(types) <= set(known):
        raise EngineFault(
            f"model config: layer_types must hold {layers} of {' and '.join(map(repr, known))}, not {types!r}"
        )
    return tuple(types)


def refuse(faults: Mapping[str, bool], *, of: str = "model") -> None:
    """Raises `EngineFault` with the texts of all that are true."""
    wrong = [text for text, broken in faults.items() if broken]
    if wrong:
        raise EngineFault(f"{of} config: " + "; ".join(wrong))
