"""One cell about to run: its request, the stream that is expected, and the driver that it shares with its company."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.gpu_worker.engine.requests import GenerateRequest, SamplingParams
from services.prove.driver import Driver, Record
from services.prove.script import Script
from shared.protocol.chain import GRID, chain


@dataclass(kw_only=True, slots=True)
class Scene:
    """Plants and ways may change `request`. Every scene has a namespace of its own, so plants do not meet."""

    driver: Driver
    peer: Callable[[], Driver]  #: an engine of another worker, over the same model
    script: Script
    request: GenerateRequest
    expected: Record  #: the reference stream
    arrival: int  #: driver step at which the request is submitted
    rng: random.Random
    planted: int = 0  #: requests that plants have run
    shared: bool = False
    """Another request captures in this namespace: the cell may find more cached than planted."""

    @property
    def deepest(self) -> int:
        """The deepest position that a lookup of this prompt may answer."""
        return (len(self.request.tokens) - 1) // GRID * GRID

    def plant(self, tokens: Sequence[int], driver: Driver | None = None, **fields: Any) -> None:
        """Run another request of this namespace to its end, so that its captures are published, here or elsewhere."""
        self.planted += 1
        request = GenerateRequest(
            request_id=f"{self.request.request_id}/plant-{self.planted}",
            root=self.request.root,
            tokens=tuple(tokens),
            chain=chain(self.request.root, tokens),
            sampling=SamplingParams(seed=0, temperature=0.0),
            max_tokens=2,
        )
        (driver or self.driver).run([replace(request, **fields)])

    def key_at(self, position: int) -> bytes:
        """Chain key of a grid position of the prompt."""
        return self.request.chain[position // GRID - 1]

    def other_tail(self, position: int) -> tuple[int, ...]:
        """The prompt up to `position`, then three blocks that no prompt holds."""
        return (*self.request.tokens[:position], *(3 + i % 7 for i in range(3 * GRID + 5)))

    def change(self, **fields: Any) -> None:
        """Give the request other fields."""
        self.request = replace(self.request, **fields)
