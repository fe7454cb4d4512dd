"""Where a run computes: chosen once a process, and told to the processes that it starts."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch

from services.prove import device, shards
from services.prove.device import Device, choose, chosen
from services.prove.report import Tally
from services.prove.shards import Shard
from shared.errors import EngineFault


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_chosen", Device())


def test_a_run_computes_on_the_cpu_in_its_own_type_unless_it_is_told_otherwise() -> None:
    assert not chosen().is_card
    placement = chosen().placement()
    assert (placement.device.type, placement.dtype) == ("cpu", torch.float32)


def test_a_type_that_the_device_does_not_know_is_refused() -> None:
    with pytest.raises(EngineFault, match="no such type"):
        Device(dtype="no such type").placement()


class PlayedPool:
    """Begins as a process of the pool would, and does nothing."""

    def __init__(self, workers: int, *, mp_context: Any, initializer: Any, initargs: Any) -> None:
        self._begin = partial(initializer, *initargs)

    def __enter__(self) -> PlayedPool:
        choose(Device())  # as a new process has it
        self._begin()
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, play: object, shard: Shard) -> Future[Tally]:
        done: Future[Tally] = Future()
        done.set_result(Tally())
        return done


def test_a_process_of_a_run_computes_where_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ProcessPoolExecutor", PlayedPool)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("gc.freeze", lambda: None)
    told = Device("cpu", "float32")
    choose(told)
    shards.run([Shard(number=number, of=2, cells=(), everything=False, seed=0) for number in range(2)])
    assert chosen() == told
