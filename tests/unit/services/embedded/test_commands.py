"""What each service is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cache_broker.config import BrokerSettings
from services.embedded import commands
from services.gateway.config import GatewaySettings
from services.gpu_worker.config import WorkerSettings
from shared.config import CommonSettings, Settings

DATABASE = "postgresql://u:secret@127.0.0.1:1/b"


@pytest.fixture
def common(tmp_path: Path) -> CommonSettings:
    return CommonSettings().model_copy(update={"data_dir": tmp_path})


def test_only_the_broker_gets_the_database(common: CommonSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURSTLINE_DATABASE_URL", DATABASE)
    for command in (commands.gateway(common, "nats://x", 1), commands.worker(common, "nats://x", 2)):
        assert command.environment is not None
        assert "secret" not in " ".join((*command.environment.values(), *command.arguments))
    broker = commands.broker(common, "nats://x", DATABASE, 3)
    assert broker.environment is not None
    assert broker.environment["BURSTLINE_DATABASE_URL"] == DATABASE
    assert "secret" not in " ".join(broker.arguments), "arguments are seen by every user of the machine"


def test_every_variable_is_one_that_a_service_reads(
    common: CommonSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands.os, "environ", {})
    settings: dict[str, type[Settings]] = {
        "gateway": GatewaySettings,
        "worker": WorkerSettings,
        "broker": BrokerSettings,
    }
    made = (
        commands.gateway(common, "nats://x", 1),
        commands.worker(common, "nats://x", 2),
        commands.broker(common, "nats://x", DATABASE, 3),
    )
    for command in made:
        assert command.environment is not None
        assert set(command.environment) <= {
            *settings[command.name].variables(),
            *CommonSettings.variables(),
        }


def test_a_data_folders_worker_keeps_its_name_and_the_user_may_choose_another(
    common: CommonSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "BURSTLINE_WORKER_WORKER_ID"
    first, second = (commands.worker(common, "nats://x", port).environment for port in (1, 2))
    other = common.model_copy(update={"data_dir": tmp_path / "other"})
    assert first is not None
    assert second is not None
    assert first[name] == second[name] == commands.worker_id(common) != commands.worker_id(other)
    monkeypatch.setenv(name, "mine")
    third = commands.worker(common, "nats://x", 3).environment
    assert third is not None
    assert third[name] == "mine"


def test_the_second_of_a_service_has_a_name_of_its_own_and_so_has_its_worker(common: CommonSettings) -> None:
    made = [commands.worker(common, "nats://x", port, number=port) for port in (1, 2)]
    assert [command.name for command in made] == ["worker", "worker-2"]
    assert made[0].arguments == made[1].arguments, "one sub-command serves both"
    names = [(command.environment or {})["BURSTLINE_WORKER_WORKER_ID"] for command in made]
    assert names == [commands.worker_id(common), f"{commands.worker_id(common)}-2"]
