"""Long polls: where they stand, how many, and whose request a bell tells of."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.posts import MOST, Posts
from shared.protocol import subjects

FINGERPRINT = "f" * 64
OWN = f"req.{FINGERPRINT[:16]}.to.w1."
LANES = [f"req.{FINGERPRINT[:16]}.{priority}.{lane}" for priority in subjects.PRIORITIES for lane in range(3)]
FOREIGN = f"req.{FINGERPRINT[:16]}.to.w2.0"


class _Queue:
    """Polls that end when the test says so."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.under_way: dict[str, asyncio.Future[bool]] = {}
        self.posts = Posts(OWN, self._poll)

    async def _poll(self, subject: str) -> bool:
        assert subject not in self.under_way, "two polls of one subject"
        self.asked[subject] += 1
        self.under_way[subject] = asyncio.get_running_loop().create_future()
        try:
            return await self.under_way[subject]
        finally:
            del self.under_way[subject]

    async def fill(self, places: int) -> None:
        self.posts.fill(places)
        await asyncio.sleep(0)

    async def end(self, subject: str, *, brought: bool) -> None:
        before = [poll for poll in self.posts.standing if not poll.done()]
        self.under_way[subject].set_result(brought)
        await asyncio.wait(before, return_when=asyncio.FIRST_COMPLETED)


async def test_a_poll_stands_where_something_was_heard_and_answers_one_bell() -> None:
    queue = _Queue()
    assert not queue.posts.answers(LANES[0])  # nothing stands yet: it is to be asked for
    await queue.fill(4)
    assert list(queue.under_way) == [LANES[0]]
    assert queue.posts.answers(LANES[0])
    assert not queue.posts.answers(LANES[0])  # the poll brings one
    await queue.end(LANES[0], brought=True)
    assert queue.posts.over() == []
    await queue.posts.cancel()


async def test_a_poll_that_was_told_of_something_and_brought_nothing_is_asked_about() -> None:
    queue = _Queue()
    queue.posts.answers(LANES[0])
    await queue.fill(4)
    queue.posts.answers(LANES[0])
    await queue.end(LANES[0], brought=False)
    assert queue.posts.over() == [LANES[0]]
    assert queue.posts.over() == []


async def test_no_poll_stands_on_another_workers_queue_and_the_own_ones_come_first() -> None:
    queue = _Queue()
    for subject in (f"{OWN}3", *LANES[:3], FOREIGN):
        queue.posts.answers(subject)
    await queue.fill(1)
    assert list(queue.under_way) == [f"{OWN}3"]
    await queue.fill(9)
    assert FOREIGN not in queue.under_way
    assert len(queue.under_way) == 4
    await queue.posts.cancel()
    assert queue.under_way == {}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("bell"), st.sampled_from([*LANES, f"{OWN}1", FOREIGN]), st.just(0)),
        st.tuples(st.just("fill"), st.just(""), st.integers(0, 9)),
        st.tuples(st.just("end"), st.just(""), st.integers(0, 9)),
        st.tuples(st.just("over"), st.just(""), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=40)
@given(steps=STEPS)
async def test_polls_are_bounded_and_every_bell_is_asked_about_or_brought(
    steps: list[tuple[str, str, int]],
) -> None:
    """A bell is either told to the turns (not answered, or missed), or its poll brings a request."""
    queue = _Queue()
    answered: Counter[str] = Counter()
    for kind, subject, number in steps:
        if kind == "bell":
            answered[subject] += queue.posts.answers(subject)
        elif kind == "fill":
            before = len(queue.posts.standing)
            await queue.fill(number)
            assert len(queue.posts.standing) <= max(before, number, 0)
            assert len(queue.posts.standing) <= before + MOST
        elif kind == "end" and queue.under_way:
            place = sorted(queue.under_way)[number % len(queue.under_way)]
            await queue.end(place, brought=False)
        elif kind == "over":
            answered.subtract(queue.posts.over())
    for place in sorted(queue.under_way):
        await queue.end(place, brought=False)
    answered.subtract(queue.posts.over())
    assert not +answered
    assert not queue.posts.standing
