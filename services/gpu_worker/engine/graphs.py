"""Launches kept as CUDA graphs, one a size: captured at start or on first use. One that cannot be captured runs without.

A capture runs on padding alone (the inputs hold only scratch sequences then), so it moves no sequence. All graphs share
one memory pool and run on one stream, one at a time.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Size = tuple[int, int]
"""(sequences, columns) of a launch, padding included."""

S = TypeVar("S", bound=tuple[int, ...])
"""What a launch is told of itself: a size, and what else makes it another one."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A captured launch, and where its result lies."""

    graph: torch.cuda.CUDAGraph
    output: Tensor


class GraphCache(Generic[S]):
    """`launch(size)` reads fixed-address inputs and returns a tensor; here it is replayed instead of launched."""

    def __init__(self, launch: Callable[[S], Tensor], clear: Callable[[], None], *, enabled: bool) -> None:
        """`clear` puts padding into the inputs; `enabled` = the device can keep graphs at all."""
        self._launch = launch
        self._clear = clear
        self.enabled = enabled
        self._kept: dict[S, _Kept] = {}
        self._pool = torch.cuda.graph_pool_handle() if enabled else None

    @property
    def sizes(self) -> list[S]:
        """What is captured."""
        return sorted(self._kept)

    def prepare(self, size: S) -> bool:
        """Have a graph of this size, capturing it now if there is none. False = it could not be captured, or graphs are
        not to be had here; the launch then runs without. Call it before the inputs are filled."""
        if not self.enabled:
            return False
        if size in self._kept:
            return True
        try:
            self._kept[size] = self._capture(size)
        except RuntimeError as error:  # torch has no other type for a broken capture
            log.warning("a graph of %s rows could not be captured: %s", _named(size), error)
            self._pool = torch.cuda.graph_pool_handle()  # the failed capture may still hold the other one
            return False
        return True

    def run(self, size: S, *, eager: bool = False) -> Tensor:
        """Launch on what the inputs hold. The result of a graph is overwritten by its next run."""
        kept = self._kept.get(size)
        if eager or kept is None:
            return self._launch(size)
        kept.graph.replay()
        return kept.output

    def prepare_all(self, sizes: Iterable[S], report: Callable[[str], None]) -> None:
        """Capture ahead of time; `report` gets a line a graph."""
        for size in sizes:
            held = self.prepare(size)
            report(f"graph {_named(size)}: {'kept' if held else 'not to be had'}")

    def _capture(self, size: S) -> _Kept:
        self._clear()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._launch(size)  # compiles, and allocates what kernels keep
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool):
            output = self._launch(size)
        return _Kept(graph, output)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A graph of an engine that is gone must not be freed while another one is captured: that would break the capture.
    Nothing is collected first: with torch loaded that takes longer than the capture itself (0.11 s, measured)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _named(size: tuple[int, ...]) -> str:
    return " x ".join(str(int(part)) for part in size)


def bucket(wanted: int, most: int) -> int:
    """The next power of two, at most `most`."""
    return min(1 << (wanted - 1).bit_length(), most)


def buckets(most: int) -> list[int]:
    """All that `bucket` answers."""
    return sorted({bucket(wanted, most) for wanted in range(1, most + 1)})
