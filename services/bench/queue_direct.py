"""The instant engine served directly: one process with FastAPI and uvicorn, a caller's request in and events out.

What any server costs a caller: the write, the reading and checking of HTTP and JSON, events, the caller's read. `bench queue`
subtracts it from the same caller's time through the line, and LiteLLM's proxy stands before it. It has no keys, renders
no prompt and stores nothing. An event a burst of `DIGITS` tokens, as the line tells them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from services.bench.queue_client import CHAT, Connection
from services.bench.queue_engine import DIGITS
from services.embedded.ports import LOOPBACK, free_port
from shared.errors import BurstlineError, Unavailable

MODEL: Final = "instant"
START_S: Final = 60.0
STOP_S: Final = 10.0


class Turn(BaseModel):
    """One message."""

    role: Literal["system", "user", "assistant"]
    content: str


class Asked(BaseModel):
    """What is read of a request."""

    model: str
    messages: list[Turn]
    max_tokens: int = 1
    stream: Literal[True]


app = FastAPI()


@app.post(CHAT)
async def chat(asked: Asked) -> StreamingResponse:
    """A stream of `max_tokens` letters."""
    return StreamingResponse(events(asked.max_tokens), media_type="text/event-stream")


async def events(tokens: int) -> AsyncIterator[bytes]:
    """The events of a stream, one for each burst and one for the end."""
    for at in range(0, tokens, DIGITS):
        delta = {"content": "a" * min(DIGITS, tokens - at)}
        yield _event({"role": "assistant"} | delta if at == 0 else delta, None)
    yield _event({}, "length")
    yield b"data: [DONE]\n\n"


def _event(delta: dict[str, str], finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    told = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return b"data: " + json.dumps(told | {"choices": [choice]}).encode() + b"\n\n"


def body(tokens: int) -> dict[str, Any]:
    """What the server is asked, and LiteLLM's proxy before it."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": tokens,
        "stream": True,
    }


@asynccontextmanager
async def direct(folder: Path) -> AsyncIterator[str]:
    """The server's URL while the block runs; its log is in `folder`. Raises Unavailable, and TimeoutError."""
    port = free_port()
    with (folder / "direct.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "services.bench.queue_direct", str(port), stdout=log, stderr=log
        )
    try:
        url = f"http://{LOOPBACK}:{port}"
        await up(url, "", process, START_S)
        yield url
    finally:
        await end(process)


async def up(url: str, key: str, process: asyncio.subprocess.Process, limit_s: float) -> None:
    """Wait until a server streams. Raises Unavailable when its process ends, and TimeoutError."""
    async with asyncio.timeout(limit_s):
        while process.returncode is None:
            try:
                async with Connection(url, key) as connection:
                    (await connection.stream(body(1))).first_text_ms()
                    return
            except (OSError, ValueError, BurstlineError):
                await asyncio.sleep(0.5)
    raise Unavailable(f"a server ended while starting ({process.returncode})")


async def end(process: asyncio.subprocess.Process) -> None:
    """Terminate it, and kill it when that takes too long."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


if __name__ == "__main__":
    uvicorn.run(app, host=LOOPBACK, port=int(sys.argv[1]), log_level="warning", access_log=False)
