"""LiteLLM's proxy before the server that `queue_direct` starts: what the queue is compared with.

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
from typing import Final

from services.bench.queue_direct import MODEL, end, up
from services.embedded.ports import LOOPBACK, free_port
from shared.errors import Unavailable

START_S: Final = 240.0


@asynccontextmanager
async def proxy(environment: Path, folder: Path, backend: str) -> AsyncIterator[tuple[str, str]]:
    """The proxy's URL and a key while the block runs. `environment` is a virtual environment that has litellm[proxy],
    `backend` the URL of the server that it stands before.

    Raises:
        Unavailable: it is not there, or does not come up.
    """
    command = environment / "bin" / "litellm"
    if not command.exists():
        raise Unavailable(f"{command} is not there")
    settings = {
        "model_list": [
            {
                "model_name": MODEL,
                "litellm_params": {
                    "model": f"openai/{MODEL}",
                    "api_base": f"{backend}/v1",
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
        await up(url, key, process, START_S)
        yield url, key
    finally:
        await end(process)
