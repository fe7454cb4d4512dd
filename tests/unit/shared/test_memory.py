"""Which memory is asked to be in huge pages, and what the kernel makes of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shared import memory
from shared.memory import HUGE, MOST, Region, in_huge_pages, regions


def region(begin: int, size: int, *, resident: int, mode: str = "rw-p", name: str = "") -> str:
    head = f"{begin:x}-{begin + size:x} {mode} 00000000 00:00 0                          {name}\n"
    return f"{head}Size: {size >> 10} kB\nRss: {resident >> 10} kB\nPss: 0 kB\nVmFlags: rd wr\n"


def test_the_heap_and_arenas_that_are_in_use_are_found() -> None:
    told = region(HUGE + 4096, 3 * HUGE, resident=2 * HUGE, name="[heap]") + region(
        64 * HUGE, 2 * HUGE, resident=HUGE
    )
    assert list(regions(told)) == [
        Region(begin=2 * HUGE, size=2 * HUGE),
        Region(begin=64 * HUGE, size=2 * HUGE),
    ]


@pytest.mark.parametrize(
    "told",
    [
        region(HUGE, 4 * HUGE, resident=HUGE),
        region(HUGE, 4 * HUGE, resident=4 * HUGE, mode="r--p"),
        region(HUGE, 4 * HUGE, resident=4 * HUGE, mode="rw-s"),
        region(HUGE, 4 * HUGE, resident=4 * HUGE, name="/usr/lib/libpython3.so"),
        region(HUGE, 4 * HUGE, resident=4 * HUGE, name="[stack]"),
        region(HUGE + 4096, HUGE, resident=HUGE),
        "",
    ],
    ids=["mostly unused", "read alone", "shared", "a file's", "a stack", "no whole page", "nothing"],
)
def test_what_is_no_gain_is_left(told: str) -> None:
    assert list(regions(told)) == []


def test_no_more_than_a_bound_is_moved_and_a_refusal_stops_nothing(tmp_path: Path) -> None:
    sizes = [MOST, HUGE, 2 * HUGE, 3 * HUGE]
    begins = [HUGE * (1 << 12) * (place + 1) for place in range(len(sizes))]
    smaps = tmp_path / "smaps"
    smaps.write_text("".join(region(at, size, resident=size) for at, size in zip(begins, sizes, strict=True)))
    asked: list[int] = []

    def collapse(begin: int, size: int) -> bool:
        asked.append(size)
        return size != 2 * HUGE

    assert in_huge_pages(smaps=smaps, collapse=collapse) == 4 * HUGE
    assert asked == [HUGE, 2 * HUGE, 3 * HUGE]


def test_files_have_any_name(tmp_path: Path) -> None:
    """A process in a folder whose name is no UTF-8, or looks like a line, starts all the same."""
    smaps = tmp_path / "smaps"
    odd = region(HUGE, HUGE, resident=HUGE, mode="r-xp", name="/srv/\xff/a\fRss: b/lib.so")
    smaps.write_bytes((odd + region(4 * HUGE, HUGE, resident=HUGE)).encode("latin-1"))
    assert in_huge_pages(smaps=smaps, collapse=lambda begin, size: True) == HUGE


def test_without_a_table_of_regions_nothing_happens(tmp_path: Path) -> None:
    assert in_huge_pages(smaps=tmp_path / "none", collapse=lambda begin, size: True) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the table is Linux's")
def test_the_kernel_takes_the_call_and_memory_holds_what_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST", 16 * HUGE)
    held = [bytes([place]) * 5000 for place in range(200)]
    assert in_huge_pages() <= 16 * HUGE
    assert held == [bytes([place]) * 5000 for place in range(200)]
