"""Single steps of the stream machine: what each rule of its docstring does."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shared.protocol import stream
from shared.protocol.messages import Frame
from shared.protocol.stream import Alarm, Claimed, Emit, End, ReadJournal, ReadLast, StreamState
from tests.property.shared.test_stream import frame, started, terminal


def reader(**changes: object) -> StreamState:
    return replace(stream.begin("r", choices=1, max_tokens=8), attempt=1, **changes)


def test_the_first_claim_is_believed_live_and_a_later_one_asked_for() -> None:
    state, actions = stream.step(stream.begin("r", choices=1, max_tokens=8), started(1, (0,)))
    assert actions == (Claimed(started=started(1, (0,))),)
    state, actions = stream.step(state, started(2, (0,)))
    assert state.attempt == 1
    assert actions == (ReadJournal(after=0),)
    state, actions = stream.step(state, started(2, (0,)), 7)
    assert state.attempt == 2
    assert actions == (Claimed(started=started(2, (0,))),)


@pytest.mark.parametrize("offsets", [(3,), (-1,), (2, 0), ()])
def test_a_journalled_claim_that_goes_on_after_tokens_nobody_stored_is_an_alarm(
    offsets: tuple[int, ...],
) -> None:
    state, _ = stream.step(reader(), frame(1, 0, 0, (5, 6)), 2)
    state, actions = stream.step(state, started(2, offsets), 3)
    assert isinstance(actions[0], Alarm)
    assert state.attempt == 1


@pytest.mark.parametrize("offset", [0, 2])
def test_a_journalled_claim_may_go_on_after_less_than_was_relayed_live(offset: int) -> None:
    state, _ = stream.step(reader(), frame(1, 0, 0, (5, 6)))
    _, actions = stream.step(state, started(2, (offset,)), 3)
    assert actions == (Claimed(started=started(2, (offset,))),)


def test_a_frame_before_any_claim_makes_the_reader_ask() -> None:
    state, actions = stream.step(stream.begin("r", choices=1, max_tokens=8), frame(1, 0, 0, (5,)))
    assert actions == (ReadJournal(after=0),)
    assert state.relayed == (b"",)


def test_fr_96_frames_of_an_older_attempt_are_dropped() -> None:
    state = replace(reader(), attempt=2)
    assert stream.step(state, frame(1, 0, 0, (5,))) == (state, ())
    assert stream.step(state, terminal(1, (0,))) == (state, ())


def test_fr_104_a_gap_is_read_from_the_journal() -> None:
    state, actions = stream.step(replace(reader(), sequence=3), frame(1, 0, 2, (7,)))
    assert actions == (ReadJournal(after=3),)
    state, _ = stream.step(state, frame(1, 0, 0, (5, 6)), 4)
    state, actions = stream.step(state, frame(1, 0, 2, (7,)), 5)
    assert actions == (Emit(choice=0, offset=2, tokens=(7,), logprobs=None),)
    assert stream.read_done(state)[1] == ()


def test_an_overlap_is_trimmed_with_its_logprobs() -> None:
    state, _ = stream.step(reader(), frame(1, 0, 0, (5, 6), logprobs=True))
    state, actions = stream.step(state, frame(1, 0, 1, (6, 7), logprobs=True))
    (emit,) = actions
    assert isinstance(emit, Emit)
    assert (emit.offset, emit.tokens) == (2, (7,))
    assert emit.logprobs is not None
    assert [one.token for one in emit.logprobs] == [7]


def test_what_is_heard_during_a_read_makes_another_read_and_no_more_than_some() -> None:
    state, _ = stream.step(reader(), frame(1, 0, 4, (7,)))
    delays = []
    for _ in range(20):
        state, actions = stream.step(state, frame(1, 0, 4, (7,)))
        assert actions == ()
        state, actions = stream.read_done(state)
        if not actions:
            break
        (again,) = actions
        assert isinstance(again, ReadJournal)
        delays.append(again.delay_s)
    assert 0 < len(delays) < 8
    assert delays == sorted(delays)
    assert not state.reading


def test_a_terminal_is_relayed_when_the_journal_has_it_and_every_token_was_relayed() -> None:
    state, actions = stream.step(reader(), terminal(1, (1,)))
    assert actions == (ReadLast(),)
    state, actions = stream.confirm(state, terminal(1, (1,)), 9)
    assert actions == (ReadJournal(after=0),)
    state, _ = stream.step(state, frame(1, 0, 0, (5,)), 8)
    state, actions = stream.step(state, terminal(1, (1,)), 9)
    assert actions == (End(terminal=terminal(1, (1,))),)
    assert stream.step(state, terminal(1, (1,)), 9) == (state, ())
    assert stream.ask(state) == (state, ())


def test_a_complete_terminal_needs_no_second_reading_of_the_journal() -> None:
    state, _ = stream.step(reader(), frame(1, 0, 0, (5,)))
    state, _ = stream.step(state, terminal(1, (1,)))
    _, actions = stream.confirm(state, terminal(1, (1,)), 9)
    assert actions == (End(terminal=terminal(1, (1,))),)


def test_a_terminal_that_the_journal_does_not_have_is_asked_for_a_few_times_only() -> None:
    state, actions = stream.step(reader(), terminal(1, (0,)))
    asked = 0
    while actions:
        asked += 1
        assert asked < 10
        state, actions = stream.confirm(state, started(1, (0,)), 1)
    assert not state.missing


def test_a_failure_before_any_claim_ends_the_stream() -> None:
    failed = replace_terminal_without_ends()
    state, actions = stream.step(stream.begin("r", choices=2, max_tokens=8), failed)
    assert actions == (ReadLast(),)
    state, actions = stream.confirm(state, failed, 1)
    assert actions == (ReadJournal(after=0),)
    state, actions = stream.step(state, failed, 1)
    assert actions == (End(terminal=failed),)


def replace_terminal_without_ends():  # type: ignore[no-untyped-def]
    import msgspec

    return msgspec.structs.replace(terminal(0, ()), ends=())


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (frame(1, 1, 0, (5,)), "choice"),
        (frame(1, -1, 0, (5,)), "choice"),
        (frame(1, 0, 7, (5, 6)), "limit"),
        (frame(1, 0, -1, (5,)), "limit"),
        (Frame(request_id="r", attempt=1, choice=0, offset=0, tokens=b"123", logprobs=None), "part"),
        (Frame(request_id="r", attempt=1, choice=0, offset=0, tokens=b"1234", logprobs=()), "logprobs"),
        (
            Frame(request_id="x", attempt=1, choice=0, offset=0, tokens=b"1234", logprobs=None),
            "another request",
        ),
    ],
)
def test_what_cannot_be_raises_an_alarm_and_changes_nothing(bad: Frame, reason: str) -> None:
    state, actions = stream.step(reader(), bad)
    assert state == reader()
    (alarm,) = actions
    assert isinstance(alarm, Alarm)
    assert reason in alarm.reason


def test_a_frame_that_disagrees_raises_an_alarm() -> None:
    state, _ = stream.step(reader(), frame(1, 0, 0, (5, 6)))
    after, actions = stream.step(state, frame(1, 0, 1, (9, 7)))
    assert after == state
    assert isinstance(actions[0], Alarm)


def test_a_gap_inside_the_journal_raises_an_alarm() -> None:
    _, actions = stream.step(reader(), frame(1, 0, 2, (5,)), 3)
    assert isinstance(actions[0], Alarm)
