"""Subjects and sizes, buffers, drift of configurations, server errors in our words, clocks of the memory twin."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.clock import ManualClock
from shared.errors import Conflict, FencedOut, NotFound, Overloaded, PayloadTooLarge, Unavailable
from shared.protocol.subjects import (
    DEAD,
    JOURNAL,
    REQUESTS,
    STREAMS,
    request_shared,
    request_to,
    work_consumer,
)
from shared.transport import jetstream, specs
from shared.transport.base import Received
from shared.transport.buffer import Buffer
from shared.transport.memory import MemoryServer
from shared.transport.wire import matches, message_bytes, overlaps

FINGERPRINT = "f" * 64
tokens = st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*", "a", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("*.b", "a.b", True),
        ("a.b", "a.c", False),
    ],
)
def test_matches(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected


@given(one=tokens, other=tokens, tails=st.tuples(st.booleans(), st.booleans()))
def test_patterns_overlap_exactly_when_a_subject_falls_under_both(
    one: list[str], other: list[str], tails: tuple[bool, bool]
) -> None:
    left = ".".join(one + [">"] * tails[0])
    right = ".".join(other + [">"] * tails[1])
    alphabet = ["a", "b", "c"]
    subjects = [""]
    found = False
    for _ in range(6):
        subjects = [f"{known}.{token}".lstrip(".") for known in subjects for token in alphabet]
        found = found or any(matches(left, known) and matches(right, known) for known in subjects)
        subjects = [known for known in subjects if _leads(left, known) and _leads(right, known)]
    assert overlaps(left, right) == found


def _leads(pattern: str, subject: str) -> bool:
    """Whether some longer subject that begins with `subject` may match."""
    wanted, given_ = pattern.split("."), subject.split(".")
    for index, token in enumerate(given_):
        if index >= len(wanted):
            return False
        if wanted[index] == ">":
            return True
        if wanted[index] not in ("*", token):
            return False
    return True


@pytest.mark.parametrize(
    ("headers", "encoded"),
    [(None, b""), ({}, b""), ({"a": "b", "ä": "é"}, "NATS/1.0\r\na: b\r\nä: é\r\n\r\n".encode())],
)
def test_headers_count_as_they_are_encoded(headers: dict[str, str] | None, encoded: bytes) -> None:
    assert message_bytes(b"xyz", headers) == len(encoded) + 3


def message(size: int) -> Received:
    return Received(subject="a", data=b"x" * size)


async def nothing() -> None: ...


async def test_a_buffer_is_bounded_by_count_and_by_bytes() -> None:
    by_count = Buffer(nothing, max_messages=2, max_bytes=1000)
    assert [by_count.offer(message(1)) for _ in range(3)] == [True, True, False]
    by_bytes = Buffer(nothing, max_messages=100, max_bytes=10)
    assert [by_bytes.offer(message(size)) for size in (6, 5, 4)] == [True, False, True]
    assert (by_count.dropped, by_bytes.dropped) == (1, 1)
    assert await by_bytes.next(1) == message(6)
    assert by_bytes.offer(message(6))
    await by_bytes.close()
    assert not by_bytes.offer(message(1))


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=30))
async def test_a_buffer_keeps_order_and_its_bounds(sizes: list[int | None]) -> None:
    """None = the reader takes one; a number = one of that many bytes arrives."""
    buffer = Buffer(nothing, max_messages=4, max_bytes=16)
    model: list[Received] = []
    dropped = 0
    for size in sizes:
        if size is None:
            assert (await buffer.next(0)) == (model.pop(0) if model else None)
        elif len(model) < 4 and sum(len(one.data) for one in model) + size <= 16:
            assert buffer.offer(message(size))
            model.append(message(size))
        else:
            assert not buffer.offer(message(size))
            dropped += 1
    assert buffer.dropped == dropped


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (10071, FencedOut),
        (10164, FencedOut),
        (10077, Overloaded),
        (10047, Overloaded),
        (10054, PayloadTooLarge),
        (10058, Conflict),
        (10059, NotFound),
        (10008, Unavailable),
        (99999, Unavailable),
    ],
)
def test_server_errors_in_our_words(code: int, kind: type[Exception]) -> None:
    assert type(jetstream.translate({"err_code": code, "description": "why"})) is kind


@pytest.mark.parametrize("answer", [b"", b"no", b"[]", b'{"error": {}}', b"\xff"])
def test_an_answer_that_is_none_is_unavailable(answer: bytes) -> None:
    with pytest.raises(Unavailable):
        jetstream.parse(answer)


def test_drift_names_the_fields_and_takes_absent_zeros_for_zeros() -> None:
    wanted = specs.stream_config(JOURNAL)
    assert specs.differing(wanted, dict(wanted, extra=1, num_replicas=3)) == []
    assert specs.differing(wanted, {**wanted, "max_age": 1, "retention": "workqueue"}) == [
        "retention",
        "max_age",
    ]
    assert specs.differing({"a": 0, "b": False, "c": ""}, {}) == []


@pytest.mark.parametrize("spec", STREAMS)
def test_every_stream_is_bounded_and_refuses_when_full(spec: object) -> None:
    config = specs.stream_config(spec)  # type: ignore[arg-type]
    assert config["discard"] == "new"
    assert 0 < config["max_bytes"] <= 1 << 30
    assert config["max_age"] > 0
    assert config["max_msg_size"] > 0


def test_the_journal_outlives_what_waits_in_the_queue() -> None:
    assert JOURNAL.max_age_s > REQUESTS.max_age_s
    assert DEAD.max_age_s > JOURNAL.max_age_s


def test_every_request_subject_has_a_consumer_of_its_own_that_goes_when_nothing_can_be_left() -> None:
    own = work_consumer(request_to(FINGERPRINT, "w", "t"), ack_wait_s=15)
    lanes = [work_consumer(request_shared(FINGERPRINT, "high", tenant), ack_wait_s=15) for tenant in "ab"]
    every = (own, *lanes)
    assert len({one.durable for one in every}) == 3
    for one in every:
        assert specs.consumer_config(one)["inactive_threshold"] == REQUESTS.max_age_s * 10**9
        assert specs.consumer_config(one)["max_deliver"] == -1
        assert sum(overlaps(one.filter_subject, other.filter_subject) for other in every) == 1
    assert specs.consumer_config(own)["priority_policy"] == "prioritized"
    assert "priority_policy" not in specs.consumer_config(lanes[0])


# ---- the memory twin's clock -----------------------------------------------------------------------------------------


async def test_memory_ack_wait_goes_by_the_clock() -> None:
    clock = ManualClock()
    transport = MemoryServer(clock=clock).transport()
    await transport.ensure_stream(REQUESTS)
    consumer = await transport.ensure_consumer(
        work_consumer(request_shared(FINGERPRINT, "normal", "t"), ack_wait_s=15)
    )
    await transport.append(request_shared(FINGERPRINT, "normal", "t"), b"x")
    (first,) = await consumer.fetch(limit=1, timeout=1)
    clock.advance(14)
    await first.progress()
    clock.advance(14)
    assert await consumer.fetch(limit=1, timeout=0) == []
    clock.advance(2)
    (second,) = await consumer.fetch(limit=1, timeout=0)
    assert second.delivery_count == 2


async def test_memory_forgets_ids_and_messages_by_the_clock() -> None:
    clock = ManualClock()
    transport = MemoryServer(clock=clock).transport()
    await transport.ensure_stream(JOURNAL)
    first = await transport.append("tok.r", b"a", message_id="i")
    clock.advance(JOURNAL.duplicate_window_s + 1)
    assert not (await transport.append("tok.r", b"b", message_id="i")).duplicate
    clock.advance(JOURNAL.max_age_s - 10)
    assert [one.data for one in await transport.read(JOURNAL.name, "tok.r")] == [b"b"]
    assert (
        await transport.append("tok.r", b"c", expected_last_subject_sequence=first.sequence + 1)
    ).sequence == 3


async def test_memory_offline_is_unavailable_and_comes_back() -> None:
    server = MemoryServer()
    transport = server.transport()
    await transport.ensure_stream(JOURNAL)
    server.online = False
    assert not await transport.ready()
    with pytest.raises(Unavailable):
        await transport.append("tok.r", b"x")
    with pytest.raises(Unavailable):
        await transport.publish("tok.r", b"x")
    server.online = True
    await transport.append("tok.r", b"x")
