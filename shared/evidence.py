"""The evidence object that every command's `--json` writes: what ran, where, its named figures, and bars that hold or not."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from shared.clock import SYSTEM, Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A figure and its limit. `holds` is decided by whoever knows which side is good."""

    name: str
    value: float
    limit: float
    unit: str
    holds: bool

    @classmethod
    def at_most(cls, name: str, value: float, limit: float, unit: str) -> Bar:
        """Holds while the value does not exceed the limit."""
        return cls(name=name, value=value, limit=limit, unit=unit, holds=value <= limit)

    @classmethod
    def at_least(cls, name: str, value: float, limit: float, unit: str) -> Bar:
        """Holds from the limit on."""
        return cls(name=name, value=value, limit=limit, unit=unit, holds=value >= limit)

    @classmethod
    def zero(cls, name: str, value: int, unit: str) -> Bar:
        """Holds at zero alone."""
        return cls(name=name, value=value, limit=0, unit=unit, holds=value == 0)


def told(bars: Sequence[Bar]) -> list[str]:
    """How every command tells its bars: a line each, one that does not hold with its limit, and the verdict last."""
    lines = [
        f"{bar.name}: {_figure(bar.value)} {bar.unit}"
        + ("" if bar.holds else f"  NOT AS PROMISED, limit {_figure(bar.limit)}")
        for bar in bars
    ]
    missed = sum(not bar.holds for bar in bars)
    if bars:
        count = missed or len(bars)
        lines.append(f"{'NOT AS PROMISED' if missed else 'As promised'}: {count} of {len(bars)} figures")
    return lines


def _figure(value: float) -> str:
    """Counts to the last digit, measures to six."""
    return f"{int(value):,}" if float(value).is_integer() else f"{value:g}"


def evidence(
    command: str,
    results: Mapping[str, Any],
    bars: Sequence[Bar],
    *,
    device: Mapping[str, Any] | None = None,
    clock: Clock = SYSTEM,
) -> dict[str, Any]:
    """One object, ready for JSON. `device` says what computed; None for commands that compute nothing."""
    return {
        "command": command,
        "version": metadata.version("burstline"),
        "date": clock.now().isoformat(timespec="seconds"),
        "device": {"name": platform.machine()} if device is None else dict(device),
        "results": dict(results),
        "bars": [asdict(bar) for bar in bars],
    }


def write(file: Path, told: Mapping[str, Any]) -> None:
    """Write an evidence object; makes the folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
