"""`burstline trace ID`: the spans of one request, from HTTP to SQL, as a waterfall in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.config import CommonSettings, load
from shared.evidence import evidence
from shared.telemetry import TRACES_FILE
from shared.tracestore import StoredSpan, TraceStore

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

BAR_WIDTH: Final = 24  # what leaves room for names and times on a terminal of 80 columns
ATTRIBUTES_SHOWN: Final = 6
_ELSEWHERE: Final = (
    "A stack with another folder: --data-dir FOLDER (the demo's: .burstline/demo). With BURSTLINE_OTLP_ENDPOINT set "
    "traces are kept there alone"
)
_GENERATION: Final = "burstline.request_id"
"""An attribute of requests that got as far as the queue, and of no other."""
_COLOURS: Final = ("cyan", "green", "magenta", "yellow", "blue", "red")


@app.command()
def trace(
    trace_id: Annotated[
        str,
        typer.Argument(
            help="A trace id (each answer's x-trace-id), the beginning of one, or `last`: the last generation."
        ),
    ],
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the spans here; `-` writes them alone, to stdout."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="The stack's data folder (else BURSTLINE_DATA_DIR).", file_okay=False)
    ] = None,
) -> None:
    """Draw a request's trace as a waterfall."""
    folder = data_dir or load(CommonSettings).data_dir
    store = TraceStore(folder / TRACES_FILE)
    spans = store.read(_resolve(store, trace_id, folder))
    if json_file is not None:
        text = json.dumps(report(spans), indent=2)
        if str(json_file) == "-":
            sys.stdout.write(text + "\n")
            return
        json_file.write_text(text + "\n")
    Console().print(render_waterfall(spans))


def _resolve(store: TraceStore, wanted: str, folder: Path) -> str:
    """The one trace id that `wanted` names; leaves with status 1 and the reason otherwise."""
    if wanted == "last":
        return _last(store, folder)
    matching = store.find(wanted, limit=5)
    if not matching:
        _fail(f"no trace in {folder} begins with {wanted!r}. {_ELSEWHERE}")
    if len(matching) > 1:
        _fail(f"{wanted!r} begins several traces: {', '.join(found[:12] for found in matching)}, …")
    return matching[0]


def _last(store: TraceStore, folder: Path) -> str:
    """The last generation, or the last request where there was none; what is newer is told, with its id."""
    newest = store.latest()
    if newest is None:
        _fail(f"there are no traces in {folder}. {_ELSEWHERE}")
    found = store.latest(having=_GENERATION)
    if found is None:
        _say("none of these requests became a generation; this is the last of them")
    elif found != newest:
        _say(f"a newer request that was not a generation: burstline trace {newest[:12]}")
    return found or newest


def _say(message: str) -> None:
    sys.stderr.write(f"burstline trace: {message}\n")


def _fail(message: str) -> NoReturn:
    _say(message)
    raise SystemExit(1)


def report(spans: Sequence[StoredSpan]) -> dict[str, Any]:
    """The evidence object of a trace."""
    begin, end = _extent(spans)
    results = {
        "trace_id": spans[0].trace_id if spans else "",
        "spans": len(spans),
        "seconds": (end - begin) / 1e9,
        "services": sorted({span.service for span in spans}),
    }
    return evidence("trace", results, ()) | {"spans": [asdict(span) for span in spans]}


def render_waterfall(spans: Sequence[StoredSpan], *, of: int = 0) -> Table:
    """A row a span: the tree of names, service, duration, a bar at its place in time, its attributes.

    `of`: how many the trace has, if these are not all.
    """
    begin, end = _extent(spans)
    services = sorted({span.service for span in spans})
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(services)}
    title = (
        f"trace {spans[0].trace_id} · {_counted(len(spans), of)} · {duration(end - begin)}"
        if spans
        else "no spans"
    )
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", expand=True
    )
    table.add_column("span", no_wrap=True, overflow="ellipsis", min_width=24)
    table.add_column("service", no_wrap=True, overflow="ellipsis")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, width=BAR_WIDTH)
    table.add_column("attributes", overflow="ellipsis", no_wrap=True, ratio=1)
    for depth, span in tree(spans):
        colour = "red" if span.error else colours[span.service]
        table.add_row(
            Text("  " * depth + span.name, style="bold" if depth == 0 else ""),
            Text(span.service, style=colours[span.service]),
            duration(span.end_ns - span.start_ns),
            Text(bar(span, begin, end), style=colour),
            Text(_attributes(span), style="dim"),
        )
    return table


def _counted(shown: int, of: int) -> str:
    if of > shown:
        return f"{shown} of {of} spans"
    return "1 span" if shown == 1 else f"{shown} spans"


def tree(spans: Sequence[StoredSpan]) -> Iterator[tuple[int, StoredSpan]]:
    """Spans depth first in the order of their start, with their depth. A span whose parent is not here is a root."""
    known = {span.span_id for span in spans}
    children: dict[str, list[StoredSpan]] = {}
    for span in sorted(spans, key=lambda one: (one.start_ns, one.end_ns)):
        parent = span.parent_id if span.parent_id in known and span.parent_id != span.span_id else ""
        children.setdefault(parent, []).append(span)
    waiting = [(0, span) for span in reversed(children.get("", []))]
    while waiting:
        depth, span = waiting.pop()
        yield depth, span
        waiting.extend((depth + 1, child) for child in reversed(children.get(span.span_id, [])))


def bar(span: StoredSpan, begin_ns: int, end_ns: int, width: int = BAR_WIDTH) -> str:
    """A bar of at least one cell where the span lies between `begin_ns` and `end_ns`."""
    whole = max(1, end_ns - begin_ns)
    left = min(width - 1, (span.start_ns - begin_ns) * width // whole)
    cells = max(1, min(width - left, round((span.end_ns - span.start_ns) * width / whole)))
    return " " * left + "█" * cells


def duration(nanoseconds: int) -> str:
    """A time in the unit that reads best."""
    if nanoseconds >= 1_000_000_000:
        return f"{nanoseconds / 1e9:.2f} s"
    if nanoseconds >= 1_000_000:
        return f"{nanoseconds / 1e6:.1f} ms"
    return f"{nanoseconds / 1e3:.0f} µs"


def _attributes(span: StoredSpan) -> str:
    """The first attributes as words; an error stands in front."""
    shown = [f"{name.removeprefix('burstline.')}={value}" for name, value in span.attributes.items()]
    if span.error:
        shown.insert(0, f"error: {span.error}")
    if span.links:
        shown.append(f"links={len(span.links)}")
    return " ".join(" ".join(shown[:ATTRIBUTES_SHOWN]).split())


def _extent(spans: Sequence[StoredSpan]) -> tuple[int, int]:
    """The first start and the last end, ns."""
    return min((span.start_ns for span in spans), default=0), max((span.end_ns for span in spans), default=0)
