"""The streams do not fill up with what ended, and nothing that is still needed goes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from services.cache_broker.journals import Journals
from shared.clock import ManualClock
from shared.errors import FencedOut, Unavailable
from shared.protocol import codec, subjects
from shared.protocol.messages import Terminal
from shared.transport.memory import MemoryTransport
from tests.golden.protocol.examples import example

GRACE_S = 60.0


class Here:
    """A journal of two frames and a terminal, and a cancellation, for each request."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.transport = MemoryTransport()
        self.journals = Journals(self.transport, self.clock, CollectorRegistry(), grace_s=GRACE_S)

    async def request(self, name: str, *, cancelled: bool = False, ended: bool = True) -> int:
        """Returns the sequence of the terminal."""
        for spec in (subjects.JOURNAL, subjects.CANCELS):
            await self.transport.ensure_stream(spec)
        terminal = _terminal(name, "deadline" if cancelled else None)
        for data in (b"started", b"frame"):
            await self.transport.append(subjects.tokens(name), data)
        stored = await self.transport.append(subjects.tokens(name), codec.encode(terminal))
        await self.transport.append(subjects.cancel(name), b"cancel")
        if ended:
            self.journals.ended(terminal)
        return stored.sequence

    async def held(self, *names: str) -> Mapping[str, tuple[int, bool]]:
        """Messages of each journal, and whether the cancellation is there."""
        return {
            name: (
                len(await self.transport.read(subjects.JOURNAL.name, subjects.tokens(name))),
                await self.transport.last(subjects.CANCELS.name, subjects.cancel(name)) is not None,
            )
            for name in names
        }


def _terminal(name: str, cancel_reason: str | None) -> Terminal:
    sample = example(Terminal)
    assert isinstance(sample, Terminal)
    return msgspec.structs.replace(sample, request_id=name, cancel_reason=cancel_reason)


async def test_a_journal_is_cut_to_its_terminal_after_the_grace() -> None:
    here = Here()
    sequence = await here.request("r1")
    await here.request("running", ended=False)
    here.clock.advance(GRACE_S - 1)
    assert await here.journals.cut() == 0
    assert await here.held("r1") == {"r1": (3, True)}
    here.clock.advance(1)
    assert await here.journals.cut() == 1
    assert await here.held("r1", "running") == {"r1": (1, True), "running": (3, True)}
    last = await here.transport.last(subjects.JOURNAL.name, subjects.tokens("r1"))
    assert last is not None
    assert (last.sequence, codec.decode_as(Terminal, last.data).request_id) == (sequence, "r1")


async def test_a_work_item_that_comes_again_still_finds_the_end() -> None:
    """A worker that takes the journal for empty would run the request once more."""
    here = Here()
    await here.request("r1")
    here.clock.advance(GRACE_S)
    await here.journals.cut()
    with pytest.raises(FencedOut):
        await here.transport.append(subjects.tokens("r1"), b"started", expected_last_subject_sequence=0)


async def test_the_cancellation_of_an_ended_request_goes_too() -> None:
    here = Here()
    await here.request("r1", cancelled=True)
    here.clock.advance(GRACE_S)
    await here.journals.cut()
    assert await here.held("r1") == {"r1": (1, False)}


async def test_an_outage_forgets_nothing() -> None:
    here = Here()
    for name in ("r1", "r2"):
        await here.request(name)
    here.clock.advance(GRACE_S)
    here.transport.server.online = False
    with pytest.raises(Unavailable):
        await here.journals.cut()
    here.transport.server.online = True
    assert await here.journals.cut() == 2
    assert await here.held("r1", "r2") == {"r1": (1, True), "r2": (1, True)}


async def test_a_prompt_that_lies_in_chunks_goes_with_the_journal_unless_the_request_failed() -> None:
    here = Here()
    await here.transport.ensure_stream(subjects.JOURNAL)
    await here.transport.ensure_stream(subjects.BODIES)
    sample = _terminal("", None)
    for name, failure in (("good", None), ("bad", sample.failure)):
        await here.transport.append(subjects.body(name), b"chunk")
        ended = msgspec.structs.replace(sample, request_id=name, failure=failure, prompt_tokens=500_000)
        here.journals.ended(ended)
    assert sample.failure is not None
    here.clock.advance(GRACE_S + 1)
    assert await here.journals.cut() == 2
    assert await here.transport.waiting(subjects.BODIES.name, "body.*") == {subjects.body("bad"): 1}
