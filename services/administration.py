"""`burstline tenant | key | quota | entries | audit`: administration from the terminal.

They speak to the database that BURSTLINE_DATABASE_URL names, else to the stack that runs on the data folder: a
composition root, which is why it does not live in the broker.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.cells import cell_len, set_cell_size

from services.cache_broker import admin
from services.cache_broker.audit import Report
from services.cache_broker.audit import audit as run_audit
from services.cache_broker.config import BrokerSettings
from services.cache_broker.database import Database, Work
from services.cache_broker.report import bars, results
from services.embedded.discovery import discover
from shared.clock import SYSTEM
from shared.config import CommonSettings, load
from shared.errors import BurstlineError
from shared.evidence import evidence, told, write
from shared.transport.access import Access
from shared.transport.nats import connect

T = TypeVar("T")

tenant = typer.Typer(add_completion=False, no_args_is_help=True, help="Tenants.")
key = typer.Typer(add_completion=False, no_args_is_help=True, help="API keys.")
quota = typer.Typer(add_completion=False, no_args_is_help=True, help="A tenant's limits.")
entries = typer.Typer(add_completion=False, no_args_is_help=True, help="Prefix entries.")
audit = typer.Typer(add_completion=False)

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
TenantName = Annotated[str, typer.Argument(help="The tenant's name or id.")]


def parse_bytes(value: str) -> int:
    """`4GiB`, `512 MiB` or a plain number of bytes."""
    number = value.strip().rstrip("KkMmGgTtIiBb ")
    unit = value.strip()[len(number) :].strip().lower()
    try:
        return int(number) * _UNITS[unit]
    except (ValueError, KeyError) as error:
        raise typer.BadParameter("a number of bytes, or with KiB, MiB, GiB, TiB") from error


Bytes = Annotated[
    int | None, typer.Option("--cache-bytes", parser=parse_bytes, metavar="BYTES", help="e.g. 4GiB")
]
Concurrent = Annotated[
    int | None, typer.Option("--max-concurrent", min=0, help="Requests in flight; 0 = no limit.")
]


@tenant.command("create")
def tenant_create(name: str, cache_bytes: Bytes = None, max_concurrent: Concurrent = None) -> None:
    """Make a tenant with its limits."""
    size = admin.DEFAULT_CACHE_BYTES if cache_bytes is None else cache_bytes
    identifier = _do(
        lambda c: admin.create_tenant(
            c, name, now=SYSTEM.now(), cache_bytes=size, max_concurrent=max_concurrent or None
        )
    )
    typer.echo(identifier)


@tenant.command("list")
def tenant_list() -> None:
    """All tenants."""
    show(
        ("id", "name", "created", "disabled"),
        [(one.id, one.name, one.created, one.disabled) for one in _do(admin.list_tenants)],
    )


@tenant.command("disable")
def tenant_disable(name: TenantName) -> None:
    """Refuse the tenant's keys and take its entries out of use."""
    _do(lambda c: admin.disable_tenant(c, name, now=SYSTEM.now()))


@key.command("create")
def key_create(
    tenant: TenantName,
    name: Annotated[str, typer.Option(help="What it is for.")] = "",
    days: Annotated[float | None, typer.Option(min=0, help="Days until it expires.")] = None,
) -> None:
    """Make a key. It is printed once and cannot be shown again."""
    now = SYSTEM.now()
    expires = None if days is None else now + timedelta(days=days)
    made = _do(lambda c: admin.create_key(c, tenant, now=now, name=name, expires=expires))
    typer.echo(made.key)
    typer.echo(f"id {made.id}; keep the key, it is not shown again", err=True)


@key.command("list")
def key_list(tenant: Annotated[str | None, typer.Argument(help="Of this tenant alone.")] = None) -> None:
    """Keys, without their secrets."""
    show(
        ("id", "tenant", "name", "begins", "created", "expires", "revoked", "last used"),
        [
            (one.id, one.tenant, one.name, one.prefix, one.created, one.expires, one.revoked, one.last_used)
            for one in _do(lambda c: admin.list_keys(c, tenant))
        ],
    )


@key.command("revoke")
def key_revoke(key: Annotated[str, typer.Argument(help="Its id, or how it begins.")]) -> None:
    """Refuse a key from now on (a gateway remembers a good one for BURSTLINE_GATEWAY_AUTH_CACHE_S, 30 seconds)."""
    _do(lambda c: admin.revoke_key(c, key, now=SYSTEM.now()))


@quota.command("show")
def quota_show(tenant: TenantName) -> None:
    """A tenant's limits and what of them is used."""
    one = _do(lambda c: admin.find_tenant(c, tenant))
    limit = "none" if one.max_concurrent is None else one.max_concurrent
    show(
        ("tenant", "cache bytes", "used bytes", "max concurrent"),
        [(one.name, one.cache_bytes, one.used_bytes, limit)],
    )


