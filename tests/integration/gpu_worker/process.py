"""A worker as a process of its own, on a small random model, and a client that reads its journal."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import msgspec

from services.gpu_worker import journal
from services.gpu_worker.journal import JournalState
from shared.clock import SYSTEM
from shared.protocol import codec, subjects
from shared.protocol.messages import CachePlan, GenerateRequest, Heartbeat, Sampling, Terminal, pack_tokens
from shared.transport.base import Transport
from tests.unit.services.gpu_worker.rig import make_request

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 120.0
ACK_WAIT_S = 3.0


def environment(nats_url: str, data: Path, model: Path, worker_id: str, **settings: str) -> dict[str, str]:
    """The process's variables; nothing of ours is inherited."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BURSTLINE_")}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "BURSTLINE_NATS_URL": nats_url,
        "BURSTLINE_DATA_DIR": str(data),
        "BURSTLINE_WORKER_MODEL_FOLDER": str(model),
        "BURSTLINE_WORKER_MODEL_NAME": "tiny",
        "BURSTLINE_WORKER_WORKER_ID": worker_id,
        "BURSTLINE_WORKER_NUM_BLOCKS": "128",
        "BURSTLINE_WORKER_ACK_WAIT_S": str(ACK_WAIT_S),
        "BURSTLINE_WORKER_HEARTBEAT_S": "0.2",
        "BURSTLINE_WORKER_PULL_WAIT_S": "0.5",
        "BURSTLINE_WORKER_BROKER_TIMEOUT_S": "5",
        **{f"BURSTLINE_WORKER_{name.upper()}": value for name, value in settings.items()},
    }


@contextmanager
def worker_process(
    nats_url: str, folder: Path, model: Path, worker_id: str, **settings: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker; ended by SIGKILL at the latest when the block is left. Its output is in `<folder>/<id>.log`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{worker_id}.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.gpu_worker"],
            cwd=REPOSITORY,
            env=environment(nats_url, folder / "data", model, worker_id, **settings),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)


@dataclass
class Client:
    """The gateway's side, as far as a test needs it."""

    transport: Transport
    fingerprint: str = ""

    async def find_worker(self, worker_id: str) -> Heartbeat:
        """Wait for a ready heartbeat of this worker."""
        beats = await self.transport.subscribe(subjects.heartbeat(worker_id))
        try:
            async with asyncio.timeout(DEADLINE_S):
                async for received in beats:
                    beat = codec.decode_as(Heartbeat, received.data)
                    if beat.ready:
                        self.fingerprint = beat.fingerprint
                        return beat
        finally:
            await beats.close()
        raise AssertionError("the subscription ended")

    def request(self, request_id: str, prompt: tuple[int, ...], **changes: object) -> GenerateRequest:
        plain = make_request(request_id)
        now = SYSTEM.wall_ns()
        bound = {
            "namespace": msgspec.structs.replace(plain.namespace, fingerprint=self.fingerprint),
            "prompt": pack_tokens(prompt),
            "created_ns": now,
            "deadline_ns": now + int(DEADLINE_S * 1e9),
            "model": "tiny",
        }
        return msgspec.structs.replace(plain, **{**bound, **changes})

    async def enqueue(self, request: GenerateRequest) -> None:
        subject = subjects.request_shared(self.fingerprint, request.priority, request.tenant)
        await self.transport.append(subject, codec.encode(request))

    async def until(
        self, request_id: str, predicate: Callable[[JournalState], bool], choices: int = 1
    ) -> JournalState:
        """Follow the journal, folding it as a reader does, until the predicate holds."""
        state, subject = journal.empty(choices), subjects.tokens(request_id)
        async with asyncio.timeout(DEADLINE_S):
            while not predicate(state):
                page = await self.transport.read(subjects.JOURNAL.name, subject, after=state.sequence)
                for stored in page:
                    state = journal.fold(state, stored.sequence, codec.decode(stored.data))  # type: ignore[arg-type]
                await asyncio.sleep(0 if page else 0.02)
        return state

    async def ended(self, request_id: str, choices: int = 1) -> tuple[JournalState, Terminal]:
        state = await self.until(request_id, lambda state: state.terminal is not None, choices)
        assert state.terminal is not None
        return state, state.terminal


def greedy(sampling: Sampling) -> Sampling:
    return msgspec.structs.replace(sampling, temperature=0.0)


NO_CACHE = CachePlan(enabled=False, checkpoint_at=None, capture_at=None, labels=(), reuse="prefill")


def readiness(port: int) -> tuple[int, bytes]:
    """Status and body of /readyz; (0, b"") while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except URLError:
        return 0, b""


def metric(port: int, name: str) -> float:
    """The sum of a metric over its labels, from /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
