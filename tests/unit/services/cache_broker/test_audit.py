"""Books against what a worker says it holds: what is reserved may exist or not, everything else must (C5)."""

from __future__ import annotations

import pytest

from services.cache_broker.audit import Charged, compare
from shared.protocol.messages import HeldEntry

ROOT = b"root"


def charged(state: int, rows: int, *, reserved: bool = False, splits: bytes | None = None) -> Charged:
    return Charged(state_bytes=state, kv_bytes=rows, reserved=reserved, splits=splits)


def differing(books: dict[bytes, Charged], real: dict[bytes, tuple[int, int]]) -> list[tuple[int, int]]:
    """Charged and real bytes of what differs, by key."""
    held = [
        HeldEntry(root=ROOT, key=key, state_bytes=state, kv_bytes=rows) for key, (state, rows) in real.items()
    ]
    found = compare("w1", {(ROOT, key): book for key, book in books.items()}, held)
    return [(one.charged_bytes, one.real_bytes) for one in found]


BRANCH = charged(60, 30, reserved=True, splits=b"long")


@pytest.mark.parametrize(
    ("books", "real"),
    [
        ({b"a": charged(60, 40)}, {b"a": (60, 40)}),
        ({b"a": charged(60, 40, reserved=True)}, {}),
        ({b"a": charged(60, 40, reserved=True)}, {b"a": (60, 40)}),
        ({b"a": charged(60, 40, reserved=True)}, {b"a": (0, 40)}),
        ({b"branch": BRANCH, b"long": charged(60, 50)}, {b"long": (60, 80)}),
        ({b"branch": BRANCH, b"long": charged(60, 50)}, {b"branch": (60, 30), b"long": (60, 50)}),
        ({b"branch": BRANCH}, {}),
    ],
    ids=[
        "equal",
        "not yet",
        "already",
        "state not yet",
        "split not yet",
        "split already",
        "split of what is gone",
    ],
)
def test_c5_what_agrees(books: dict[bytes, Charged], real: dict[bytes, tuple[int, int]]) -> None:
    assert differing(books, real) == []


@pytest.mark.parametrize(
    ("books", "real", "difference"),
    [
        ({b"a": charged(60, 40)}, {}, (100, 0)),
        ({}, {b"a": (60, 40)}, (0, 100)),
        ({b"a": charged(60, 40)}, {b"a": (0, 40)}, (100, 40)),
        ({b"a": charged(60, 40, reserved=True)}, {b"a": (60, 41)}, (100, 101)),
        ({b"branch": BRANCH, b"long": charged(60, 50)}, {b"long": (60, 50)}, (140, 110)),
        ({b"branch": BRANCH, b"long": charged(60, 50)}, {b"branch": (60, 30), b"long": (60, 80)}, (110, 140)),
    ],
    ids=["lost", "unknown", "state lost", "too much", "rows lost", "rows twice"],
)
def test_c5_what_differs(
    books: dict[bytes, Charged], real: dict[bytes, tuple[int, int]], difference: tuple[int, int]
) -> None:
    assert differing(books, real) == [difference]
