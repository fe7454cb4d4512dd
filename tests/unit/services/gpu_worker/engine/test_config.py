"""What follows from a model's dimensions, and pool sizes that cannot work together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.engine.models.random import TINY
from shared.errors import EngineFault

SIZES: dict[str, int] = {"num_blocks": 8, "num_slots": 8, "num_snapshots": 2}


def test_planes() -> None:
    assert (TINY.attention_layers, TINY.gdn_layers, TINY.planes, TINY.draft_plane) == (1, 3, 2, 1)
    headless = replace(TINY, has_mtp=False)
    assert headless.planes == 1
    with pytest.raises(EngineFault, match="no draft plane"):
        _ = headless.draft_plane


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1"),
        ({"num_snapshots": -1}, "num_snapshots must not be negative"),
        ({"prefill_chunk": 100}, "no multiple of 64"),
        ({"max_batch": 9}, "max_batch 9 exceeds num_slots 8"),
        ({"threads": 0}, "threads must be at least 1"),
    ],
)
def test_sizes_that_cannot_work(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineFault, match=message):
        EngineConfig(**(SIZES | change))
