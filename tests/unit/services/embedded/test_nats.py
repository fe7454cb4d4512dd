"""How the private NATS server is started."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from services.embedded import nats
from services.embedded.nats import NatsServer
from services.embedded.process import Command


class Started(Exception):
    """Instead of a process."""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """Commands that would have been run."""
    commands: list[Command] = []

    def spawn(command: Command, *, run_folder: Path, log: Path) -> NoReturn:
        commands.append(command)
        raise Started

    monkeypatch.delenv("GOMAXPROCS", raising=False)
    monkeypatch.setattr(nats, "spawn", spawn)
    monkeypatch.setattr(nats, "require_room", lambda *_: None)
    return commands


def processors(server: NatsServer, commands: list[Command]) -> str:
    with pytest.raises(Started):
        server.start()
    return dict(commands[-1].environment or {})["GOMAXPROCS"]


@pytest.mark.parametrize(
    ("machine", "server"), [(None, "1"), (1, "1"), (2, "1"), (15, "1"), (16, "2"), (128, "16")]
)
def test_it_runs_on_an_eighth_of_the_processors(
    machine: int | None,
    server: str,
    tmp_path: Path,
    started: list[Command],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: machine)
    assert processors(NatsServer(tmp_path), started) == server


def test_the_operator_decides(
    tmp_path: Path, started: list[Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMAXPROCS", "7")
    assert processors(NatsServer(tmp_path), started) == "7"
