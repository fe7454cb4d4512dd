"""After busy traffic of two tenants, some of it cut off, the line is quiet: no lease, no reservation, no difference."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import func, select

from services.cache_broker.config import BrokerSettings
from services.cache_broker.database import Database
from services.cache_broker.models import Entry, LeaseRow
from services.demo.script import INSTRUCTIONS
from services.embedded.waiting import until
from tests.e2e.conftest import Line

QUESTIONS = ("What is a burst?", "Name a drafter.", "Count from 1 to 20.", "Thank you!", "Bye.", "Hello!")
AT_ONCE = 4


def _body(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
    return {"model": "pocket", "messages": messages, "temperature": 0, "max_tokens": 24} | more


def _ask(line: Line, key: str, question: str) -> int:
    with line.client(key) as client:
        return client.post("/v1/chat/completions", json=_body(question)).status_code


def _leave(line: Line, key: str, question: str) -> int:
    """Read the first token of a long answer, then hang up."""
    long = _body(question, stream=True, max_tokens=400, ignore_eos=True)
    with line.client(key) as client, client.stream("POST", "/v1/chat/completions", json=long) as answer:
        for row in answer.iter_lines():
            if row.startswith("data:"):
                break
        return answer.status_code


def _open(line: Line) -> tuple[int, int]:
    """Leases and reservations that stand in the books now."""

    async def count() -> tuple[int, int]:
        database = Database(line.info.database_url, BrokerSettings())
        reserved = select(func.count()).select_from(Entry).where(Entry.state == "reserved")
        try:
            leases = await database.run(lambda c: c.scalar(select(func.count()).select_from(LeaseRow)))
            return int(leases or 0), int(await database.run(lambda c: c.scalar(reserved)) or 0)
        finally:
            await database.close()

    return asyncio.run(count())


def test_c6_nothing_stays_leased_or_reserved_and_the_audit_holds(line: Line, tmp_path: Path) -> None:
    keys = []
    for tenant in ("busy-one", "busy-two"):
        assert line.burstline("tenant", "create", tenant).returncode == 0
        keys.append(line.burstline("key", "create", tenant).stdout.strip())
    jobs = [
        (_leave if place % 3 == 2 else _ask, keys[place % 2], text)
        for place, text in enumerate(QUESTIONS * 2)
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        statuses = list(pool.map(lambda job: job[0](line, job[1], job[2]), jobs))
    assert statuses == [httpx.codes.OK] * len(jobs), line.logs()
    assert until(lambda: _open(line) == (0, 0), timeout_s=60, interval_s=0.5), _open(line)
    told = tmp_path / "audit.json"
    audit = line.burstline("audit", "--json", str(told))
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert all(bar["holds"] for bar in json.loads(told.read_text())["bars"])
