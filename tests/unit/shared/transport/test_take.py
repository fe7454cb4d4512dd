"""Takes of one connection: each answer finds who asked, none waits for another consumer's, and nothing that came is lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from shared.errors import Unavailable
from shared.protocol.subjects import ConsumerSpec, work_consumer
from shared.transport import take
from shared.transport.base import Delivery
from shared.transport.take import Taker
from shared.transport.wire import Raw, Unanswered, Wire
from tests.waiting import until

A, B = (work_consumer(f"req.f.normal.{lane}", ack_wait_s=15) for lane in "ab")


class PlayedWire:
    """Remembers what was asked; a test answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []  # (durable, inbox)
        self.handed_back: list[str] = []
        self.receive: Any = None

    def inbox(self) -> str:
        return "_INBOX.x"

    async def listen(self, subject: str, receive: Any, *, queue: str = "") -> Any:
        assert self.receive is None, "one inbox for all"
        self.receive = receive
        return self

    async def close(self) -> None:
        self.receive = None

    async def send(self, subject: str, data: bytes, *, reply: str = "", headers: object = None) -> None:
        if data == b"-NAK":
            self.handed_back.append(subject)
            return
        assert json.loads(data)["no_wait"]
        self.asked.append((subject.rpartition(".")[2], reply))

    def give(self, spec: ConsumerSpec, data: bytes, *, domain: str = "") -> None:
        """A message of a consumer."""
        place = f"{domain}{spec.stream}.{spec.durable}"
        self.receive(Raw(subject=spec.filter_subject, data=data, reply=f"$JS.ACK.{place}.1.7.7.1700000000.0"))

    def say(self, number: int, status: str) -> None:
        """A status to the request of this number."""
        self.receive(Raw(subject=self.asked[number][1], data=b"", headers={"Status": status}))


async def nothing(spec: ConsumerSpec) -> None: ...


def taker(wire: PlayedWire, make: Any = nothing) -> Taker:
    return Taker(cast("Wire", wire), make)


def told(delivery: Delivery | None) -> bytes | None:
    return None if delivery is None else delivery.message.data


async def asking(
    wire: PlayedWire, taking: Taker, *specs: ConsumerSpec
) -> list[asyncio.Task[Delivery | None]]:
    """A take of each, when all that can be asked is."""
    tasks = [asyncio.create_task(taking.take(spec, priority=0)) for spec in specs]
    await until(lambda: len(wire.asked) == len({spec.durable for spec in specs}))
    return tasks


@pytest.mark.parametrize("domain", ["", "hub.ACCOUNT."])
async def test_a_consumer_that_does_not_answer_holds_nobody_elses_take(domain: str) -> None:
    wire = PlayedWire()
    silent, served = await asking(wire, taker(wire), A, B)
    wire.give(B, b"b", domain=domain)
    assert told(await asyncio.wait_for(served, 5)) == b"b"
    assert not silent.done()
    wire.give(A, b"a", domain=domain)
    assert told(await asyncio.wait_for(silent, 5)) == b"a"


async def test_a_status_is_for_the_request_that_it_names() -> None:
    wire = PlayedWire()
    first, second = await asking(wire, taker(wire), A, B)
    wire.say(1, "404")
    assert await asyncio.wait_for(second, 5) is None
    assert not first.done()
    wire.say(0, "408")
    assert await asyncio.wait_for(first, 5) is None
    wire.say(0, "404")  # once more, to nobody


async def test_one_consumer_is_asked_once_at_a_time() -> None:
    wire = PlayedWire()
    first, second = await asking(wire, taker(wire), A, A)
    wire.give(A, b"1")
    assert told(await asyncio.wait_for(first, 5)) == b"1"
    await until(lambda: len(wire.asked) == 2)
    wire.say(1, "404")
    assert await asyncio.wait_for(second, 5) is None


async def test_what_comes_too_late_is_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(take, "_ANSWER_S", 0.01)
    wire = PlayedWire()
    taking = taker(wire)
    with pytest.raises(Unanswered, match="not answered"):
        await taking.take(A, priority=0)
    wire.give(A, b"late")
    assert told(await taking.take(B, priority=0)) == b"late"
    assert len(wire.asked) == 1
    wire.give(A, b"later")
    await taking.close()
    assert len(wire.handed_back) == 1


async def test_what_came_to_one_that_left_is_not_lost() -> None:
    wire = PlayedWire()
    taking = taker(wire)
    (left,) = await asking(wire, taking, A)
    wire.give(A, b"x")
    left.cancel()  # before it ran again
    with pytest.raises(asyncio.CancelledError):
        await left
    assert told(await taking.take(B, priority=0)) == b"x"


async def test_a_consumer_that_is_not_there_is_made_and_asked_again_and_a_refusal_is_told() -> None:
    wire, made = PlayedWire(), []

    async def make(spec: ConsumerSpec) -> None:
        made.append(spec)

    (task,) = await asking(wire, taker(wire, make), A)
    wire.say(0, "503")
    await until(lambda: len(wire.asked) == 2)
    assert made == [A]
    wire.say(1, "500")
    with pytest.raises(Unavailable, match="500"):
        await asyncio.wait_for(task, 5)
