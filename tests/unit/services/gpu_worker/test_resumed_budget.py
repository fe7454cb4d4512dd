"""FR-111: a worker is killed in the middle of a request. The next one says the rest, on a real engine: the whole request has
its budget and no more, and its random numbers, penalties and stops go on where they were."""

from __future__ import annotations

import msgspec
import pytest

from services.gpu_worker.engine.engine import Engine
from services.gpu_worker.engine.events import Burst, Event
from services.gpu_worker.engine.limits import EngineLimits
from shared.protocol import codec, subjects
from shared.protocol.messages import (
    GenerateRequest,
    NamespaceParts,
    Terminal,
    pack_tokens,
)
from tests.engine_kit import build, prompt
from tests.unit.services.gpu_worker.rig import SAMPLING, World, make_request, world

BUDGET = 100
KILLED_AT = 50

GREEDY = msgspec.structs.replace(SAMPLING, temperature=0.0)
PENALISED = msgspec.structs.replace(
    SAMPLING, temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
)


class _Held:
    """An engine that goes no further once a choice has said so many tokens, as one whose process is about to be killed."""

    def __init__(self, engine: Engine, at: int) -> None:
        self._engine = engine
        self._at = at
        self._said: dict[int, int] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def step(self) -> list[Event]:
        if max(self._said.values(), default=0) >= self._at:
            return []
        events = self._engine.step()
        for event in events:
            if isinstance(event, Burst):
                self._said[event.choice] = event.offset + len(event.tokens)
        return events


def _engine() -> Engine:
    return build(limits=EngineLimits(burst_rounds=2))


def _request(here: World, engine: Engine, **changes: object) -> GenerateRequest:
    return make_request(
        clock=here.clock,
        namespace=NamespaceParts(fingerprint=engine.fingerprint, adapter_digest="", tenant="t", salt=""),
        prompt=pack_tokens(prompt(90, 1)),
        **({"max_tokens": BUDGET} | changes),
    )


async def _enqueue(here: World, request: GenerateRequest) -> None:
    subject = subjects.request_shared(request.namespace.fingerprint, request.priority, request.tenant)
    await here.transport.append(subject, codec.encode(request))


async def _undisturbed(**changes: object) -> tuple[tuple[tuple[int, ...], ...], Terminal]:
    async with world() as here:
        engine = _engine()
        request = _request(here, engine, **changes)
        await here.worker(real=engine)
        await _enqueue(here, request)
        terminal = await here.terminal()
        return await here.tokens(choices=request.choices), terminal


CASES: dict[str, dict[str, object]] = {
    "greedy": {"sampling": GREEDY},
    "seeded": {},
    "penalised": {"sampling": PENALISED},
    "two_choices": {"choices": 2},
}


@pytest.mark.parametrize("case", CASES)
async def test_fr_111_a_resumed_request_says_its_whole_budget_and_no_more(case: str) -> None:
    changes = CASES[case]
    expected, undisturbed = await _undisturbed(**changes)
    async with world() as here:
        engine = _engine()
        request = _request(here, engine, **changes)
        first = await here.worker("w1", real=_Held(engine, KILLED_AT))  # type: ignore[arg-type]
        await _enqueue(here, request)
        await here.said(KILLED_AT)
        await first.die()
        await here.worker("w2", real=_engine())
        here.clock.advance(16)
        terminal = await here.terminal()
        assert (terminal.attempt, terminal.worker_id, terminal.exact) == (2, "w2", True)
        assert await here.tokens(choices=request.choices) == expected
        assert [end.completion_tokens for end in terminal.ends] == [
            end.completion_tokens for end in undisturbed.ends
        ]
        assert terminal.completion_tokens <= BUDGET * request.choices
        assert {end.finish for end in terminal.ends} == {"length"}


async def test_fr_111_a_stop_that_comes_after_the_kill_still_ends_the_stream() -> None:
    (said,), _ = await _undisturbed(sampling=GREEDY)
    place = next(place for place in range(KILLED_AT + 8, BUDGET) if said[place] not in said[:place])
    changes: dict[str, object] = {"sampling": GREEDY, "stop_ids": (said[place],)}
    async with world() as here:
        engine = _engine()
        first = await here.worker("w1", real=_Held(engine, KILLED_AT))  # type: ignore[arg-type]
        await _enqueue(here, _request(here, engine, **changes))
        await here.said(KILLED_AT)
        await first.die()
        await here.worker("w2", real=_engine())
        here.clock.advance(16)
        terminal = await here.terminal()
        assert await here.tokens() == (said[:place],)
        assert (terminal.ends[0].finish, terminal.ends[0].completion_tokens) == ("stop", place + 1)
