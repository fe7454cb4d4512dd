"""One trial of a family: a claim that is no value of an axis, tried once in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.prove.compare import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """`name` says what is tried, as a cell's words do. `run` makes its own engine and gives everything back. Trials of a
    family that name the same `shares` need the same references, and are better run in one process."""

    name: str
    run: Callable[[], Verdict]
    shares: str = ""
