"""Fair turns: however requests come, nobody's first waits for more than one request of each other lane."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.turns import MOST_A_LOOK, WEIGHTS, Turns
from shared.protocol import subjects

FINGERPRINT = "f" * 64
OWN = subjects.own_queue(FINGERPRINT, "w1")
MINE = [f"{OWN}{lane}" for lane in range(3)]
OTHERS = [subjects.request_to(FINGERPRINT, f"x{number}", "t") for number in range(3)]
LANES = [f"req.{FINGERPRINT[:16]}.{priority}.{lane}" for priority in subjects.PRIORITIES for lane in range(5)]
SUBJECTS = [*MINE, *OTHERS, *LANES]

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(SUBJECTS), st.integers(1, 50)),
        st.tuples(st.just("look"), st.just(""), st.just(0)),
        st.tuples(st.just("take"), st.just(""), st.just(0)),
        st.tuples(st.just("steal"), st.sampled_from(SUBJECTS), st.integers(1, 50)),
    ),
    max_size=120,
)


class _Queue:
    """The stream as a dict of counts, and one worker's turns on it."""

    def __init__(self) -> None:
        self.waiting: Counter[str] = Counter()
        self.turns = Turns(OWN)
        self.order: list[str] = []

    def look(self) -> None:
        self.turns.looked({subject: count for subject, count in self.waiting.items() if count})

    def take(self) -> str | None:
        """As the puller: ask by turns until something is there."""
        while (subject := self.turns.next()) is not None:
            if self.waiting[subject]:
                self.waiting[subject] -= 1
                self.turns.took(subject)
                self.order.append(subject)
                return subject
            self.turns.empty(subject)
        return None


@settings(deadline=None, max_examples=100)
@given(steps=STEPS)
def test_c2_everything_is_taken_and_no_lane_twice_before_another_of_its_priority(
    steps: list[tuple[str, str, int]],
) -> None:
    queue = _Queue()
    for kind, subject, count in steps:
        if kind == "put":
            queue.waiting[subject] += count
            queue.turns.heard(subject)
        elif kind == "steal":
            queue.waiting[subject] = max(0, queue.waiting[subject] - count)
        elif kind == "look":
            queue.look()
        else:
            queue.take()
    left = queue.waiting.total()
    queue.order.clear()
    before = +queue.waiting
    for _ in range(2 * len(SUBJECTS) // MOST_A_LOOK + 3):
        queue.look()
    while queue.take() is not None:
        pass
    assert Counter(queue.order) == before
    assert len(queue.order) == left
    for priority in subjects.PRIORITIES:
        _assert_rotation([lane for lane in queue.order if f".{priority}." in lane], before)


def _assert_rotation(order: list[str], before: Counter[str]) -> None:
    """Between two turns of a lane every other lane that still has something comes once."""
    left, last = Counter({lane: before[lane] for lane in set(order)}), deque[str]()
    for lane in order:
        having = {other for other, count in left.items() if count}
        recent = [other for other in last if other in having]
        assert lane not in recent[-(len(having) - 1) :] if len(having) > 1 else True
        left[lane] -= 1
        last.append(lane)


@settings(deadline=None, max_examples=50)
@given(flood=st.sampled_from(SUBJECTS), newcomer=st.sampled_from(LANES), taken=st.integers(0, 40))
def test_c2_a_thousand_requests_of_one_do_not_delay_a_newcomers_first(
    flood: str, newcomer: str, taken: int
) -> None:
    queue = _Queue()
    queue.waiting[flood] = 1000
    queue.look()
    queue.look()
    for _ in range(taken):
        queue.take()
    queue.order.clear()
    queue.waiting[newcomer] += 1
    queue.turns.heard(newcomer)
    bound = 1 + max(WEIGHTS.values()) // WEIGHTS[queue.turns.queue(newcomer)]
    while newcomer not in queue.order[1 if newcomer == flood else 0 :] and len(queue.order) <= bound:
        queue.take()
    assert len(queue.order) <= bound + 1


def test_what_is_another_workers_is_not_asked_for_at_the_first_look() -> None:
    queue = _Queue()
    queue.waiting[OTHERS[0]] = 1
    queue.turns.heard(OTHERS[0])
    queue.look()
    assert queue.turns.next() is None
    queue.look()
    assert queue.take() == OTHERS[0]


def test_a_look_adds_a_bounded_number_and_later_looks_the_rest() -> None:
    turns = Turns(OWN)
    lanes = {f"req.{FINGERPRINT[:16]}.normal.{lane}": 1 for lane in range(3 * MOST_A_LOOK)}
    asked: set[str] = set()
    for looks in range(1, 12):
        turns.looked(lanes)
        while (subject := turns.next()) is not None:
            asked.add(subject)
            turns.empty(subject)
        assert len(asked) <= looks * MOST_A_LOOK
    assert asked == set(lanes)
