"""`burstline chaos`: start the line, learn the undisturbed streams, disturb it under load, wait until it is quiet, judge."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from services.chaos import baseline, promises
from services.chaos import verdict as judging
from services.chaos.asking import Asked
from services.chaos.cases import cases
from services.chaos.front import Front
from services.chaos.inject import HEAL_S, Injector, Record
from services.chaos.journal import Story
from services.chaos.load import Load, client, references
from services.chaos.scene import SIZES, LoopThread, settle_environment, write_model
from services.chaos.schedule import ACK_WAIT_S, Kind, faults
from services.embedded import commands
from services.embedded.config import EmbeddedSettings
from services.embedded.faults import EmbeddedFault
from services.embedded.stack import Stack
from services.embedded.up import Signals, say
from services.embedded.waiting import until
from shared.clock import SYSTEM
from shared.config import CommonSettings, load
from shared.errors import BurstlineError
from shared.evidence import evidence, write
from shared.evidence import told as lines
from shared.protocol.messages import Heartbeat
from shared.transport.base import Transport
from shared.transport.nats import connect

CALLERS: Final = 4
TICK_S: Final = 0.1
FINISH_S: Final = 300.0
AUDIT_S: Final = 150.0


def main(
    *,
    minutes: float,
    count: int | None,
    seed: int,
    kinds: Sequence[Kind],
    every_s: float,
    json_file: Path | None,
    callers: int = CALLERS,
) -> int:
    """Returns 0 when every bar holds, 1 when one does not, 2 when it could not measure."""
    signals = Signals()
    try:
        with tempfile.TemporaryDirectory(prefix="burstline-chaos-") as root:
            run = Run(Path(root), seed=seed, kinds=kinds, every_s=every_s, callers=callers, signals=signals)
            return run.play(minutes=minutes, count=count, json_file=json_file)
    except (BurstlineError, OSError) as fault:
        say(f"burstline: chaos could not measure: {fault}")
        return 2


@dataclass(frozen=True, kw_only=True)
class Before:
    """The line before anything was done to it: pools by worker, files and tasks by (name, pid)."""

    pools: dict[str, Heartbeat]
    files: dict[tuple[str, int], int]
    tasks: dict[tuple[str, int], int]


class Run:
    """One run, from an empty folder to a verdict. Belongs to the main thread."""

    def __init__(
        self, root: Path, *, seed: int, kinds: Sequence[Kind], every_s: float, callers: int, signals: Signals
    ) -> None:
        self._root = root
        self._seed = seed
        self._kinds = kinds
        self._every_s = every_s
        self._callers = callers
        self._signals = signals
        self._began_ns = SYSTEM.monotonic_ns()

    def play(self, *, minutes: float, count: int | None, json_file: Path | None) -> int:
        """All of it; the exit status."""
        data_dir = self._root / "data"
        data_dir.mkdir()
        self._root.chmod(0o711)  # the database's own account walks through it
        settle_environment(write_model(self._root / "model"), data_dir)
        with ExitStack() as stack:
            thread = LoopThread()
            stack.callback(thread.close)
            front = Front()
            stack.callback(lambda: thread.run(front.close(), timeout_s=10))
            line = Stack(
                load(EmbeddedSettings),
                load(CommonSettings),
                report=say,
                stop=self._signals.asked.is_set,
                hurry=self._signals.asked.is_set,
                sizes=SIZES,
                front=lambda url: thread.run(front.open(url)),
            )
            stack.enter_context(line)
            transport = thread.run(connect(line.nats_url, name="burstline-chaos"))
            stack.callback(lambda: thread.run(transport.close(), timeout_s=10))
            return self._disturb(line, thread, front, transport, minutes, count, json_file)

    def _disturb(
        self,
        line: Stack,
        thread: LoopThread,
        front: Front,
        transport: Transport,
        minutes: float,
        count: int | None,
        json_file: Path | None,
    ) -> int:
        asked_for = cases(self._seed)
        http = client(line.key)
        try:
            self._tell("learning the undisturbed streams")
            known = thread.run(references(http, line.gateway_urls, asked_for))
            before = Before(
                pools=thread.run(baseline.pools(transport, len(line.names("worker")))),
                files=baseline.open_files(line),
                tasks=thread.run(baseline.tasks(line)),
            )
            callers = Load(http, line.gateway_urls, asked_for, seed=self._seed, callers=self._callers)
            finished = thread.begin(callers.run())
            schedule = faults(self._seed, self._kinds, every_s=self._every_s, ack_wait_s=ACK_WAIT_S)
            injector = Injector(line, schedule, front=front, thread=thread, transport=transport)
            try:
                self._go_on(line, injector, minutes=minutes, count=count)
            finally:
                injector.release()
                thread.call(callers.stop)
            self._tell("the last requests end")
            self._heal(line)
            self._tick_until(line, lambda: _is_over(finished), FINISH_S, "the callers do not end")
            stories = self._stories(line, thread, transport)
            quiet = self._quiet(line, thread, transport, before)
        finally:
            thread.run(http.aclose(), timeout_s=10)
        return self._judge(line, callers.asked, stories, known, injector.records, quiet, json_file)

    def _go_on(self, line: Stack, injector: Injector, *, minutes: float, count: int | None) -> None:
        """Faults, until there were enough or the time is over."""
        until_ns = SYSTEM.monotonic_ns() + int(minutes * 60e9)
        while not self._signals.asked.is_set() and len(injector.records) != count:
            if count is None and SYSTEM.monotonic_ns() >= until_ns:
                return
            line.tick()
            if (record := injector.turn()) is not None:
                self._tell(f"{len(injector.records)}: {record.kind} of {record.name}")
            time.sleep(TICK_S)

    def _heal(self, line: Stack) -> None:
        names = [name for service in ("worker", "gateway", "broker") for name in line.names(service)]
        self._tick_until(line, lambda: all(map(line.ready, names)), HEAL_S, "the line does not heal")

    def _tick_until(self, line: Stack, check: Callable[[], bool], limit_s: float, fault: str) -> None:
        def look() -> bool:
            line.tick()
            return check()

        if not until(look, timeout_s=limit_s, interval_s=TICK_S):
            raise EmbeddedFault(f"{fault} within {limit_s:g} s")

    def _stories(self, line: Stack, thread: LoopThread, transport: Transport) -> dict[str, Story]:
        """Every journal, once nothing is queued any more or patience is over (what is left is told as queued)."""

        def idle() -> bool:
            line.tick()
            return not thread.run(baseline.queued(transport))

        until(idle, timeout_s=FINISH_S / 2, interval_s=0.5)
        return thread.run(baseline.stories(transport))

    def _quiet(self, line: Stack, thread: LoopThread, transport: Transport, before: Before) -> promises.Quiet:
        queued = thread.run(baseline.queued(transport))
        audited = baseline.audit()
        until_ns = SYSTEM.monotonic_ns() + int(AUDIT_S * 1e9)
        while audited.returncode != 0 and SYSTEM.monotonic_ns() < until_ns:
            line.tick()  # what a killed worker had reserved expires within a minute
            audited = baseline.audit()
        now = thread.run(baseline.pools(transport, len(line.names("worker"))))
        return promises.Quiet(
            queued=queued,
            cancels=thread.run(baseline.cancels(transport)),
            audit_ok=audited.returncode == 0,
            audit_text=audited.stdout + audited.stderr,
            files_more=baseline.more(before.files, baseline.open_files(line)),
            tasks_more=baseline.more(before.tasks, thread.run(baseline.tasks(line))),
            pools=baseline.off(before.pools, now),
        )

    def _judge(
        self,
        line: Stack,
        asked: Sequence[Asked],
        stories: dict[str, Story],
        known: dict[str, tuple[int, ...]],
        records: Sequence[Record],
        quiet: promises.Quiet,
        json_file: Path | None,
    ) -> int:
        first = commands.worker_id(load(CommonSettings))
        workers = {
            commands.numbered(first, number): name
            for number, name in enumerate(line.names("worker"), start=1)
        }
        gateways = dict(zip(line.gateway_urls, line.names("gateway"), strict=True))
        verdict = judging.judge(asked, stories, known, records, workers, gateways)
        told = promises.bars(verdict, asked, records, quiet)
        found = promises.results(verdict, asked, records, quiet)
        found["seconds"] = round((SYSTEM.monotonic_ns() - self._began_ns) / 1e9, 1)
        console = Console()
        console.print(
            f"burstline {self._command(len(records))}: {SIZES.gateways} gateways, {SIZES.workers} workers, {SIZES.brokers} "
            f"brokers, {self._callers} callers, {found['seconds']:g} s",
            highlight=False,
            soft_wrap=True,
        )
        console.print(_table("faults", found["faults"]))
        console.print(_table("requests", found["outcomes"]))
        if verdict.takeovers:
            console.print(_table("takeover, seconds", found["takeover_s"]))
        for text in verdict.complaints:
            console.print(text, markup=False, highlight=False)
        if not quiet.audit_ok:
            console.print(quiet.audit_text, markup=False, highlight=False)
        for text in lines(told):
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        if json_file is not None:
            write(json_file, evidence(self._command(len(records)), found, told))
        return 0 if all(bar.holds for bar in told) else 1

    def _command(self, faults: int) -> str:
        """What does the same again."""
        kinds = "" if set(self._kinds) == set(Kind) else "".join(f" --kind {kind}" for kind in self._kinds)
        return f"chaos --count {faults} --seed {self._seed}{kinds}"

    def _tell(self, text: str) -> None:
        say(f"{(SYSTEM.monotonic_ns() - self._began_ns) / 1e9:6.1f} s  {text}")


def _is_over(result: Callable[[float], object]) -> bool:
    """Whether what `LoopThread.begin` answered has come."""
    try:
        result(0.0)
    except TimeoutError:
        return False
    return True


def _table(title: str, rows: dict[str, float]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, min_width=len(title))
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, f"{value:g}")
    return table
