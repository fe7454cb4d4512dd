"""`burstline demo`: start the stack, hold the chat, ask again in other ways, stop, and judge."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console

from services.demo.about import About, about
from services.demo.client import Answer, Chat
from services.demo.report import Turn, essential, figures, result, reuse_faults, turn_of
from services.demo.script import Message, run_tool
from services.embedded.bootstrap import ensure_key
from services.embedded.config import EmbeddedSettings
from services.embedded.faults import Cancelled
from services.embedded.process import alive
from services.embedded.stack import Stack
from services.embedded.up import Signals
from services.embedded.waiting import until
from services.trace import render_waterfall
from shared.clock import SYSTEM
from shared.config import CommonSettings, load
from shared.errors import BurstlineError
from shared.telemetry import TRACES_FILE
from shared.tracestore import TraceStore

OTHER_TENANT: Final = "demo-other"
WIDTH: Final = 140  # of the trace where there is no terminal


def out(text: str = "", end: str = "\n") -> None:
    """To the person at the terminal."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


@dataclass(kw_only=True)
class Shown:
    """What the chat gave."""

    requests: list[Turn] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    first_answer_s: float = 0.0
    spec_equals_plain: bool = False
    other_tenant_cached: int = 0


class Demo:
    """The conversation on a running stack."""

    def __init__(
        self, stack: Stack, folder: Path, model: About, signals: Signals, since_start_s: Callable[[], float]
    ) -> None:
        self._stack = stack
        self._folder = folder
        self._model = model
        self._stop = signals.asked.is_set
        self._since_start_s = since_start_s
        self._messages: list[Message] = [{"role": "system", "content": model.script.instructions}]
        self._sent: list[dict[str, Any]] = []
        self._answers: list[Answer] = []
        self.shown = Shown()

    def hold(self) -> None:
        """Three turns, then every request again without speculation and cache, and the last from another tenant."""
        chat = Chat(self._stack.gateway_url, self._stack.key, stop=self._stop)
        other = Chat(
            self._stack.gateway_url,
            ensure_key(self._folder, self._stack.database_url, OTHER_TENANT),
            stop=self._stop,
        )
        try:
            for number, question in enumerate(self._model.script.questions, start=1):
                self._turn(chat, number, question)
            self._compare(chat, other)
        finally:
            chat.close()
            other.close()

    def _turn(self, chat: Chat, number: int, question: str) -> None:
        out(f"\nTurn {number}\n  user       {question}")
        self._messages.append({"role": "user", "content": question})
        answer = self._request(chat)
        if answer.tool_calls:
            self._messages.append(answer.message())
            for call in answer.tool_calls:
                function = call["function"]
                told = run_tool(function["name"], function["arguments"])
                out(f"  tool call  {function['name']} {function['arguments']} -> {told}")
                self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": told})
            answer = self._request(chat)
        self._messages.append(answer.message())
        self.shown.turns.append(turn_of(answer))

    def _request(self, chat: Chat) -> Answer:
        out("  assistant  ", end="")
        self._sent.append(self._body(self._messages))
        try:
            answer = chat.ask(self._sent[-1], show=lambda piece: out(piece, end=""))
        except BurstlineError:
            out()  # what is told next begins a line
            raise
        self._answers.append(answer)
        turn = turn_of(answer)
        out(f"{'' if answer.text else '(a tool call)'}\n             {figures(turn)}")
        if not self.shown.requests:
            self.shown.first_answer_s = self._since_start_s()
        self.shown.requests.append(turn)
        return answer

    def _compare(self, chat: Chat, other: Chat) -> None:
        plain = [
            chat.ask({**body, "speculation": {"drafter": "none", "k": 0}, "cache": False})
            for body in self._sent
        ]
        alike = [again.said() == answer.said() for again, answer in zip(plain, self._answers, strict=True)]
        self.shown.spec_equals_plain = all(alike)
        out("\nEvery answer again")
        out(f"  without speculation and cache   {sum(alike)} of {len(alike)} texts are the same")
        out(f"             the last one: {figures(turn_of(plain[-1]))}")
        foreign = turn_of(other.ask(self._sent[-1]))
        self.shown.other_tenant_cached = foreign.cached_tokens
        out(f"  the last from another tenant    {foreign.cached_tokens} cached tokens")

    def _body(self, messages: list[Message]) -> dict[str, Any]:
        script = self._model.script
        return {
            "model": self._model.name,
            "messages": list(messages),
            **({"tools": script.tools} if script.tools else {}),
            "temperature": 0,
            "max_tokens": script.max_tokens,
        }


