"""A stream as it is opened: a drafter that the worker has not is told, once, and changes no token."""

from __future__ import annotations

import pytest

from services.gpu_worker.engine.events import DrafterOff, DrafterOffReason
from services.gpu_worker.engine.requests import DrafterKind
from tests.engine_kit import Driver, build, prompt, request, tiny_model


@pytest.mark.parametrize(("drafter", "with_mtp"), [("block", True), ("mtp", False)])
def test_a_drafter_that_is_not_here_is_told_and_the_stream_is_plain(
    drafter: DrafterKind, with_mtp: bool
) -> None:
    model = tiny_model(with_mtp=with_mtp)
    asked = request(prompt(70), drafter=drafter, speculation_k=3)
    driver = Driver(build(model=model))
    outcome = driver.run([asked])[asked.key]
    told = [event for event in driver.events if isinstance(event, DrafterOff)]
    assert [(event.drafter, event.reason) for event in told] == [(drafter, DrafterOffReason.ABSENT)]
    assert outcome.end.telemetry.drafted == 0
    plain = request(prompt(70), drafter="none", speculation_k=0)
    assert outcome.tokens == Driver(build(model=model)).run([plain])[plain.key].tokens


def test_a_drafter_that_was_not_asked_for_is_not_missed() -> None:
    driver = Driver(build(model=tiny_model(with_mtp=False)))
    driver.run(
        [
            request(prompt(70), "auto", drafter="auto", speculation_k=3),
            request(prompt(70), "plain", speculation_k=0),
        ]
    )
    assert not [
        event
        for event in driver.events
        if isinstance(event, DrafterOff) and event.reason is DrafterOffReason.ABSENT
    ]
