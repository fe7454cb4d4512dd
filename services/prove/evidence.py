"""The evidence object of the commands that compute: the one of all commands, with the device that computed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from services.prove.device import chosen
from shared import evidence as shared_evidence
from shared.evidence import Bar


def evidence(command: str, results: Mapping[str, Any], bars: Sequence[Bar]) -> dict[str, Any]:
    """One object, ready for JSON."""
    return shared_evidence.evidence(command, results, bars, device=device())


def device() -> dict[str, Any]:
    """What computed: the card that the models were put on, or the processor."""
    return card() if chosen().is_card else _cpu()


def card() -> dict[str, Any]:
    """The card and what drives it."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "kind": "cuda",
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": metadata.version("triton"),
    }


def _cpu() -> dict[str, Any]:
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