@quota.command("set")
def quota_set(tenant: TenantName, cache_bytes: Bytes = None, max_concurrent: Concurrent = None) -> None:
    """Change a tenant's limits, and print them as they are then. A byte limit below what is used only stops growth."""
    _do(lambda c: admin.set_quota(c, tenant, cache_bytes=cache_bytes, max_concurrent=max_concurrent))
    quota_show(tenant)


@entries.command("list")
def entries_list(tenant: TenantName, limit: Annotated[int, typer.Option(min=1, max=10_000)] = 50) -> None:
    """A tenant's entries, most recently used first."""
    show(
        ("id", "key", "tokens", "from", "state", "state bytes", "kv bytes", "hits", "last used", "workers"),
        [
            (
                one.id, one.key.hex()[:16], one.position, one.parent_position, one.state, one.state_bytes,
                one.kv_bytes, one.hits, one.last_used, ", ".join(one.workers),
            )
            for one in _do(lambda c: admin.list_entries(c, tenant, limit=limit))
        ],
    )  # fmt: skip


@entries.command("delete")
def entries_delete(tenant: TenantName) -> None:
    """Take a tenant's entries out of use; their worker frees the bytes when it next needs room for the tenant."""
    number = _do(lambda c: admin.withdraw_entries(c, tenant))
    typer.echo(f"{number} entries are out of use")


@audit.command()
def audit_command(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the evidence object here.")] = None,
) -> None:
    """Check the books of every tenant and ask every living worker. Exits 1 on a difference, 2 if not measured."""
    report = finish(_audit(), status=2)
    fields = ("tenant", "quota_bytes", "counter_bytes", "ledger_bytes", "entry_bytes", "entries", "orphans")
    show(
        tuple(name.replace("_", " ") for name in fields),
        [tuple(getattr(books, name) for name in fields) for books in report.books],
    )
    for difference in report.differences:
        typer.echo(
            f"{difference.worker}: entry {difference.key} has {difference.real_bytes} bytes, "
            f"charged {difference.charged_bytes}"
        )
    typer.echo(f"workers asked: {', '.join(report.asked) or 'none'}")
    if report.silent:
        typer.echo(f"workers that did not answer: {', '.join(report.silent)}")
    found = bars(report)
    for line in told(found):
        typer.echo(line)
    if json_file is not None:
        write(json_file, evidence("audit", results(report), found))
    if not all(bar.holds for bar in found):
        raise typer.Exit(1)


async def _audit() -> Report:
    database_url, nats_url = _addresses()
    common = load(CommonSettings)
    async with AsyncExitStack() as stack:
        database = Database(database_url, load(BrokerSettings), application="burstline-audit")
        stack.push_async_callback(database.close)
        transport = await connect(nats_url, name="burstline-audit", access=Access.of(common))
        stack.push_async_callback(transport.close)
        return await run_audit(database, transport, SYSTEM)


def _do(work: Work[T]) -> T:
    """Run one transaction against the database in question."""
    return finish(_transaction(work), status=1)


async def _transaction(work: Work[T]) -> T:
    database = Database(_addresses()[0], load(BrokerSettings), application="burstline-admin")
    try:
        return await database.run(work)
    finally:
        await database.close()


def finish(work: Coroutine[Any, Any, T], *, status: int) -> T:
    try:
        return asyncio.run(work)
    except BurstlineError as error:
        typer.echo(f"burstline: {error.message}", err=True)
        raise typer.Exit(status) from error


def _addresses() -> tuple[str, str]:
    """The database and the NATS server in question."""
    common = load(CommonSettings)
    if common.database_url is not None:
        return common.database_url.get_secret_value(), common.nats_url
    stack = discover(common.data_dir)
    if stack is None:
        typer.echo(
            f"burstline: nothing runs on {common.data_dir}: start `burstline up`, or set BURSTLINE_DATABASE_URL "
            "(and BURSTLINE_DATA_DIR for a stack elsewhere)",
            err=True,
        )
        raise typer.Exit(2)
    return stack.database_url, stack.nats_url


def show(columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    """Aligned columns on a terminal, tab-separated lines elsewhere."""
    lines = [columns, *(tuple(map(_text, row)) for row in rows)]
    for line in aligned(lines) if sys.stdout.isatty() else map("\t".join, lines):
        typer.echo(line)


def aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """The cells of each line under one another, as wide as they need: an id that was cut could not be copied."""
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(set_cell_size(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _text(value: object) -> str:
    if value is None or value == "":
        return "-"
    return value.isoformat(timespec="seconds") if hasattr(value, "isoformat") else str(value)
