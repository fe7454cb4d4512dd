"""TLS to NATS and to Postgres, with certificates made here: who is trusted gets through, and who is not is told."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from services.cache_broker.config import BrokerSettings
from services.cache_broker.database import Database
from services.embedded.nats import binary
from services.embedded.ports import free_port, greeting
from shared.config import CommonSettings, load
from shared.errors import Unavailable
from shared.transport.access import Access
from shared.transport.nats import connect
from tests.integration.cache_broker.test_database import statement
from tests.waiting import until

_SSL_REQUEST = (8).to_bytes(4, "big") + (80877103).to_bytes(4, "big")

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="no openssl here to make certificates"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of localhost that signs itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return certificate, key


@pytest.fixture
async def secure_nats(pair: tuple[Path, Path], tmp_path: Path) -> AsyncIterator[int]:
    """The port of a server that speaks TLS alone and wants a client's certificate too."""
    certificate, key = map(str, pair)
    port, configuration = free_port(), tmp_path / "nats.conf"
    tls = {"cert_file": certificate, "key_file": key, "ca_file": certificate, "verify": True}
    configuration.write_text(json.dumps({"host": "127.0.0.1", "port": port, "tls": tls}))
    server = await asyncio.create_subprocess_exec(
        binary(), "-c", configuration, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await until(lambda: bool(greeting(port)))
        yield port
    finally:
        server.terminate()
        await server.wait()


def access(monkeypatch: pytest.MonkeyPatch, **files: Path) -> Access:
    for name, file in files.items():
        monkeypatch.setenv(f"BURSTLINE_NATS_TLS_{name.upper()}_FILE", str(file))
    return Access.of(load(CommonSettings))


@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_nats_is_reached_by_its_authority_and_our_certificate(
    monkeypatch: pytest.MonkeyPatch, secure_nats: int, pair: tuple[Path, Path], scheme: str
) -> None:
    certificate, key = pair
    known = access(monkeypatch, ca=certificate, cert=certificate, key=key)
    transport = await connect(f"{scheme}://127.0.0.1:{secure_nats}", name="tls", access=known)
    assert await transport.ready()
    await transport.close()


async def test_a_nats_that_nobody_vouches_for_is_refused_with_the_reason(secure_nats: int) -> None:
    with pytest.raises(Unavailable, match="certificate verify failed"):
        await connect(f"tls://127.0.0.1:{secure_nats}", name="tls", timeout=2)


@pytest.fixture
async def secure_database(pair: tuple[Path, Path], database_url: str) -> AsyncIterator[str]:
    """A database behind TLS: a front that takes nothing else, since the server that comes with us is built without it."""
    parts = urlsplit(database_url)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*pair)
    async with _front(parts.port or 0, context) as port:
        yield database_url.replace(f":{parts.port}/", f":{port}/")


@asynccontextmanager
async def _front(behind: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            if await reader.readexactly(8) != _SSL_REQUEST:
                return
            writer.write(b"S")
            await writer.start_tls(context)
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", behind)
            await asyncio.gather(_pass(reader, far_writer), _pass(far_reader, writer))
        except (OSError, asyncio.IncompleteReadError):
            pass  # the caller did not trust us, or went
        finally:
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Database]:
    database = Database(url, BrokerSettings())
    try:
        yield database
    finally:
        await database.close()


@pytest.mark.parametrize("mode", ["require", "verify-full"])
async def test_postgres_is_reached_over_tls_by_libpqs_words(
    secure_database: str, pair: tuple[Path, Path], mode: str
) -> None:
    async with opened(f"{secure_database}?sslmode={mode}&sslrootcert={pair[0]}") as database:
        assert await database.run(statement("SELECT 2")) == 2
        assert await database.ready()


async def test_a_postgres_that_nobody_vouches_for_is_refused(
    secure_database: str, tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    other = tmp_path / "other.pem"
    other.write_text(ssl.DER_cert_to_PEM_cert(ssl.create_default_context().get_ca_certs(binary_form=True)[0]))
    async with opened(f"{secure_database}?sslmode=verify-full&sslrootcert={other}") as database:
        with pytest.raises(Unavailable, match="TLS"):
            await database.run(statement("SELECT 2"))


async def test_a_postgres_without_tls_is_not_spoken_to_where_tls_is_required(database_url: str) -> None:
    async with opened(f"{database_url}?sslmode=require") as database:
        with pytest.raises(Unavailable):
            await database.run(statement("SELECT 2"))
