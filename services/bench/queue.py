"""`bench queue`: what the gateway and the queue add, with an engine that is instant: real gateway, NATS, broker, worker.

What is compared is timed in turns, so that a busy machine is as busy for each: a bare NATS request and reply between two
processes, the hops that a request cannot do without (`queue_floor`), a request through the whole line to its first token,
and (if it is installed) the same through LiteLLM's proxy. What is *added* is told as of any proxy: the time of a request less
the time that the same caller just had from the instant engine served directly (`queue_direct`). The spans of those requests tell where
their time went (`queue_way`). Then many callers at once: requests and bursts a second of one gateway.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from services.bench.figures import quantiles
from services.bench.queue_client import Connection, Timed
from services.bench.queue_direct import body as direct_body
from services.bench.queue_direct import direct
from services.bench.queue_engine import DIGITS, stamp_us
from services.bench.queue_floor import Floor
from services.bench.queue_peer import proxy
from services.bench.queue_way import way
from services.bench.queue_worker import alphabet
from services.chaos.scene import LoopThread
from services.embedded import commands
from services.embedded.config import EmbeddedSettings
from services.embedded.process import Command
from services.embedded.stack import Stack
from shared.clock import SYSTEM
from shared.config import POCKET, CommonSettings, load
from shared.errors import BurstlineError
from shared.evidence import Bar
from shared.telemetry import TRACES_FILE
from shared.tracestore import TraceStore

ROUNDS: Final = 200
WARM_UP: Final = 20
BURSTS: Final = 4
CALLERS: Final = 16
BUSY_S: Final = 8.0
LIMIT_OVER_BARE: Final = 4.0
MODEL: Final = "pocket"

Results = dict[str, Any]


def run_queue(*, litellm: Path | None, report: Callable[[str], None], rounds: int = ROUNDS) -> Results:
    """All figures. `litellm`: a virtual environment that has it; None = not compared.

    Raises:
        BurstlineError: the line does not come up or does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="burstline-bench-queue-") as root:
        folder = Path(root)
        folder.chmod(0o711)  # the database's own account walks through it
        _settle_environment(folder / "data")
        thread = LoopThread()
        line = Stack(load(EmbeddedSettings), load(CommonSettings), report=report, worker=_worker)
        try:
            with line:
                work = _measure(line, folder, litellm=litellm, rounds=rounds, report=report)
                return thread.run(work)
        finally:
            thread.close()


def bars(results: Results) -> list[Bar]:
    """The promises. LiteLLM's only when it was measured."""
    bare, added = results["bare_request_reply_ms"], results["added_ms"]
    told = [
        Bar.at_most(
            "added to the first token, p50, over a bare request and reply",
            round(added["p50"] / bare["p50"], 2),
            LIMIT_OVER_BARE,
            "times",
        )
    ]
    peer = results["litellm"]
    if "first_token_ms" in peer:
        for name in ("p50", "p99"):
            for key, what in (("first_token_ms", "first token"), ("added_ms", "added")):
                ratio = round(results[key][name] / peer[key][name], 3)
                told.append(Bar.at_most(f"{what} beside LiteLLM, {name}", ratio, 1.0, "times"))
    return told


def _settle_environment(data_dir: Path) -> None:
    for name in [name for name in os.environ if name.startswith("BURSTLINE_")]:
        del os.environ[name]
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "BURSTLINE_DATA_DIR": str(data_dir),
        "BURSTLINE_LOG_LEVEL": "warning",
        "BURSTLINE_EMBEDDED_GATEWAY_PORT": "0",
        "BURSTLINE_EMBEDDED_DURABLE": "false",
        "BURSTLINE_WORKER_MAX_RUNNING": "64",
    }


def _worker(common: CommonSettings, nats_url: str, health_port: int, *, number: int = 1) -> Command:
    """The worker whose engine is instant."""
    command = commands.worker(common, nats_url, health_port, number=number)
    module = (sys.executable, "-P", "-m", "services.bench.queue_worker", "--supervised-by", command.marker)
    return replace(command, arguments=module)


def _body(bursts: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": bursts * DIGITS,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "temperature": 0,
    }


async def _measure(
    line: Stack, folder: Path, *, litellm: Path | None, rounds: int, report: Callable[[str], None]
) -> Results:
    async with AsyncExitStack() as stack:
        floor = await Floor.open(line.nats_url)
        stack.push_async_callback(floor.close)
        backend = await stack.enter_async_context(direct(folder))
        plain = await stack.enter_async_context(Connection(backend, ""))
        peer, why = await _peer(stack, litellm, folder, backend, report)
        ours = await stack.enter_async_context(Connection(line.gateway_url, line.key))
        report("one request at a time")
        streams, straight, theirs = await _in_turns(floor, ours, plain, peer, rounds)
        report(f"{CALLERS} callers at once")
        busy = await _busy(line)
        hops = floor.figures()
        bare = hops.pop("bare")
        first = [timed.first_text_ms() for timed in streams]
        digits = {token: place for place, token in enumerate(alphabet(POCKET))}
        return {
            "rounds": rounds,
            "machine": _machine(),
            "bare_request_reply_ms": bare,
            "floor_ms": hops,
            "direct_ms": quantiles(straight),
            **_told(first, straight, bare["p50"]),
            "way_ms": await way(TraceStore(folder / "data" / TRACES_FILE), streams),
            "burst_ms": quantiles([late for timed in streams for late in _burst_ms(timed, digits)]),
            "one_gateway": busy,
            "litellm": _told(theirs, straight, bare["p50"]) if theirs else {"not_measured": why},
        }


