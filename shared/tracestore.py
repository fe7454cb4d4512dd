"""The local trace store: spans of every process of a stack in one SQLite file, bounded by count and age.

Several processes write at once (WAL, a busy timeout, short transactions); a reader sees whole batches. A fault of the
store loses spans, never a request.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from shared.clock import SYSTEM, Clock

_log = logging.getLogger(__name__)

_BUSY_S: Final = 5.0
_PRUNE_EVERY: Final = 64  # writes between two prunings; the bound is overshot by that many batches at most
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS spans (
    trace_id TEXT NOT NULL,
    span_id TEXT NOT NULL,
    parent_id TEXT NOT NULL,
    service TEXT NOT NULL,
    name TEXT NOT NULL,
    start_ns INTEGER NOT NULL,
    end_ns INTEGER NOT NULL,
    error TEXT NOT NULL,
    attributes TEXT NOT NULL,
    links TEXT NOT NULL,
    PRIMARY KEY (trace_id, span_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS spans_by_start ON spans (start_ns);
"""


@dataclass(frozen=True, kw_only=True)
class StoredSpan:
    """One span. Ids are lower-case hex; `parent_id` "" = root; `error` "" = none; times in ns since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str
    service: str
    name: str
    start_ns: int
    end_ns: int
    error: str = ""
    attributes: Mapping[str, object] = field(default_factory=dict)
    links: tuple[str, ...] = ()  # span ids


class TraceStore:
    """A handle on the file. Opens it for each call, so that it may be made, deleted or written by others meanwhile."""

    def __init__(
        self,
        path: Path,
        *,
        max_spans: int = 200_000,
        max_age_s: int = 7 * 24 * 3600,
        clock: Clock = SYSTEM,
    ) -> None:
        self._path = path
        self._max_spans = max_spans
        self._max_age_s = max_age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._writes = 0

    def write(self, spans: Iterable[StoredSpan]) -> None:
        """Add spans in one transaction. Raises sqlite3.Error or OSError when the file cannot be written."""
        rows = [_row(span) for span in spans]
        with self._lock, closing(self._open()) as database, database:
            database.executemany("INSERT OR REPLACE INTO spans VALUES (?,?,?,?,?,?,?,?,?,?)", rows)
            if self._writes % _PRUNE_EVERY == 0:
                self._prune(database)
            self._writes += 1

    def read(self, trace_id: str) -> list[StoredSpan]:
        """The spans of a trace in the order of their start; [] for an unknown one."""
        return [
            _span(row)
            for row in self._query("SELECT * FROM spans WHERE trace_id = ? ORDER BY start_ns", trace_id)
        ]

    def find(self, prefix: str, *, limit: int = 8) -> list[str]:
        """Trace ids that begin with `prefix`, newest first."""
        pattern = prefix.lower().replace("%", "").replace("_", "") + "%"
        rows = self._query(
            "SELECT trace_id FROM spans WHERE trace_id LIKE ? GROUP BY trace_id "
            "ORDER BY max(start_ns) DESC LIMIT ?",
            pattern,
            limit,
        )
        return [str(row[0]) for row in rows]

    def latest(self, *, having: str = "") -> str | None:
        """The trace whose root began last (of all spans when no root is here). `having`: only of spans with this attribute."""
        rows = self._query(
            "SELECT trace_id FROM spans WHERE instr(attributes, ?) ORDER BY parent_id = '' DESC, start_ns DESC LIMIT 1",
            json.dumps(having) if having else "{",
        )
        return str(rows[0][0]) if rows else None

    def _query(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        if not self._path.exists():
            return []
        with closing(self._open()) as database:
            return database.execute(statement, values).fetchall()

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self._path, timeout=_BUSY_S)
        try:
            with suppress(
                sqlite3.OperationalError
            ):  # another process is switching the new file at this moment
                database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(_SCHEMA)
        except BaseException:
            database.close()
            raise
        return database

    def _prune(self, database: sqlite3.Connection) -> None:
        """Drop what is too old, then the oldest above the count."""
        oldest = self._clock.wall_ns() - self._max_age_s * 1_000_000_000
        database.execute("DELETE FROM spans WHERE start_ns < ?", (oldest,))
        (count,) = database.execute("SELECT count(*) FROM spans").fetchone()
        if count > self._max_spans:
            (edge,) = database.execute(
                "SELECT start_ns FROM spans ORDER BY start_ns DESC LIMIT 1 OFFSET ?", (self._max_spans - 1,)
            ).fetchone()
            database.execute("DELETE FROM spans WHERE start_ns < ?", (edge,))


class StoreExporter(SpanExporter):
    """Feeds a store from the batch thread. The first fault of a row of faults is logged."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            self._store.write([from_sdk(span) for span in spans])
        except (sqlite3.Error, OSError) as error:
            if not self._failing:
                _log.warning("the local trace store does not take spans: %s", error)
            self._failing = True
            return SpanExportResult.FAILURE
        self._failing = False
        return SpanExportResult.SUCCESS


def from_sdk(span: ReadableSpan) -> StoredSpan:
    """An ended SDK span as it is stored."""
    context = span.get_span_context()
    if context is None:
        raise ValueError("a span without a context cannot be stored")
    return StoredSpan(
        trace_id=format(context.trace_id, "032x"),
        span_id=format(context.span_id, "016x"),
        parent_id=format(span.parent.span_id, "016x") if span.parent else "",
        service=str(span.resource.attributes.get("service.name", "")),
        name=span.name,
        start_ns=span.start_time or 0,
        end_ns=span.end_time or span.start_time or 0,
        error="" if span.status.is_ok else (span.status.description or "error"),
        attributes=dict(span.attributes or {}),
        links=tuple(format(link.context.span_id, "016x") for link in span.links),
    )


def _row(span: StoredSpan) -> tuple[object, ...]:
    return (
        span.trace_id,
        span.span_id,
        span.parent_id,
        span.service,
        span.name,
        span.start_ns,
        span.end_ns,
        span.error,
        json.dumps(span.attributes, default=str),
        json.dumps(span.links),
    )


def _span(row: tuple[object, ...]) -> StoredSpan:
    trace_id, span_id, parent_id, service, name, start_ns, end_ns, error, attributes, links = row
    return StoredSpan(
        trace_id=str(trace_id),
        span_id=str(span_id),
        parent_id=str(parent_id),
        service=str(service),
        name=str(name),
        start_ns=int(str(start_ns)),
        end_ns=int(str(end_ns)),
        error=str(error),
        attributes=json.loads(str(attributes)),
        links=tuple(json.loads(str(links))),
    )
