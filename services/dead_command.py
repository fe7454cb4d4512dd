"""`burstline dead list | show | requeue | drop`: dead letters from the terminal.

Speaks to the server that BURSTLINE_NATS_URL names, else to the stack that runs on the data folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from services import dead_letters
from services.administration import finish, show
from services.embedded.discovery import discover
from shared.clock import SYSTEM
from shared.config import CommonSettings, load
from shared.protocol import subjects
from shared.protocol.messages import Terminal
from shared.transport.access import Access
from shared.transport.base import Transport
from shared.transport.nats import connect

T = TypeVar("T")

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Dead letters.")
Place = Annotated[int, typer.Argument(min=1, help="Its place, as `list` shows it.")]
_LOOK_S = 0.2


@app.command("list")
def list_command(limit: Annotated[int, typer.Option(min=1, max=10_000)] = 50) -> None:
    """The oldest letters, without what was asked."""
    found = _do(lambda transport: dead_letters.letters(transport, limit=limit))
    show(dead_letters.ROW, [dead_letters.row(one) for one in found])


@app.command("show")
def show_command(
    place: Place,
    tokens: Annotated[bool, typer.Option("--tokens", help="The prompt's token ids too.")] = False,
) -> None:
    """One letter, every field but the prompt."""
    one = _do(lambda transport: dead_letters.letter(transport, place))
    show(("field", "value"), list(dead_letters.fields(one, tokens=tokens)))


@app.command("requeue")
def requeue_command(
    place: Place,
    deadline_s: Annotated[float, typer.Option(min=1, max=3600, help="The new request's deadline.")] = 600.0,
    wait: Annotated[bool, typer.Option("--wait", help="Until it ends; exits 1 if it fails.")] = False,
) -> None:
    """Enqueue it as a new request, whose id is printed, and delete the letter."""
    request_id = _do(lambda transport: dead_letters.requeue(transport, SYSTEM, place, deadline_s=deadline_s))
    typer.echo(request_id)
    if wait:
        terminal = _do(lambda transport: _ended(transport, request_id, deadline_s))
        failure = terminal.failure if terminal is not None else None
        if terminal is None or failure is not None:
            typer.echo(f"burstline: {failure.message if failure else 'it has not ended'}", err=True)
            raise typer.Exit(1)
        typer.echo(f"{terminal.completion_tokens} tokens, attempt {terminal.attempt}", err=True)


@app.command("drop")
def drop_command(place: Place) -> None:
    """Delete a letter for good."""
    _do(lambda transport: dead_letters.drop(transport, place))


async def _ended(transport: Transport, request_id: str, deadline_s: float) -> Terminal | None:
    """Its end, once there is one; None after the deadline."""
    until = SYSTEM.monotonic_ns() + int(deadline_s * 1e9)
    while (terminal := await dead_letters.outcome(transport, request_id)) is None:
        if SYSTEM.monotonic_ns() >= until:
            return None
        await asyncio.sleep(_LOOK_S)
    return terminal


def _do(work: Callable[[Transport], Awaitable[T]]) -> T:
    return finish(_connected(work), status=1)


async def _connected(work: Callable[[Transport], Awaitable[T]]) -> T:
    common = load(CommonSettings)
    transport = await connect(_url(common), name="burstline-dead", access=Access.of(common))
    try:
        for spec in subjects.STREAMS:
            await transport.ensure_stream(spec)
        return await work(transport)
    finally:
        await transport.close()


def _url(common: CommonSettings) -> str:
    """The server in question."""
    if "nats_url" in common.model_fields_set:
        return common.nats_url
    stack = discover(common.data_dir)
    if stack is None:
        typer.echo(
            f"burstline: nothing runs on {common.data_dir}: start `burstline up`, or set BURSTLINE_NATS_URL",
            err=True,
        )
        raise typer.Exit(2)
    return stack.nats_url
