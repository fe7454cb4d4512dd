"""`python -m services.bench.queue_worker`: the real worker with an engine that computes nothing, and echoes beside it.

They answer NATS requests, each over a connection of its own in the same process: the yardsticks of `bench queue`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from services.bench import queue_floor
from services.bench.queue_engine import InstantEngine, dims
from services.gpu_worker.app import run
from services.gpu_worker.config import WorkerSettings
from shared.config import CommonSettings, load
from shared.transport.access import Access
from shared.transport.base import Received
from shared.transport.nats import connect

HEXADECIMAL: Final = "0123456789abcdef"


def alphabet(folder: Path) -> tuple[int, ...]:
    """Digit -> the token id of that one character."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tuple(tokenizer.encode(character, add_special_tokens=False).ids[0] for character in HEXADECIMAL)


async def _main() -> None:
    settings, common = load(WorkerSettings), load(CommonSettings)
    folder = settings.model_folder
    vocab = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])

    async def echo(received: Received) -> bytes:
        return received.data

    async with contextlib.AsyncExitStack() as stack:
        bare = await queue_floor.plain(common.nats_url, "bare-echo")
        stack.push_async_callback(bare.close)
        await queue_floor.echo(bare)
        transport = await connect(common.nats_url, name="echo", access=Access.of(common))
        stack.push_async_callback(transport.close)
        answers = await transport.serve(queue_floor.OURS, "echo", echo, concurrency=8)
        stack.push_async_callback(answers.close)
        await run(settings, common, build=lambda: InstantEngine(alphabet(folder), dims(vocab)))


if __name__ == "__main__":
    asyncio.run(_main())
