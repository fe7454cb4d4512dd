"""The stack of a run: two gateways, three workers, two brokers, a tiny random model, a proxy before NATS.

The supervisor belongs to the main thread, which spawns; callers, proxy and journal readers belong to the event loop of
another, which goes on while the main thread waits for a server to start.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from services.chaos.cases import MODEL, VOCAB
from services.chaos.schedule import ACK_WAIT_S
from services.embedded.sizes import Sizes
from services.gpu_worker.engine.config import FULL, LINEAR
from services.gpu_worker.engine.models.random import TINY, write_random_model
from shared.config import POCKET

T = TypeVar("T")

SIZES: Final = Sizes(gateways=2, workers=3, brokers=2)
MODEL_SEED: Final = 7
TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="callers", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Do it there and wait for the result. Raises what it raises, and TimeoutError."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def begin(self, work: Coroutine[Any, Any, T]) -> Callable[[float], T]:
        """Start it there; the answer waits for its result, at most so many seconds."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result

    def call(self, function: Callable[[], object]) -> None:
        """Have it called there soon."""
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """End the loop. Idempotent."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)


def write_model(folder: Path) -> Path:
    """One layer of each kind with random weights, and the pocket model's tokenizer."""
    dims = replace(TINY, layer_types=(LINEAR, FULL), vocab=VOCAB)
    write_random_model(folder, dims, seed=MODEL_SEED)
    for name in TOKENIZER:
        shutil.copy(POCKET / name, folder / name)
    return folder


def settle_environment(model: Path, data_dir: Path) -> None:
    """What the services of this run are told, in this process's environment, which they inherit.

    Innocent requests are hit by several kills, so that none may count as poison soon; a worker that starts on two busy
    cores may take a minute, so that no request may be given up for it.
    """
    for name in [name for name in os.environ if name.startswith("BURSTLINE_")]:
        del os.environ[name]
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "BURSTLINE_DATA_DIR": str(data_dir),
        "BURSTLINE_LOG_LEVEL": "warning",
        "BURSTLINE_WORKER_MODEL_FOLDER": str(model),
        "BURSTLINE_WORKER_MODEL_NAME": MODEL,
        "BURSTLINE_WORKER_ACK_WAIT_S": f"{ACK_WAIT_S:g}",
        "BURSTLINE_WORKER_HEARTBEAT_S": "1",
        "BURSTLINE_WORKER_MAX_ATTEMPTS": "50",
        "BURSTLINE_WORKER_NUM_BLOCKS": "256",
        "BURSTLINE_GATEWAY_MODELS": f"{MODEL}={model}",
        "BURSTLINE_GATEWAY_ORPHAN_GRACE_S": "180",
        "BURSTLINE_GATEWAY_QUEUE_DEADLINE_S": "180",
        "BURSTLINE_GATEWAY_NO_WORKER_GRACE_S": "60",
        "BURSTLINE_BROKER_JOURNAL_GRACE_S": "86400",
        "BURSTLINE_EMBEDDED_GATEWAY_PORT": "0",
        "BURSTLINE_EMBEDDED_DURABLE": "false",
        "BURSTLINE_EMBEDDED_RESTART_LIMIT": "1000",
        "BURSTLINE_EMBEDDED_RESTART_BACKOFF_S": "0.1",
        "BURSTLINE_EMBEDDED_RESTART_BACKOFF_LIMIT_S": "0.5",
    }
