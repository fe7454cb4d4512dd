"""One caller's request over HTTP: asked at one gateway, and gone on with at another when the connection breaks.

A caller with a key comes back with it (and with `Last-Event-ID`, if it has heard something) until its stream is whole; one
without a key has lost its answer when its gateway dies, and only the journal knows what became of it.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import httpx

from services.chaos.cases import Case
from shared.clock import SYSTEM

COMPLETIONS: Final = "/v1/completions"
PATIENCE_S: Final = 120.0
RETRY_S: Final = 0.2
DEADLINE_S: Final = 0.5
GOES_ON_ELSEWHERE: Final = "shutting_down"
"""How a gateway that ends tells a caller with a key to go on at another one."""
LEAVES_AFTER_S: Final = (0.02, 0.1, 0.3, 0.8)
"""Patience of a caller who leaves without having heard anything: in every phase that a request has."""
BROKEN: Final = (httpx.TransportError, httpx.StreamError)


class Way(StrEnum):
    """How a caller asks."""

    STREAM = "stream"
    WHOLE = "whole"
    KEYED_STREAM = "keyed-stream"
    KEYED_WHOLE = "keyed-whole"
    LEAVES = "leaves"
    LEAVES_WHOLE = "leaves-whole"
    DEADLINE = "deadline"

    @property
    def streamed(self) -> bool:
        return self not in (Way.WHOLE, Way.KEYED_WHOLE, Way.LEAVES_WHOLE)

    @property
    def keyed(self) -> bool:
        return self in (Way.KEYED_STREAM, Way.KEYED_WHOLE)


class End(StrEnum):
    """What a caller says of its request."""

    WHOLE = "whole"
    LEFT = "left"
    REFUSED = "refused"
    FAILED = "failed"
    BROKEN = "broken"
    GAVE_UP = "gave up"


@dataclass(kw_only=True)
class Asked:
    """One request and how it ended. `code` is the typed error, if there was one; `refusals` counts those that came before
    it was taken, `untyped` those of them that had no code or did not say when to come back. `gateway`: where it was asked last;
    `began_ns`, `broken_ns` by the wall clock: when it was asked there, and when that connection broke."""

    case: Case
    way: Way
    end: End = End.BROKEN
    request_ids: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    status: int = 0
    code: str = ""
    refusals: int = 0
    untyped: int = 0
    returns: int = 0
    last_event: str = ""
    gateway: str = ""
    began_ns: int = 0
    broken_ns: int = 0


class Over(Exception):
    """The request has its end; told in `Asked.end`."""


class Caller:
    """Asks one request at a time, at gateways in turn."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        gateways: Sequence[str],
        draw: random.Random,
        now_s: Callable[[], float],
    ) -> None:
        self._client = client
        self._gateways = gateways
        self._draw = draw
        self._now_s = now_s

    async def ask(self, case: Case, way: Way) -> Asked:
        """Ask until there is an end. Never raises for what the line does."""
        asked = Asked(case=case, way=way)
        key = secrets.token_hex(12) if way.keyed else ""
        patience_s = self._draw.choice(LEAVES_AFTER_S) if way is Way.LEAVES_WHOLE else None
        leave_after = self._draw.choice((0, 0, 1, 3, 8)) if way is Way.LEAVES else None
        place = self._draw.randrange(len(self._gateways))
        until = self._now_s() + PATIENCE_S
        while True:
            asked.gateway, asked.began_ns = self._gateways[place % len(self._gateways)], SYSTEM.wall_ns()
            try:
                async with asyncio.timeout(patience_s):
                    await self._once(asked, asked.gateway, key, leave_after)
            except TimeoutError:
                asked.end = End.LEFT
                return asked
            except Over:
                return asked
            except BROKEN as error:
                asked.end, asked.code = End.BROKEN, type(error).__name__
                asked.broken_ns = SYSTEM.wall_ns()
                if not key and (asked.request_ids or not isinstance(error, httpx.ConnectError)):
                    return asked  # it may run: asking again would be another request
            if self._now_s() > until:
                asked.end = End.GAVE_UP
                return asked
            asked.returns += 1
            place += 1
            await asyncio.sleep(RETRY_S)

    async def _once(self, asked: Asked, gateway: str, key: str, leave_after: int | None) -> None:
        """One connection. Raises Over at an end, an httpx error when it broke."""
        headers = {"Idempotency-Key": key} if key else {}
        if asked.last_event:
            headers["Last-Event-ID"] = asked.last_event
        if asked.way is Way.DEADLINE:
            headers["x-burstline-deadline-s"] = str(DEADLINE_S)
        body = asked.case.body(stream=asked.way.streamed)
        async with self._client.stream("POST", gateway + COMPLETIONS, json=body, headers=headers) as response:
            if not asked.way.streamed or response.status_code != 200:
                await response.aread()
            if identifier := response.headers.get("x-burstline-request-id"):
                asked.request_ids.append(identifier)
            asked.status = response.status_code
            if response.status_code != 200:
                self._refused(asked, response, key)
                return
            if asked.way.streamed:
                await self._read(asked, response, leave_after)
            else:
                _take(asked, response.json())
                asked.end = End.WHOLE
                raise Over
        raise httpx.RemoteProtocolError("the stream ended without its end mark")

    def _refused(self, asked: Asked, response: httpx.Response, key: str) -> None:
        """A typed refusal is an end; but a caller with a key asks again when it may."""
        asked.code = _code(response)
        asked.end = End.FAILED if response.status_code == 504 else End.REFUSED
        if asked.end is End.REFUSED:
            asked.refusals += 1
            again = response.status_code in (429, 503)
            asked.untyped += not (again and asked.code and "retry-after" in response.headers)
            if key and again:
                return
        raise Over

    async def _read(self, asked: Asked, response: httpx.Response, leave_after: int | None) -> None:
        heard = 0
        if leave_after == 0:
            asked.end = End.LEFT
            raise Over
        async for name, data in _events(response):
            if data == "[DONE]":
                asked.end = End.WHOLE
                raise Over
            told = json.loads(data)
            if "error" in told and asked.way.keyed and told["error"].get("code") == GOES_ON_ELSEWHERE:
                raise httpx.RemoteProtocolError("the gateway ends; the request goes on")
            if "error" in told:
                asked.end, asked.code = End.FAILED, str(told["error"].get("code"))
                raise Over
            _take(asked, told)
            asked.last_event = name or asked.last_event
            heard += 1
            if leave_after is not None and heard >= leave_after:
                asked.end = End.LEFT
                raise Over


def _take(asked: Asked, told: dict[str, Any]) -> None:
    for choice in told.get("choices", ()):
        asked.tokens.extend(choice.get("token_ids") or ())


def _code(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """(id, data) of each server-sent event."""
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("id:"):
            name = line.removeprefix("id:").strip()
        elif line.startswith("data:"):
            yield name, line.removeprefix("data:").strip()
        elif not line:
            name = ""
