"""The evidence object of the project: what ran, where, its named figures, and bars that hold or do not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from shared.clock import SYSTEM


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


def evidence(command: str, results: Mapping[str, Any], bars: Sequence[Bar]) -> dict[str, Any]:
    """One object, ready for JSON."""
    return {
        "command": command,
        "version": metadata.version("burstline"),
        "date": SYSTEM.now().isoformat(timespec="seconds"),
        "device": device(),
        "results": dict(results),
        "bars": [asdict(bar) for bar in bars],
    }


def write(file: Path, told: Mapping[str, Any]) -> None:
    """Write an evidence object; makes the folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def device() -> dict[str, Any]:
    """The processor, its cores, torch, and the instruction set that torch chose."""
    return {
        "kind": "cpu",
        "name": _processor(),
        "cores": os.cpu_count(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    """The name in /proc/cpuinfo where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"
