"""The audit's report as the evidence object of the project: named figures, and bars that hold or do not."""

from __future__ import annotations

import platform
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from typing import Any

from services.cache_broker.audit import Books, Report


def evidence(report: Report, *, now: datetime) -> dict[str, Any]:
    """The JSON object of `burstline audit --json`."""
    return {
        "command": "audit",
        "version": metadata.version("burstline"),
        "date": now.isoformat(timespec="seconds"),
        "device": platform.machine(),
        "results": {
            "tenants": [asdict(books) for books in report.books],
            "workers_asked": list(report.asked),
            "workers_silent": list(report.silent),
            "differences": [asdict(difference) for difference in report.differences],
        },
        "bars": bars(report),
    }


def bars(report: Report) -> list[dict[str, Any]]:
    """What must be zero."""
    books = report.books
    differing = sum(abs(entry.real_bytes - entry.charged_bytes) for entry in report.differences)
    return [
        _zero("ledger minus entries", sum(abs(_gap(one)) for one in books), "bytes"),
        _zero(
            "counter minus entries", sum(abs(one.counter_bytes - one.entry_bytes) for one in books), "bytes"
        ),
        _zero("real minus charged bytes", differing, "bytes"),
        _zero("entries that differ at a worker", len(report.differences), "entries"),
        _zero("orphaned entries", sum(one.orphans for one in books), "entries"),
        _zero("expired reservations", sum(one.expired_reservations for one in books), "reservations"),
        _zero("expired leases", sum(one.expired_leases for one in books), "leases"),
    ]


def _gap(books: Books) -> int:
    return books.ledger_bytes - books.entry_bytes


def _zero(name: str, value: int, unit: str) -> dict[str, Any]:
    return {"name": name, "value": value, "limit": 0, "unit": unit, "holds": value == 0}
