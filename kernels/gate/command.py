"""One run of the gate: chooses the place, runs the checks, tells a table, writes one evidence object.

On a card the checks run in a few processes at once: most of their time is the compiler's, and a kernel that faults takes
its process's later checks with it, not all.
"""

from __future__ import annotations

import json
import platform
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, TextIO

import torch

from kernels import dispatch
from kernels.gate import attention, delta, grouped, latent, picking, rowwise, sparse, writing
from kernels.gate.ledger import Check, Ledger, Report, run
from kernels.gate.sizes import CARD, TINY, Place

PROCESSES: Final = 6
"""On a card. Each holds a context and the tensors of one check, at most some 30 GB."""


def run_gate(device: str, *, file: Path | None, only: str, out: TextIO) -> int:
    """`device` is `cuda` or `interpreter`; answers the exit status."""
    if device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("no CUDA device: nothing was measured\n")
        return 2
    started = time.perf_counter()
    print(f"{'check':<34} {'compared':>9} {'differ':>7} {'error':>9} {'limit':>9} {'s':>6}", file=out)
    names = [name for name, _ in all_checks(place_of(device)) if only in name]
    report = _run(device, names, lambda ledger: _line(ledger, out))
    seconds = time.perf_counter() - started
    compared = sum(ledger.comparisons for ledger in report.ledgers)
    print(f"{compared} comparisons, {report.differences} differences, {seconds:.0f} s", file=out)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        told = json.dumps(evidence(report, device, seconds), indent=2, ensure_ascii=False)
        file.write_text(told + "\n", encoding="utf-8")
    return 0 if report.holds else 1


def _run(device: str, names: Sequence[str], told: Callable[[Ledger], None]) -> Report:
    if device != "cuda":
        checks = dict(all_checks(place_of(device)))
        return run([(name, checks[name]) for name in names], told)
    ledgers = []
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        for ledger in pool.map(_run_one, repeat(device), names):
            told(ledger)
            ledgers.append(ledger)
    return Report(tuple(ledgers))


def _run_one(device: str, name: str) -> Ledger:
    """One check, in a process of the pool."""
    checks = dict(all_checks(place_of(device)))
    ledger = run([(name, checks[name])], lambda _: None).ledgers[0]
    if device == "cuda" and not ledger.broken:
        torch.cuda.empty_cache()  # the other processes need the room
    return ledger


def all_checks(place: Place) -> Iterator[tuple[str, Check]]:
    """Every check, cheap to make: tensors are allocated when it runs."""
    for part in (rowwise, grouped, attention, latent, sparse, writing, delta, picking):
        yield from part.checks(place)


def evidence(report: Report, device: str, seconds: float) -> dict[str, Any]:
    """The object that evidence commands write; `kernels` shares no code with the one that writes the others."""
    bars: list[dict[str, Any]] = [
        {
            "name": "differences",
            "value": report.differences,
            "limit": 0,
            "unit": "comparisons",
            "holds": report.differences == 0,
        }
    ]
    bars += [
        {
            "name": f"{ledger.name}: error",
            "value": ledger.error,
            "limit": ledger.limit,
            "unit": "of the norm",
            "holds": ledger.holds,
        }
        for ledger in report.ledgers
    ]
    return {
        "command": f"python -m kernels.gate --device {device}",
        "version": _version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "device": _device(device),
        "results": {
            "seconds": round(seconds, 1),
            "comparisons": sum(ledger.comparisons for ledger in report.ledgers),
            "checks": {
                ledger.name: {
                    "comparisons": ledger.comparisons,
                    "differences": ledger.differences,
                    "error": ledger.error,
                    "seconds": round(ledger.seconds, 2),
                    **({"first": ledger.first} if ledger.first else {}),
                }
                for ledger in report.ledgers
            },
        },
        "bars": bars,
    }


def place_of(device: str) -> Place:
    """Device, type and sizes of a run."""
    if device == "cuda":
        return Place(torch.device("cuda"), torch.bfloat16, CARD)
    dispatch.INTERPRETED = True
    return Place(torch.device("cpu"), torch.float32, TINY)


def _line(ledger: Ledger, out: TextIO) -> None:
    print(
        f"{ledger.name:<34} {ledger.comparisons:>9} {ledger.differences:>7} {ledger.error:>9.1e} "
        f"{ledger.limit:>9.1e} {ledger.seconds:>6.1f}{'' if ledger.holds else '  FAILS ' + ledger.first}",
        file=out,
        flush=True,
    )


def _device(device: str) -> dict[str, Any]:
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    if device != "cuda":
        return {"name": f"triton interpreter on {platform.machine()}", **versions}
    return {"name": torch.cuda.get_device_name(), "cuda": torch.version.cuda, **versions}


def _version() -> str:
    try:
        return metadata.version("burstline")
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
        return str(project["project"]["version"])
