"""The fingerprint names everything that changes a bit, and nothing that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import matmul
from services.gpu_worker.engine import fingerprint
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.fingerprint import numerics_fingerprint
from services.gpu_worker.engine.probe import computed_bits
from tests.unit.services.gpu_worker.engine.rig import loaded

CONFIG = EngineConfig(num_blocks=8, num_slots=8, num_snapshots=1)


def test_pool_sizes_and_limits_are_no_part_of_it() -> None:
    bigger = replace(CONFIG, num_blocks=99, num_slots=20, max_batch=4, max_verify=3, prefill_chunk=64)
    assert numerics_fingerprint(loaded(), bigger) == numerics_fingerprint(loaded(), CONFIG)
    assert len(numerics_fingerprint(loaded(), CONFIG)) == 64


def test_weights_dims_threads_and_recipe_are(monkeypatch: pytest.MonkeyPatch) -> None:
    base = loaded()
    prints = {
        numerics_fingerprint(base, CONFIG),
        numerics_fingerprint(loaded(seed=1), CONFIG),
        numerics_fingerprint(base, replace(CONFIG, threads=2)),
        numerics_fingerprint(replace(base, dims=replace(base.dims, rope_theta=1e6)), CONFIG),
    }
    monkeypatch.setattr(fingerprint, "tile_table", lambda: {"rows": 32})
    prints.add(numerics_fingerprint(base, CONFIG))
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    prints.add(numerics_fingerprint(base, CONFIG))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    prints.add(numerics_fingerprint(base, CONFIG))
    monkeypatch.setattr(base.model, "recipe", "tiled")
    prints.add(numerics_fingerprint(base, CONFIG))
    assert len(prints) == 8


def test_what_is_computed_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that rounds one activation differently is another fingerprint, though all names are the same."""
    before = numerics_fingerprint(loaded(), CONFIG)
    assert computed_bits(loaded().model) == computed_bits(loaded().model)
    honest = matmul.linear_swiglu
    monkeypatch.setattr(
        matmul, "linear_swiglu", lambda x, packed, prefill: honest(x, packed) * (1.0 + 2.0**-23)
    )
    assert numerics_fingerprint(loaded(), CONFIG) != before
