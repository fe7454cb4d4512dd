"""A proxy before NATS that the services connect through: it can cut every connection, and slow them all down."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from services.embedded.ports import LOOPBACK

CHUNK_BYTES: Final = 64 << 10


class Front:
    """Belongs to one event loop; `open` binds, `close` ends all."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        """Before each piece that passes, in either direction."""
        self._target_port = 0
        self._server: asyncio.Server | None = None
        self._pairs: set[asyncio.Task[None]] = set()

    async def open(self, nats_url: str) -> str:
        """Stand before the server at `nats_url`; the URL to tell the services."""
        parts = urlsplit(nats_url)
        self._target_port = parts.port or 4222
        self._server = await asyncio.start_server(self._meet, LOOPBACK, 0)
        port = self._server.sockets[0].getsockname()[1]
        user = parts.netloc.rpartition("@")[0]
        return urlunsplit(
            parts._replace(netloc=f"{user}@{LOOPBACK}:{port}" if user else f"{LOOPBACK}:{port}")
        )

    def cut(self) -> int:
        """Break every connection; new ones are taken at once. Returns how many there were."""
        pairs = list(self._pairs)
        for pair in pairs:
            pair.cancel()
        return len(pairs)

    async def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()
        await asyncio.gather(*self._pairs, return_exceptions=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._join(reader, writer))
        self._pairs.add(task)
        task.add_done_callback(self._pairs.discard)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            there, back = await asyncio.open_connection(LOOPBACK, self._target_port)
            writers.append(back)
            ways = [
                asyncio.ensure_future(self._pass(reader, back)),
                asyncio.ensure_future(self._pass(there, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            return  # the server is away: the caller's connection ends, and it tries again
        finally:
            for one in writers:
                with contextlib.suppress(OSError):
                    one.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
