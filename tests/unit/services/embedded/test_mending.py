"""A queue that stores nothing any more is ended once, when its disk has room, and told of once."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.embedded.mending import LOOK_S, Mender
from shared.clock import ManualClock


@dataclass
class _Store:
    fault: str | None = None
    room: bool = False
    ends: int = 0
    looks: int = 0
    said: list[str] = field(default_factory=list)

    def store_fault(self) -> str | None:
        self.looks += 1
        return self.fault

    def has_room(self) -> bool:
        return self.room

    def end(self) -> None:
        self.ends += 1
        self.fault = None


def test_fr_101_it_is_ended_when_there_is_room_and_not_before() -> None:
    clock, store = ManualClock(), _Store(fault="write error: no space left on device")
    mender = Mender(store, store.said.append, clock)
    for _ in range(4):
        mender.tick()
        clock.advance(LOOK_S)
    assert store.ends == 0
    assert len(store.said) == 1
    assert "no space left" in store.said[0]
    store.room = True
    for _ in range(3):
        mender.tick()
        clock.advance(LOOK_S)
    assert store.ends == 1


def test_a_second_fault_is_told_again() -> None:
    clock, store = ManualClock(), _Store(fault="write error", room=True)
    mender = Mender(store, store.said.append, clock)
    mender.tick()
    clock.advance(LOOK_S)
    mender.tick()
    store.fault = "write error"
    clock.advance(LOOK_S)
    mender.tick()
    assert (store.ends, len(store.said)) == (2, 2)


def test_looks_are_few_and_a_healthy_server_is_left_alone() -> None:
    clock, store = ManualClock(), _Store(room=True)
    mender = Mender(store, store.said.append, clock)
    for _ in range(50):
        mender.tick()
        clock.advance(LOOK_S / 10)
    assert store.looks == 5
    assert (store.ends, store.said) == (0, [])
