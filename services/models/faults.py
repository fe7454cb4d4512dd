"""What can go wrong with a fetched model."""

from __future__ import annotations

from shared.errors import BurstlineError


class ModelFault(BurstlineError):
    """A model cannot be fetched, converted or found. The message says what to do; it is printed as it is."""

    code = "model_fault"
