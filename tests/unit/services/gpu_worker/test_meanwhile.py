"""Work in a wait: once, at the next turn or when it is asked for, and its faults are its asker's."""

from __future__ import annotations

import asyncio

import pytest

from services.gpu_worker.meanwhile import Meanwhile


async def test_it_is_done_while_its_asker_waits() -> None:
    done: list[int] = []
    work = Meanwhile(lambda: done.append(1) or 7)
    assert not done
    await asyncio.sleep(0)
    assert done == [1]
    assert (work.result(), work.result(), done) == (7, 7, [1])


async def test_it_is_done_when_asked_for_at_once_and_not_again() -> None:
    done: list[int] = []
    work = Meanwhile(lambda: done.append(1) or 7)
    assert work.result() == 7
    await asyncio.sleep(0)
    assert done == [1]


async def test_a_fault_is_told_to_who_asks_each_time(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> int:
        raise ValueError("no")

    work = Meanwhile(fail)
    await asyncio.sleep(0)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            work.result()
    Meanwhile(fail)
    await asyncio.sleep(0)
    assert not caplog.records