def _machine() -> Results:
    """In which scheduling class this process and its children run, on how many processors, and how many wanted one in the
    last minute: what a latency of tens of wakes depends on."""
    ours = os.sched_getscheduler(0)
    classes = ("SCHED_OTHER", "SCHED_FIFO", "SCHED_RR", "SCHED_BATCH", "SCHED_IDLE")
    return {
        "scheduling": next((name for name in classes if getattr(os, name) == ours), str(ours)),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
    }


async def _peer(
    stack: AsyncExitStack, environment: Path | None, folder: Path, backend: str, report: Callable[[str], None]
) -> tuple[Connection | None, str]:
    """A connection to LiteLLM's proxy, or why there is none."""
    if environment is None:
        return None, "no virtual environment with litellm[proxy] was named (--litellm)"
    report("LiteLLM's proxy starts")
    try:
        url, key = await stack.enter_async_context(proxy(environment, folder, backend))
    except (BurstlineError, TimeoutError, OSError) as error:
        return None, f"its proxy did not come up: {error or type(error).__name__}"
    return await stack.enter_async_context(Connection(url, key)), ""


async def _in_turns(
    floor: Floor, ours: Connection, plain: Connection, peer: Connection | None, rounds: int
) -> tuple[list[Timed], list[float], list[float]]:
    """Our streams, and milliseconds to the first token directly and through LiteLLM; the floor takes its own times."""
    streams: list[Timed] = []
    straight: list[float] = []
    theirs: list[float] = []
    for place in range(rounds + WARM_UP):
        await floor.round()
        streams.append(await ours.stream(_body(BURSTS)))
        straight.append((await plain.stream(direct_body(BURSTS * DIGITS))).first_text_ms())
        if peer is not None:
            theirs.append((await peer.stream(direct_body(BURSTS * DIGITS))).first_text_ms())
        if place == WARM_UP - 1:
            floor.clear()
            streams.clear()
            straight.clear()
            theirs.clear()
    return streams, straight, theirs


def _told(first: Sequence[float], straight: Sequence[float], bare_p50: float) -> Results:
    """The whole, and what is added: `added_ms` a quantile less the direct server's, `paired_added_ms` quantiles of each
    round's difference."""
    whole, plain = quantiles(list(first)), quantiles(list(straight))
    added = {name: round(whole[name] - plain[name], 2) for name in ("p50", "p99")}
    return {
        "first_token_ms": whole,
        "added_ms": added,
        "paired_added_ms": quantiles([one - other for one, other in zip(first, straight, strict=True)]),
        "over_bare_p50": {
            "whole": round(whole["p50"] / bare_p50, 2),
            "added": round(added["p50"] / bare_p50, 2),
        },
    }


def _burst_ms(timed: Timed, digits: dict[int, int]) -> list[float]:
    """From each burst's making to the event that completes it."""
    values: list[int] = []
    found = []
    for at_ns, told in timed.events:
        for choice in told.get("choices", ()):
            values += [digits[token] for token in choice.get("token_ids") or ()]
        while len(values) >= DIGITS:
            made_us = stamp_us(values[:DIGITS])
            del values[:DIGITS]
            found.append(((at_ns // 1000) % (1 << (4 * DIGITS)) - made_us) / 1e3)
    return found


async def _busy(line: Stack) -> dict[str, float]:
    """Requests and bursts a second of one gateway, `CALLERS` at once."""
    until_ns = SYSTEM.monotonic_ns() + int(BUSY_S * 1e9)

    async def caller() -> tuple[int, int]:
        requests = events = 0
        async with Connection(line.gateway_url, line.key) as connection:
            while SYSTEM.monotonic_ns() < until_ns:
                timed = await connection.stream(_body(BURSTS))
                requests += 1
                events += sum(
                    len(c.get("token_ids") or ()) for _, e in timed.events for c in e.get("choices", ())
                )
        return requests, events

    began = SYSTEM.monotonic_ns()
    done = await asyncio.gather(*(caller() for _ in range(CALLERS)))
    seconds = (SYSTEM.monotonic_ns() - began) / 1e9
    return {
        "callers": CALLERS,
        "requests_per_second": round(sum(one for one, _ in done) / seconds, 1),
        "bursts_per_second": round(sum(tokens for _, tokens in done) / DIGITS / seconds, 1),
    }
