"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.services.gateway.line import Line, running_line


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    """A gateway with a broker that knows two keys and a worker that says hello."""
    async with running_line() as found:
        yield found
