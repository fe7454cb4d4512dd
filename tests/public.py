"""SmolLM2's folder for the tests that need a real checkpoint: the user's, or one that the tests fetch for themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from services.models.config import ModelSettings
from services.models.store import Store

NAME = "smollm2"
OWN = Path(__file__).resolve().parents[1] / ".burstline" / "models"


@cache
def _fetched() -> tuple[Path, str]:
    """Where models lie, and why this one does not ("" = it does)."""
    user = Store(ModelSettings().folder())
    root = user.root if user.has(NAME) else OWN
    if Store(root).has(NAME):
        return root, ""
    added = subprocess.run(
        [sys.executable, "-m", "services.cli", "model", "add", NAME],
        env=os.environ | {"BURSTLINE_MODELS_DIR": str(root), "PIP_DEFAULT_TIMEOUT": "10", "PIP_RETRIES": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    return root, "" if added.returncode == 0 else added.stderr.splitlines()[-1]


def public_models() -> Path:
    """The folder of models with SmolLM2 in it; skips the test, and says why, where it is neither here nor to be fetched."""
    root, fault = _fetched()
    if fault:
        pytest.skip(f"{NAME} is not here and cannot be fetched: {fault}")
    return root
