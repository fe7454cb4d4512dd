"""A tenant with a thousand queued requests, and another's first: the whole worker on a real engine."""

from __future__ import annotations

import pytest

from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import Burst, Event, Finished
from services.gpu_worker.engine.limits import EngineLimits
from shared.protocol import codec, subjects
from shared.protocol.messages import GenerateRequest, NamespaceParts, Terminal, pack_tokens
from tests.engine_kit import build, prompt
from tests.unit.services.gpu_worker.rig import World, make_request, until, world

QUEUED = 1000
SEATS = 2
BUDGET = 150
"""Completion tokens of a greedy request: some forty bursts, so that waiting for one to end cannot be missed."""


class _Watched:
    """An engine whose steps are kept: the request ids that had a burst in each, and those that ended."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.bursts: list[set[str]] = []
        self.ended: list[str] = []
        self.submitted_at: dict[str, int] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def submit(self, request: object) -> None:
        self._engine.submit(request)  # type: ignore[arg-type]
        self.submitted_at[_name(request.request_id)] = len(self.bursts)  # type: ignore[attr-defined]

    def step(self) -> list[Event]:
        events = self._engine.step()
        self.bursts.append({_name(event.request_id) for event in events if isinstance(event, Burst)})
        self.ended += [_name(event.request_id) for event in events if isinstance(event, Finished)]
        return events

    def wait_of(self, name: str) -> int:
        """Bursts of others alone between its submission and its own first."""
        after = self.bursts[self.submitted_at[name] :]
        return next(place for place, names in enumerate(after) if name in names)


def _name(engine_id: str) -> str:
    return engine_id.partition(".")[0]


def _request(here: World, engine: Engine, tenant: str, number: int, max_tokens: int) -> GenerateRequest:
    return make_request(
        f"{tenant}{number}",
        here.clock,
        tenant=tenant,
        namespace=NamespaceParts(fingerprint=engine.fingerprint, adapter_digest="", tenant=tenant, salt=""),
        prompt=pack_tokens(prompt(20, number)),
        max_tokens=max_tokens,
    )


async def _enqueue(here: World, request: GenerateRequest, own: bool) -> None:
    fingerprint = request.namespace.fingerprint
    subject = subjects.request_shared(fingerprint, request.priority, request.tenant)
    if own:
        subject = subjects.request_to(fingerprint, "w1", request.tenant)
    await here.transport.append(subject, codec.encode(request))


@pytest.mark.parametrize(
    ("greedy_own", "newcomer_own"),
    [(False, False), (True, True), (True, False), (False, True)],
    ids=["all_shared", "all_to_it", "only_the_greedy_to_it", "only_the_newcomer_to_it"],
)
async def test_c2_a_thousand_queued_requests_delay_another_tenants_first_by_one_burst(
    greedy_own: bool, newcomer_own: bool
) -> None:
    async with world() as here:
        engine = build(limits=EngineLimits(burst_rounds=2), max_batch=SEATS)
        watched = _Watched(engine)
        for number in range(QUEUED):
            await _enqueue(here, _request(here, engine, "greedy", number, BUDGET), greedy_own)
        running = await here.worker(real=watched, settings={"max_running": SEATS, "drain_limit_s": 0.0})  # type: ignore[arg-type]
        await until(lambda: len(set().union(*watched.bursts)) == SEATS)
        ended = len(watched.ended)
        first = _request(here, engine, "newcomer", 0, 8)
        await _enqueue(here, first, newcomer_own)
        terminal = await here.terminal("newcomer0")
        assert isinstance(terminal, Terminal)
        assert terminal.completion_tokens == 8
        assert watched.wait_of("newcomer0") <= 1
        assert [name for name in watched.ended[ended:] if name != "newcomer0"] == []
        assert running.worker.room.taken <= SEATS + 1
