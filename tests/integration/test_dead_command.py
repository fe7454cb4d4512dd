"""`burstline dead` against a real server."""

from __future__ import annotations

import asyncio

import pytest

from services import dead_command
from shared.protocol import codec, subjects
from shared.transport.nats import connect
from tests.integration.test_administration import run
from tests.unit.services.gpu_worker.rig import make_request
from tests.unit.services.gpu_worker.scripted import FINGERPRINT


async def _bury(url: str, *names: str) -> list[int]:
    transport = await connect(url, name="test")
    await transport.ensure_stream(subjects.DEAD)
    places = []
    for name in names:
        stored = await transport.append(
            subjects.dead(FINGERPRINT),
            codec.encode(make_request(name)),
            headers={subjects.DEAD_REASON: "poison"},
        )
        places.append(stored.sequence)
    await transport.close()
    return places


async def _queued(url: str) -> dict[str, int]:
    transport = await connect(url, name="test")
    try:
        return await transport.waiting(subjects.REQUESTS.name, subjects.queued(FINGERPRINT))
    finally:
        await transport.close()


def test_letters_are_listed_shown_requeued_and_dropped(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURSTLINE_NATS_URL", nats_url)
    first, second = asyncio.run(_bury(nats_url, "one", "two"))
    listed = run(dead_command.app, "list").splitlines()
    assert [line.split("\t")[:3] for line in listed[1:]] == [
        [str(first), "poison", "one"],
        [str(second), "poison", "two"],
    ]
    shown = run(dead_command.app, "show", str(first))
    assert "max_tokens\t20" in shown
    assert "\nprompt\t" not in shown
    assert run(dead_command.app, "requeue", str(first)) == f"one-re{first}\n"
    lane = subjects.request_shared(FINGERPRINT, "normal", "t")
    assert asyncio.run(_queued(nats_url)) == {lane: 1}
    run(dead_command.app, "drop", str(second))
    assert len(run(dead_command.app, "list").splitlines()) == 1
    assert "no dead letter" in run(dead_command.app, "show", str(second), status=1)
    assert "no message" in run(dead_command.app, "drop", str(second), status=1)
