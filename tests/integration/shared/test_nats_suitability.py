"""The start-up test of the NATS server, on real ones (FR-100)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.embedded.nats import NatsServer
from shared.errors import Unavailable
from shared.protocol.subjects import REQUESTS
from shared.transport.access import Access
from shared.transport.jetstream import call
from shared.transport.nats import NatsWire, connect


class WithoutJetStream(NatsServer):
    """A server as a plain `nats-server` starts."""

    def _configuration(self, port: int, name: str) -> str:
        values = json.loads(super()._configuration(port, name))
        del values["jetstream"]
        return json.dumps(values)


async def test_fr_100_the_pinned_server_passes_and_is_left_as_it_was(nats_url: str) -> None:
    transport = await connect(nats_url, name="suitable")
    await transport.ensure_stream(REQUESTS)
    await transport.close()
    wire = NatsWire("look")
    await wire.open(nats_url, Access(), 10.0)
    assert (await call(wire, "STREAM.NAMES", {}))["streams"] == [REQUESTS.name]
    await wire.close()


async def test_fr_100_a_server_without_jetstream_is_named_so(tmp_path: Path) -> None:
    with WithoutJetStream(tmp_path / "nats") as server:
        transport = await connect(server.url, name="unsuitable")
        with pytest.raises(Unavailable, match="has no JetStream") as raised:
            await transport.ensure_stream(REQUESTS)
        await transport.close()
    assert raised.value.code == "nats_unsuitable"
