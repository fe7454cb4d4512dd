"""However bursts and publishes interleave, the frames carry every token once, in order, without gaps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker import journal
from services.gpu_worker.convert import frame_of
from services.gpu_worker.frames import MAX_FRAME_TOKENS, FrameBuffer
from shared.errors import EngineFault
from shared.protocol.messages import TokenLogprobs

BURSTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300), st.booleans()), max_size=40)


@settings(deadline=None, max_examples=60)
@given(bursts=BURSTS, resumed=st.lists(st.integers(0, 50), min_size=3, max_size=3), logprobs=st.booleans())
def test_frames_fold_to_what_was_told(
    bursts: list[tuple[int, int, bool]], resumed: list[int], logprobs: bool
) -> None:
    told = [list(range(count)) for count in resumed]
    state = journal.empty(3)
    state = journal.JournalState(
        sequence=0,
        attempt=1,
        starts=1,
        vain=1,
        fingerprint="f",
        mixed=False,
        worker_id="w",
        terminal=None,
        tokens=tuple(map(tuple, told)),
        scores=0,
    )
    buffer = FrameBuffer(resumed)
    sequence = 0

    def publish() -> bool:
        nonlocal state, sequence
        chunk = buffer.take()
        if chunk is None:
            return False
        assert 0 < len(chunk.tokens) <= MAX_FRAME_TOKENS
        assert (chunk.logprobs is not None) == logprobs
        if chunk.logprobs is not None:
            assert tuple(value.token for value in chunk.logprobs) == chunk.tokens
        assert chunk.offset == len(state.tokens[chunk.choice])
        sequence += 1
        state = journal.fold(state, sequence, frame_of("r", 1, chunk))
        return True

    for choice, count, flush in bursts:
        offset = len(told[choice])
        new = list(range(offset, offset + count))
        values = (
            [TokenLogprobs(token=token, logprob=0.0, top=()) for token in new] if logprobs and new else None
        )
        buffer.add(choice, offset, new, values)
        told[choice] += new
        if flush:
            publish()
    while publish():
        pass
    assert not buffer
    assert state.tokens == tuple(map(tuple, told))
    assert buffer.offsets == tuple(map(len, told))


@given(offset=st.integers(0, 10).filter(lambda offset: offset != 4))
def test_a_burst_that_does_not_follow_is_an_engine_fault(offset: int) -> None:
    buffer = FrameBuffer((4,))
    with pytest.raises(EngineFault):
        buffer.add(0, offset, [1], None)


def test_choices_take_turns() -> None:
    buffer = FrameBuffer((0, 0))
    buffer.add(0, 0, list(range(600)), None)
    buffer.add(1, 0, [7], None)
    order = []
    while (chunk := buffer.take()) is not None:
        order.append(chunk.choice)
    assert order == [0, 1, 0, 0]
