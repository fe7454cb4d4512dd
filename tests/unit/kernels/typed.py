"""What the gate launches, translated for a card of compute capability 9.0 on a machine without one: types and layouts, not
code. Run as a module of its own, since under TRITON_INTERPRET kernels cannot be compiled; prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver, jit

from kernels import activation, dispatch
from kernels.gate import command
from kernels.gate.ledger import run
from kernels.gate.sizes import TINY, Place

TARGET = GPUTarget("cuda", 90, 32)


class NoDriver:
    """Of a card that is not there: launches are translated for it, none is made."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Translator:
    """Stands for a launch: one translation for every set of types and constants that a kernel is launched with."""

    def __init__(self) -> None:
        self.kernels: dict[str, list[str]] = {}
        """What was wrong, by kernel."""
        self._seen: set[tuple[str, str, str]] = set()

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """In the place of `JITFunction.run`; `grid` and `warmup` change nothing."""
        _, _, target, backend, binder = kernel.device_caches[0]
        bound, types, own = binder(*args, **options)
        key = kernel.__name__, str(types), str(own)
        if key in self._seen:
            return
        self._seen.add(key)
        found = self.kernels.setdefault(kernel.__name__, [])
        made, signature, constants, attributes = kernel._pack_args(backend, options, bound, types, own)
        try:
            _translate(ASTSource(kernel, signature, constants, attributes), target, backend, made)
        except Exception as error:  # noqa: BLE001 - whatever a kernel's translation raises is what is looked for
            found.append(f"{type(error).__name__}: {error}")


def _translate(source: ASTSource, target: GPUTarget, backend: Any, options: Any) -> None:
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    metadata = {"target": target, **options.__dict__}
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)


def main() -> None:
    torch.set_num_threads(1)
    driver.set_active(NoDriver())
    translator = Translator()
    jit.JITFunction.run = lambda kernel, *args, **options: translator.launch(kernel, *args, **options)
    dispatch.INTERPRETED = True
    place = Place(torch.device("cpu"), torch.bfloat16, TINY)
    report = run(list(command.all_checks(place)), lambda _: None)
    rows, heads = torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(8)
    activation.delta_gates(rows, rows, heads, heads)  # the gate has it inside the mixer alone
    broken = {ledger.name: ledger.first for ledger in report.ledgers if ledger.broken}
    json.dump({"kernels": translator.kernels, "broken": broken}, sys.stdout)


if __name__ == "__main__":
    main()
