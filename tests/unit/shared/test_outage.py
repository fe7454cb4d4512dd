"""Two lines an outage, however often it is met."""

from __future__ import annotations

import logging

import pytest

from shared.clock import ManualClock
from shared.outage import Outage

LOG = logging.getLogger("tests.outage")


def test_an_outage_is_told_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOG.name)
    clock = ManualClock()
    outage = Outage(LOG, "heartbeats", clock=clock)
    outage.worked()
    for _ in range(2):
        for _ in range(5):
            outage.failed("unavailable")
            clock.advance(2)
        outage.worked()
        outage.worked()
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert (
        told
        == [
            ("WARNING", "heartbeats fail (unavailable); told once until they work again"),
            ("INFO", "heartbeats work again after 10 s and 5 failures"),
        ]
        * 2
    )
