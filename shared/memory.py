"""A process's memory in huge pages, once it is ready to work (Linux 6.1 and later; elsewhere nothing happens).

Between two requests a process's pages fall out of the processor's tables, and each is looked up anew: in a virtual machine by up
to two dozen reads. In pages of 2 MiB there are five hundred times fewer of them. Python's own arenas are of 1 MiB, so the kernel
never makes one of them huge by itself; side by side they are what it can be asked to.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HUGE: Final = 2 << 20
MOST: Final = 256 << 20
"""Bytes that are asked for, in all: the moving takes about a second for each 2 GiB. The weights of a model are in larger regions."""
_MADV_COLLAPSE: Final = 25
_SMAPS: Final = Path("/proc/self/smaps")
_REGION: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)$")

Collapse = Callable[[int, int], bool]
"""(address, bytes) -> whether it is huge pages now."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """A region's part that whole huge pages fit in."""

    begin: int
    size: int


def regions(smaps: str) -> Iterator[Region]:
    """Those of private memory without a file that are mostly in use. Stacks are not: most of one is never touched."""
    begin = end = 0
    for line in smaps.split("\n"):  # the one character that no file's name holds here
        if found := _REGION.match(line):
            begin, end = (int(found[place], 16) for place in (1, 2))
            if found[3] != "rw-p" or found[4] not in ("", "[heap]"):
                begin = end = 0
        elif line.startswith("Rss:") and 2 * 1024 * int(line.split()[1]) >= end - begin:
            first = -(-begin // HUGE) * HUGE
            if (size := end // HUGE * HUGE - first) > 0:
                yield Region(begin=first, size=size)


def in_huge_pages(*, smaps: Path = _SMAPS, collapse: Collapse | None = None) -> int:
    """Lay this process's memory in huge pages, the smallest regions first. Returns the bytes; what the kernel refuses stays."""
    try:
        found = sorted(regions(smaps.read_text("utf-8", "replace")), key=lambda region: region.size)
        collapse = collapse or _kernel()
    except (OSError, AttributeError):  # no such system, or no such call in it
        return 0
    done = 0
    for region in found:
        if done + region.size > MOST:
            break
        if collapse(region.begin, region.size):
            done += region.size
    return done


def _kernel() -> Collapse:
    """Raises AttributeError where there is no `madvise`."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return lambda begin, size: madvise(begin, size, _MADV_COLLAPSE) == 0
