"""No storm of reconnects: waits double, are bounded and scattered, and the server that failed least is tried."""

from __future__ import annotations

import pytest
from nats.aio.client import Server

from shared.transport.nats import _LONGEST_BACKOFF_S, _next_server


def _server(reconnects: int) -> Server:
    server = Server(uri=None)
    server.reconnects = reconnects
    return server


@pytest.mark.parametrize("failed", [0, 1, 2, 5, 9, 1000])
def test_waits_grow_are_bounded_and_scattered(failed: int) -> None:
    waits = [_next_server([_server(failed)], {})[1] for _ in range(200)]
    assert min(waits) >= 0.5 * min(0.05 * 2 ** min(failed, 10), _LONGEST_BACKOFF_S)
    assert max(waits) <= 1.5 * _LONGEST_BACKOFF_S
    assert max(waits) > 1.5 * min(waits), "a hundred workers do not come back at once"


def test_the_server_that_failed_least_is_tried() -> None:
    servers = [_server(4), _server(1), _server(2)]
    assert _next_server(servers, {})[0] is servers[1]
