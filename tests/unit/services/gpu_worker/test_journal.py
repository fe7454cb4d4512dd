"""The fold of a journal, and its fenced writer."""

from __future__ import annotations

import asyncio

import pytest

from services.gpu_worker import journal
from services.gpu_worker.journal import Journal
from shared.clock import ManualClock
from shared.errors import FencedOut, ProtocolError, Unavailable
from shared.protocol import subjects
from shared.protocol.messages import Frame, Started, pack_tokens
from shared.transport.memory import MemoryServer, MemoryTransport


def _frame(offset: int, *tokens: int, choice: int = 0, attempt: int = 1) -> Frame:
    return Frame(
        request_id="r",
        attempt=attempt,
        choice=choice,
        offset=offset,
        tokens=pack_tokens(tokens),
        logprobs=None,
    )


def _started(attempt: int, fingerprint: str = "f") -> Started:
    return Started(
        request_id="r", attempt=attempt, worker_id="w", fingerprint=fingerprint, cached_tokens=0,
        resumed_offsets=(0,), resumed_scores=0, at_ns=0,
    )  # fmt: skip


def _fold(*messages: Started | Frame, choices: int = 1) -> journal.JournalState:
    state = journal.empty(choices)
    for sequence, message in enumerate(messages, 1):
        state = journal.fold(state, sequence, message)
    return state


def test_the_fold_keeps_tokens_attempts_and_the_first_fingerprint() -> None:
    state = _fold(_started(1, "a"), _frame(0, 5, 6), _started(2, "b"), _frame(2, 7, attempt=2))
    assert (state.tokens, state.attempt, state.starts) == (((5, 6, 7),), 2, 2)
    assert (state.fingerprint, state.sequence, state.offsets) == ("a", 4, (3,))


def test_claims_count_as_vain_until_one_gets_further_or_is_handed_back() -> None:
    first, second, third = _started(1, "a"), _started(2, "a"), _started(3, "a")
    assert _fold(first, second, third).vain == 3
    assert _fold(first, _frame(0, 5), second, third).vain == 3, (
        "poison that kills after a first token is poison too"
    )
    assert _fold(first, second, _frame(0, 5), third).vain == 2
    assert _fold(first, second, _frame(0), third).vain == 2
    assert _fold(first, _frame(0), second, _frame(0), third, _frame(0)).vain == 0


def test_an_overlap_that_agrees_is_trimmed() -> None:
    assert _fold(_frame(0, 5, 6, 7), _frame(1, 6, 7, 8)).tokens == ((5, 6, 7, 8),)
    assert _fold(_frame(0, 5, 6, 7), _frame(1, 6)).tokens == ((5, 6, 7),)


@pytest.mark.parametrize(
    "frame", [_frame(4, 1), _frame(1, 9, 9), _frame(0, 1, choice=1), _frame(0, 1, choice=-1)]
)
def test_a_gap_a_contradiction_and_a_foreign_choice_are_errors(frame: Frame) -> None:
    with pytest.raises(ProtocolError):
        _fold(_frame(0, 5, 6, 7), frame)


async def _transport() -> MemoryTransport:
    transport = MemoryTransport(MemoryServer(clock=ManualClock()))
    await transport.ensure_stream(subjects.JOURNAL)
    return transport


def _writer(transport: MemoryTransport, clock: ManualClock, name: str = "a", sequence: int = 0) -> Journal:
    return Journal(transport, "r", sequence, message_ids=name, clock=clock, patience_s=5.0, headers={})


async def test_a_long_journal_is_read_whole() -> None:
    transport = await _transport()
    writer = _writer(transport, ManualClock())
    await writer.append(_started(1))
    for offset in range(1200):
        await writer.append(_frame(offset, offset))
    state = await journal.read(transport, "r", 1)
    assert state.tokens == (tuple(range(1200)),)
    assert state.sequence == writer.sequence == 1201


async def test_fr_96_the_fence_refuses_a_writer_that_does_not_know_the_last_message() -> None:
    transport, clock = await _transport(), ManualClock()
    one, two = _writer(transport, clock, "one"), _writer(transport, clock, "two")
    await one.append(_started(1))
    with pytest.raises(FencedOut):
        await two.append(_started(1, "other"))
    await one.append(_frame(0, 1))
    assert (await journal.read(transport, "r", 1)).starts == 1


async def test_fr_98_two_writers_with_equal_message_ids_would_pass_each_other_s_fence() -> None:
    """Why message ids carry the process and the attempt: a duplicate is accepted before the fence is looked at."""
    transport, clock = await _transport(), ManualClock()
    await _writer(transport, clock, "same").append(_started(1))
    await _writer(transport, clock, "same").append(_started(1, "other"))
    assert (await journal.read(transport, "r", 1)).fingerprint == "f"


async def test_an_append_whose_answer_was_lost_is_not_repeated() -> None:
    transport, clock = await _transport(), ManualClock()
    plain = transport.append
    calls = 0

    async def lossy(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        stored = await plain(*arguments, **options)  # type: ignore[arg-type]
        if calls == 1:
            raise Unavailable("the answer was lost")
        return stored

    transport.append = lossy  # type: ignore[method-assign, assignment]
    writer = _writer(transport, clock)
    await writer.append(_started(1))
    await writer.append(_frame(0, 4))
    state = await journal.read(transport, "r", 1)
    assert (state.starts, state.tokens, state.sequence) == (1, ((4,),), 2)


async def test_an_unreachable_journal_is_given_up_after_the_patience() -> None:
    transport, clock = await _transport(), ManualClock()
    transport.server.online = False
    writing = asyncio.create_task(_writer(transport, clock).append(_started(1)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not writing.done()
    clock.advance(6)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(writing, 10)
