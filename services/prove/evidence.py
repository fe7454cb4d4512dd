"""The evidence object of the commands that compute: the one of all commands, with the device that computed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shared import evidence as shared_evidence
from shared.evidence import Bar, write

__all__ = ["Bar", "device", "evidence", "write"]


def evidence(command: str, results: Mapping[str, Any], bars: Sequence[Bar]) -> dict[str, Any]:
    """One object, ready for JSON."""
    return shared_evidence.evidence(command, results, bars, device=device())


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
