"""Device kernels run here in triton's interpreter: the variable must be set before triton is first imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from typing import Any

import pytest
import torch


@pytest.fixture
def nan_filled_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` of a floating type gives NaN, so that an element that no kernel writes shows."""
    plain = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = plain(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
