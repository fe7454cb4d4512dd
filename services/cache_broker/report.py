"""The audit's report as evidence: named figures, and what must be zero."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from services.cache_broker.audit import Report
from shared.evidence import Bar


def results(report: Report) -> dict[str, Any]:
    """What `burstline audit --json` tells beside its bars."""
    return {
        "tenants": [asdict(books) for books in report.books],
        "workers_asked": list(report.asked),
        "workers_silent": list(report.silent),
        "differences": [asdict(difference) for difference in report.differences],
    }


def bars(report: Report) -> list[Bar]:
    """What must be zero."""
    books = report.books
    differing = sum(abs(entry.real_bytes - entry.charged_bytes) for entry in report.differences)
    return [
        Bar.zero(
            "ledger minus entries", sum(abs(one.ledger_bytes - one.entry_bytes) for one in books), "bytes"
        ),
        Bar.zero(
            "counter minus entries", sum(abs(one.counter_bytes - one.entry_bytes) for one in books), "bytes"
        ),
        Bar.zero("real minus charged bytes", differing, "bytes"),
        Bar.zero("entries that differ at a worker", len(report.differences), "entries"),
        Bar.zero("orphaned entries", sum(one.orphans for one in books), "entries"),
        Bar.zero("expired reservations", sum(one.expired_reservations for one in books), "reservations"),
        Bar.zero("expired leases", sum(one.expired_leases for one in books), "leases"),
    ]
