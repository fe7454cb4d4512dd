"""Callers who go on asking, each in its own way and at its own pace, until they are told to stop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Final

import httpx

from services.chaos.asking import Asked, Caller, End, Way
from services.chaos.cases import Case
from shared.clock import SYSTEM
from shared.errors import BurstlineError

WEIGHTS: Final[Mapping[Way, int]] = {
    Way.STREAM: 4,
    Way.WHOLE: 2,
    Way.KEYED_STREAM: 4,
    Way.KEYED_WHOLE: 2,
    Way.LEAVES: 2,
    Way.LEAVES_WHOLE: 1,
    Way.DEADLINE: 1,
}
PAUSE_S: Final = (0.0, 0.4)
REFUSED_PAUSE_S: Final = 0.5


class QuietLineFails(BurstlineError):
    """A request was not answered though nothing was done to the line."""

    code = "quiet_line_fails"


def now_s() -> float:
    """Monotonic seconds."""
    return SYSTEM.monotonic_ns() / 1e9


def client(key: str) -> httpx.AsyncClient:
    """For all callers of a run."""
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {key}"},
        timeout=httpx.Timeout(120.0, connect=5.0),
        limits=httpx.Limits(max_keepalive_connections=0),  # a dead gateway's connection is not met again
        trust_env=False,
    )


async def references(
    http: httpx.AsyncClient, gateways: Sequence[str], cases: Sequence[Case]
) -> dict[str, tuple[int, ...]]:
    """The undisturbed stream of each case, asked at each gateway in turn, whole or streamed.

    Raises:
        QuietLineFails: one was not answered.
    """
    known: dict[str, tuple[int, ...]] = {}
    for place, case in enumerate(cases):
        caller = Caller(http, [gateways[place % len(gateways)]], random.Random(place), now_s)
        asked = await caller.ask(case, Way.WHOLE if place % 3 else Way.STREAM)
        if asked.end is not End.WHOLE or len(asked.tokens) != case.max_tokens:
            raise QuietLineFails(
                f"{case.name} ended as {asked.end} ({asked.status} {asked.code}) with {len(asked.tokens)} tokens"
            )
        known[case.name] = tuple(asked.tokens)
    return known


class Load:
    """`callers` at once; `stop` lets each finish what it asks."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        gateways: Sequence[str],
        cases: Sequence[Case],
        *,
        seed: int,
        callers: int,
    ) -> None:
        self.asked: list[Asked] = []
        self._http = http
        self._gateways = gateways
        self._cases = cases
        self._seed = seed
        self._callers = callers
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Ask nothing more."""
        self._stopping.set()

    async def run(self) -> None:
        """Until `stop`, and then until every caller has its end."""
        await asyncio.gather(*(self._go_on(number) for number in range(self._callers)))

    async def _go_on(self, number: int) -> None:
        draw = random.Random(f"caller {number} of {self._seed}")
        caller = Caller(self._http, self._gateways, draw, now_s)
        ways, weights = list(WEIGHTS), list(WEIGHTS.values())
        while not self._stopping.is_set():
            asked = await caller.ask(draw.choice(self._cases), draw.choices(ways, weights)[0])
            self.asked.append(asked)
            pause_s = REFUSED_PAUSE_S if asked.end is End.REFUSED else draw.uniform(*PAUSE_S)
            await asyncio.sleep(pause_s)
