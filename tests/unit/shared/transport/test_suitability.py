"""Servers that must not be used are refused in words (FR-100)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.transport.base import Headers
from shared.transport.suitability import Unsuitable, check
from shared.transport.wire import NobodyListens, Raw

FULL = {"error": {"code": 503, "err_code": 10077, "description": "maximum messages exceeded"}}


class Server:
    """A wire to a server that acknowledges `acknowledges` messages and keeps `keeps` of them."""

    def __init__(self, *, version: str = "2.12.1", acknowledges: int = 4, keeps: int = 4) -> None:
        self.server_version = version
        self.jetstream = True
        self.streams: set[str] = set()
        self._acknowledges = acknowledges
        self._keeps = keeps
        self._received = 0

    async def ask(self, subject: str, data: bytes, *, timeout: float, headers: Headers | None = None) -> Raw:
        if not self.jetstream:
            raise NobodyListens(subject)
        return Raw(subject="inbox", data=json.dumps(self._answer(subject)).encode())

    def _answer(self, subject: str) -> dict[str, Any]:
        operation, _, name = subject.removeprefix("$JS.API.").rpartition(".")
        match operation:
            case "STREAM.CREATE":
                self.streams.add(name)
            case "STREAM.DELETE":
                self.streams.remove(name)
            case "STREAM.INFO":
                return {"state": {"messages": self._keeps}}
            case "burstline.test":
                self._received += 1
                return {"seq": self._received} if self._received <= self._acknowledges else FULL
        return {}


async def test_fr_100_a_server_that_keeps_what_it_acknowledges_passes_and_nothing_is_left_there() -> None:
    server = Server()
    await check(server)  # type: ignore[arg-type]
    assert server.streams == set()


@pytest.mark.parametrize(("acknowledges", "keeps"), [(12, 4), (5, 4), (4, 3)])
async def test_fr_100_a_server_that_loses_messages_is_refused(acknowledges: int, keeps: int) -> None:
    server = Server(acknowledges=acknowledges, keeps=keeps)
    with pytest.raises(Unsuitable, match="would lose requests"):
        await check(server)  # type: ignore[arg-type]
    assert server.streams == set()


@pytest.mark.parametrize("version", ["2.10.29", "1.9.0", "", "nonsense"])
async def test_fr_100_an_old_server_is_refused_with_both_versions(version: str) -> None:
    with pytest.raises(Unsuitable, match=r"2\.11 or newer"):
        await check(Server(version=version))  # type: ignore[arg-type]


async def test_fr_100_a_server_without_jetstream_is_refused_with_what_to_do() -> None:
    server = Server()
    server.jetstream = False
    with pytest.raises(Unsuitable, match="-js") as raised:
        await check(server)  # type: ignore[arg-type]
    assert raised.value.code == "nats_unsuitable"
