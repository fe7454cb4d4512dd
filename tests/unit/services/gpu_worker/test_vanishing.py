"""A caller vanishes in each phase that a request has at a worker. It ends once, within one step, by one cancellation, and
whatever it held goes back; one that vanishes when all is said changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from shared.protocol import chain, codec, subjects
from shared.protocol.messages import Frame, Lease, Message, Release, Reserve, Started, Terminal, pack_tokens
from tests.unit.services.gpu_worker.rig import PROMPT, SEED, Running, World, make_request, until, world
from tests.unit.services.gpu_worker.scripted import stream

KEY = chain.chain(chain.root(make_request().namespace), PROMPT)[-1]
TOKENS = 1000
HELD: dict[str, type[Message]] = {"looked_up": Lease, "publishing": Reserve}
"""Phases in which a call to the broker is under way."""
BUDGETS = {"restoring": 0, "priming": 1, "first_burst": 2, "later_burst": 5}
"""Steps of the engine until it holds."""


@dataclass
class Scene:
    """A request in its phase."""

    here: World
    running: Running
    held: asyncio.Event


def _journalled(here: World, kind: type[Message]) -> int:
    stored = here.server.streams[subjects.JOURNAL.name].read(subjects.tokens("r1"), 0, 1000)
    return sum(isinstance(codec.decode(one.data), kind) for one in stored)


async def _arrive(here: World, phase: str) -> Scene:
    """Until the request is in the phase, and stays there."""
    held = asyncio.Event()
    if phase in HELD:
        here.broker.holding[HELD[phase]] = held
    budget = BUDGETS.get(phase)
    running = await here.worker(budget=budget, settings={"broker_timeout_s": 30.0, "publish_wait_s": 30.0})
    if phase in ("looked_up", "restoring"):
        running.engine.entries[KEY] = 192  # something to lease, and to restore
    tokens = 20 if phase == "publishing" else TOKENS
    prompt = PROMPT + ((7, 8, 9) if phase in ("looked_up", "restoring") else ())
    await here.enqueue(make_request(clock=here.clock, max_tokens=tokens, prompt=pack_tokens(prompt)))
    reached: dict[str, Callable[[], bool]] = {
        "looked_up": lambda: bool(here.broker.asked(Lease)),
        "restoring": lambda: bool(running.engine.runs),
        "priming": lambda: running.engine.budget == 0,
        "first_burst": lambda: _journalled(here, Frame) >= 1,
        "later_burst": lambda: running.engine.budget == 0 and _journalled(here, Frame) >= 1,
        "publishing": lambda: bool(here.broker.asked(Reserve)) and not running.engine.runs,
    }
    await until(reached[phase])
    return Scene(here, running, held)


async def _after(scene: Scene, do: Callable[[], Awaitable[None]]) -> Terminal:
    steps = scene.running.engine.steps
    await do()
    await asyncio.sleep(0)
    scene.held.set()
    terminal = await scene.here.terminal()
    assert scene.running.engine.steps <= steps + 1
    return terminal


@pytest.mark.parametrize("phase", ["looked_up", "restoring", "priming", "first_burst", "later_burst"])
async def test_who_vanishes_in_a_phase_ends_the_request_once_and_gives_everything_back(phase: str) -> None:
    async with world() as here:
        scene = await _arrive(here, phase)
        terminal = await _after(scene, here.cancel)
        assert (terminal.ends[0].finish, terminal.cancel_reason) == ("cancelled", "client_disconnected")
        assert terminal.failure is None
        (tokens,) = await here.tokens()
        assert tokens == stream(
            PROMPT + ((7, 8, 9) if phase in ("looked_up", "restoring") else ()), SEED, len(tokens)
        )
        assert terminal.completion_tokens == len(tokens)
        await _at_rest(scene)


async def test_who_vanishes_while_captures_are_published_changes_nothing_of_what_was_said() -> None:
    async with world() as here:
        scene = await _arrive(here, "publishing")
        terminal = await _after(scene, here.cancel)
        assert terminal.completion_tokens == 20
        assert await here.tokens() == (stream(PROMPT, SEED, 20),)
        await _at_rest(scene)


async def _at_rest(scene: Scene) -> None:
    """C6; and the queue is empty, with one claim at most and one cancellation."""
    here = scene.here
    await until(lambda: scene.running.engine.at_baseline and here.waiting_items() == 0)
    await until(lambda: scene.running.worker.room.taken == 0)
    await until(lambda: len(here.broker.asked(Release)) == len(here.broker.asked(Lease)))
    assert not here.broker.leases
    assert _journalled(here, Started) <= 1
    assert len(await here.transport.read(subjects.CANCELS.name, subjects.cancel("r1"))) == 1