def main(*, model: str = "pocket", data_dir: Path, started_s: int, json_file: Path | None) -> int:
    """Run the demo with the gateway's model of this name. `started_s`: when the command began, seconds since the epoch (0 = now).

    Returns 0 when reuse, isolation, equality and the clean stop all hold, 1 when one does not, 2 when it could not run.
    """
    began_ns = started_s * 1_000_000_000 or SYSTEM.wall_ns()
    common = load(CommonSettings).model_copy(update={"data_dir": data_dir.absolute()})
    settings = load(EmbeddedSettings).model_copy(update={"gateway_port": 0})
    signals = Signals()
    stack = Stack(settings, common, report=out, stop=signals.asked.is_set, hurry=signals.again.is_set)
    try:
        known = about(model)
        out(f"Starting the stack: NATS, Postgres, broker, worker with {model}, gateway")
        with stack:
            demo = Demo(stack, common.data_dir, known, signals, lambda: (SYSTEM.wall_ns() - began_ns) / 1e9)
            demo.hold()
            processes = _family(stack)
            out()
    except Cancelled:
        out("\nstopped")
        return 130
    except BurstlineError as fault:
        out(f"\nburstline: {fault.message}")
        return 2
    shown = demo.shown
    out()
    spans = _show_trace(common, shown.requests[-1].trace_id)
    faults = _judge(shown, processes, known.header_tokens)
    told = result(
        shown.turns,
        spec_equals_plain=shown.spec_equals_plain,
        other_tenant_cached=shown.other_tenant_cached,
        spans=spans,
        first_answer_s=shown.first_answer_s,
    )
    if json_file is not None:
        json_file.write_text(json.dumps(told) + "\n", encoding="utf-8")
    for broken in faults:
        out(f"NOT AS PROMISED: {broken}")
    if not faults:
        out(
            "As promised: prefixes reused, the same texts without speculation and cache, nothing for another tenant, a clean "
            "stop. `burstline up` keeps the stack running."
        )
    out(json.dumps(told))
    return 1 if faults else 0


def _judge(shown: Shown, processes: list[psutil.Process], header_tokens: int) -> list[str]:
    faults = reuse_faults(shown.requests, header_tokens)
    if not shown.spec_equals_plain:
        faults.append("speculation or the cache changed the text")
    if shown.other_tenant_cached:
        faults.append(f"another tenant got {shown.other_tenant_cached} cached tokens")
    if not until(lambda: not any(map(alive, processes)), timeout_s=10):
        left = [str(process.pid) for process in processes if alive(process)]
        faults.append(f"processes are left: {', '.join(left)}")
    return faults


def _family(stack: Stack) -> list[psutil.Process]:
    """Every process of the stack but this one, children of children too."""
    found = [psutil.Process(pid) for name, pid in stack.pids.items() if name != "stack"]
    return found + [child for process in found for child in process.children(recursive=True)]


def _show_trace(common: CommonSettings, trace_id: str) -> int:
    """Draw what is essential of a trace; how many spans it has. The services have stopped, so all are written."""
    if common.otlp_endpoint is not None:
        out(f"The trace went to {common.otlp_endpoint}: {trace_id}")
        return 0
    spans = TraceStore(common.data_dir / TRACES_FILE).read(trace_id)
    width = None if sys.stdout.isatty() else WIDTH
    Console(width=width).print(render_waterfall(essential(spans), of=len(spans)))
    # Outside its environment the command has no name of its own.
    command = "burstline" if shutil.which("burstline") else shlex.quote(sys.argv[0])
    out(
        f"All {len(spans)} spans, from HTTP to SQL: "
        f"{command} trace {trace_id[:8]} --data-dir {shlex.quote(str(common.data_dir))}"
    )
    return len(spans)
