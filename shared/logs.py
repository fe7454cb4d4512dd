"""Logging of one process: text or JSON lines on standard error, the trace id in every record, secrets blotted out."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

_SECRETS: Final = (
    (re.compile(r"\bbl_[A-Za-z0-9_-]{4,}"), "bl_***"),
    (re.compile(r"(?i)\b(bearer)\s+[A-Za-z0-9._~+/=-]+"), r"\1 ***"),
    (re.compile(r"(?i)([a-z][a-z0-9+.-]*://)[^/@\s'\"]+@"), r"\1***@"),
)
_CRITICAL: Final = re.compile(r"\S+ \S+ CRITICAL +\S+ \S+: (.*)")
"""A record as `_TextFormatter` writes it."""
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "trace_id",
    "taskName",
}

_trace: ContextVar[str] = ContextVar("burstline_trace_id", default="")


def bind_trace(trace_id: str) -> None:
    """Give the log records of the running task, from now on, a trace id."""
    _trace.set(trace_id)


def redact(text: str) -> str:
    """`text` without API keys, bearer tokens and the user part of URLs."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


class _TraceFilter(logging.Filter):
    """Gives each record the trace that it was logged in."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(record, "trace_id", ""):
            record.trace_id = _trace.get()
        return True


class _TextFormatter(logging.Formatter):
    """One line a record, for people."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {service} %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        trace_id = getattr(record, "trace_id", "")
        return redact(f"{line} trace={trace_id}" if trace_id else line)


class _JsonFormatter(logging.Formatter):
    """One JSON object a record."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace_id := getattr(record, "trace_id", ""):
            entry["trace_id"] = trace_id
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        entry.update({name: value for name, value in record.__dict__.items() if name not in _STANDARD})
        return redact(json.dumps(entry, default=str, ensure_ascii=False))


def last_word(text: str) -> str | None:
    """The message of the last critical record in the text of a log, of either style; null without one. A service that
    cannot run says why in such a record."""
    for line in reversed(text.splitlines()):
        if found := _CRITICAL.match(line):
            return found[1]
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("level") == "critical":
                    return " ".join(str(entry.get("message")).split())
    return None


def setup(
    service: str,
    *,
    level: str = "info",
    style: Literal["text", "json"] = "text",
    stream: TextIO | None = None,
) -> None:
    """Point the root logger at `stream` (standard error). A second call replaces what the first one set."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(_TraceFilter())
    handler.setFormatter(_JsonFormatter(service) if style == "json" else _TextFormatter(service))
    handler.set_name("burstline")
    root = logging.getLogger()
    for old in [known for known in root.handlers if known.get_name() == "burstline"]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for chatty in ("nats", "uvicorn.access", "opentelemetry.sdk", "httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
