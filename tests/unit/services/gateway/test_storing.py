"""What is heard live and cannot be stored does not keep a request alive."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.gateway.storing import StorageWatch
from shared.clock import ManualClock
from shared.errors import Overloaded
from shared.protocol import subjects
from tests.unit.services.gateway.line import Work, ids, running_line

SHORT = {"quiet_s": 0.1, "journal_stuck_s": 0.4, "queue_deadline_s": 0.4}


class _Watched:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.watch = StorageWatch(self.clock, quiet_s=2, limit_s=60)

    def hear(self, data: bytes, *, seconds: int, claim: bool = False) -> bool:
        """Again every second. Whether the journal was worth a look at the end."""
        for _ in range(seconds):
            look = self.watch.heard(data, claim=claim)
            self.clock.advance(1)
        return look


def test_a_message_that_is_tried_in_vain_for_the_limit_ends_the_request() -> None:
    found = _Watched()
    found.watch.found(1, b"claim")
    assert found.hear(b"frame", seconds=60)
    found.watch.check()
    found.hear(b"frame", seconds=1)
    with pytest.raises(Overloaded) as raised:
        found.watch.check()
    assert raised.value.code == "journal_stuck"


def test_claims_of_one_attempt_after_another_are_tries_too() -> None:
    found = _Watched()
    for attempt in range(7):
        found.hear(b"claim %d" % attempt, seconds=10, claim=True)
    with pytest.raises(Overloaded):
        found.watch.check()


def test_new_frames_tell_that_those_before_are_stored_and_the_journal_is_not_asked() -> None:
    found = _Watched()
    looks = [found.hear(b"frame %d" % number, seconds=1) for number in range(100)]
    found.watch.check()
    assert not any(looks)


@pytest.mark.parametrize("stored", [b"frame", b"of another attempt"])
def test_growth_begins_the_limit_anew(stored: bytes) -> None:
    found = _Watched()
    found.hear(b"frame", seconds=61)
    found.watch.found(1, stored)
    found.watch.check()
    found.hear(b"frame", seconds=60)
    found.watch.check()


def test_a_message_that_was_heard_once_is_not_a_try_however_long_ago() -> None:
    found = _Watched()
    found.hear(b"of a worker that lost its claim", seconds=1)
    found.clock.advance(600)
    found.watch.check()


def _fill(work: Work) -> None:
    """From now on the journal takes nothing; cancellations still come."""
    journal = work.worker.transport.server.streams[subjects.JOURNAL.name]  # type: ignore[attr-defined]
    journal.update(replace(journal.spec, max_bytes=1))


async def _claims(work: Work) -> None:
    """As a worker does: the claim again and again."""
    _fill(work)
    while not work.cancelled.is_set():
        with pytest.raises(Overloaded):
            await work.start()
        await asyncio.sleep(0.02)  # a worker's pause between its tries


async def _frames(work: Work) -> None:
    """The claim is stored; its first frame is not."""
    await work.start()
    _fill(work)
    while not work.cancelled.is_set():
        with pytest.raises(Overloaded):
            await work.burst(ids("Hello"))
        await asyncio.sleep(0.02)  # as above


async def test_a_claim_that_cannot_be_stored_does_not_lift_the_queue_deadline() -> None:
    async with running_line(**(SHORT | {"journal_stuck_s": 600.0})) as line, asyncio.timeout(10):
        line.worker.script = _claims
        answer = await line.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        await line.worker.works[0].cancelled.wait()


async def test_a_stream_whose_frames_cannot_be_stored_ends_in_band_and_is_cancelled() -> None:
    async with running_line(**SHORT) as line, asyncio.timeout(10):
        line.worker.script = _frames
        answer = await line.chat(stream=True)
        assert "journal_stuck" in answer.text
        assert answer.text.rstrip().endswith("data: [DONE]")
        await line.worker.works[0].cancelled.wait()
