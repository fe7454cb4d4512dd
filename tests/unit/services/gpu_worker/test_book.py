"""The worker's book: rows are counted once, whoever owns them."""

from __future__ import annotations

import pytest

from services.gpu_worker.book import EntryBook
from services.gpu_worker.engine.events import Captured
from services.gpu_worker.engine.stats import Evicted


def _captured(
    key: bytes, position: int, kv: int, *, parent: bytes | None = None, splits: bytes | None = None
) -> Captured:
    return Captured(
        capture_id=1, request_id="r", key=key, parent_key=parent, splits_key=splits, position=position,
        state_bytes=100, kv_bytes=kv, end_ns=0,
    )  # fmt: skip


def _evicted(*, gone: tuple[bytes, ...] = (), stateless: tuple[bytes, ...] = ()) -> Evicted:
    return Evicted(gone=gone, stateless=stateless, blocks=0, snapshots=0)


def _bytes(book: EntryBook) -> dict[bytes, tuple[int, int]]:
    return {entry.key: (entry.state_bytes, entry.kv_bytes) for entry in book.page(skip=0, limit=100)}


def test_a_split_moves_rows_and_makes_none() -> None:
    book = EntryBook()
    book.publish(b"root", _captured(b"b", 192, 192))
    book.publish(b"root", _captured(b"a", 64, 64, splits=b"b"))
    assert _bytes(book) == {b"a": (100, 64), b"b": (100, 128)}
    assert (book.position(b"a"), book.position(None)) == (64, 0)


def test_a_state_that_comes_back_finds_its_rows() -> None:
    book = EntryBook()
    book.publish(b"root", _captured(b"a", 64, 64))
    book.publish(b"root", _captured(b"b", 128, 64, parent=b"a"))
    book.evict(_evicted(stateless=(b"a",)))
    assert _bytes(book) == {b"a": (0, 64), b"b": (100, 64)}
    book.publish(b"root", _captured(b"a", 64, 0))
    assert _bytes(book) == {b"a": (100, 64), b"b": (100, 64)}
    book.evict(_evicted(gone=(b"b", b"a")))
    assert len(book) == 0
    with pytest.raises(KeyError):
        book.position(b"a")


def test_pages_are_in_key_order_and_bounded() -> None:
    book = EntryBook()
    for name in (b"c", b"a", b"b"):
        book.publish(b"root", _captured(name, 64, 1))
    assert [entry.key for entry in book.page(skip=1, limit=1)] == [b"b"]
    assert [entry.key for entry in book.page(skip=0, limit=9)] == [b"a", b"b", b"c"]
    assert book.page(skip=9, limit=9) == ()
    assert book.page(skip=-1, limit=-1) == ()
