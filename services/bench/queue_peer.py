"""LiteLLM's proxy before an OpenAI-style server that answers at once: what the queue is compared with.

LiteLLM is no dependency: its command is looked for in a virtual environment that the caller names.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from services.bench.queue_client import Connection
from services.embedded.ports import LOOPBACK, free_port
from shared.errors import BurstlineError, Unavailable

MODEL: Final = "instant"
START_S: Final = 240.0
STOP_S: Final = 10.0


def _events(words: int) -> bytes:
    """A whole stream in one chunk of the transfer."""
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    rows = []
    for place in range(words):
        delta: dict[str, Any] = {"role": "assistant", "content": "a"} if place == 0 else {"content": "a"}
        rows.append(base | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    rows.append(base | {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    data = b"".join(b"data: " + json.dumps(row).encode() + b"\n\n" for row in rows) + b"data: [DONE]\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n0\r\n\r\n"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Requests of one connection, one after another."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    try:
        while True:
            asked = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(asked.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if not length:  # it looks round at its start, and need find nothing
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                continue
            words = int(json.loads(await reader.readexactly(length)).get("max_tokens", 1))
            writer.write(head + _events(words))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


@asynccontextmanager
async def proxy(environment: Path, folder: Path) -> AsyncIterator[tuple[str, str]]:
    """The proxy's URL and a key while the block runs. `environment` is a virtual environment that has litellm[proxy].

    Raises:
        Unavailable: it is not there, or does not come up.
    """
    command = environment / "bin" / "litellm"
    if not command.exists():
        raise Unavailable(f"{command} is not there")
    server = await asyncio.start_server(_answer, LOOPBACK, 0)
    backend = server.sockets[0].getsockname()[1]
    settings = {
        "model_list": [
            {
                "model_name": MODEL,
                "litellm_params": {
                    "model": f"openai/{MODEL}",
                    "api_base": f"http://{LOOPBACK}:{backend}/v1",
                    "api_key": "none",
                },
            }
        ]
    }
    file, port = folder / "litellm.yaml", free_port()
    file.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    key = f"sk-{secrets.token_hex(16)}"  # it refuses to start without one
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("BURSTLINE_")}
    with (folder / "litellm.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(command), "--config", str(file), "--host", LOOPBACK, "--port", str(port), "--num_workers", "1",
            "--telemetry", "False", stdout=log, stderr=log, env=inherited | {"LITELLM_MASTER_KEY": key},
        )  # fmt: skip
    try:
        url = f"http://{LOOPBACK}:{port}"
        await _up(url, key, process)
        yield url, key
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        server.close()


async def _up(url: str, key: str, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_S):
        while process.returncode is None:
            try:
                async with Connection(url, key) as connection:
                    (await connection.stream(body(1))).first_text_ms()
                    return
            except (OSError, ValueError, BurstlineError):
                await asyncio.sleep(0.5)
    raise Unavailable(f"LiteLLM's proxy ended while starting ({process.returncode})")


def body(tokens: int) -> dict[str, Any]:
    """What the proxy is asked."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": tokens,
        "stream": True,
    }
