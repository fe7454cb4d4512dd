"""The command line and the environment of each service under the supervisor."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
from importlib import metadata
from typing import Final

from services.embedded.ports import LOOPBACK
from services.embedded.process import Command
from shared.config import CommonSettings

# Left to the broker alone; the others must not even hold the password.
_SECRET: Final = ("BURSTLINE_DATABASE_URL",)


def version() -> str:
    """The installed version of Burstline."""
    try:
        return metadata.version("burstline")
    except metadata.PackageNotFoundError:
        return "unknown"


def numbered(service: str, number: int) -> str:
    """What the process is called: the service's name, and from the second one on its number."""
    return service if number == 1 else f"{service}-{number}"


def gateway(common: CommonSettings, nats_url: str, port: int, *, number: int = 1) -> Command:
    """A gateway on `port` of the loopback."""
    return _service(
        "gateway",
        number,
        common,
        nats_url,
        {"BURSTLINE_GATEWAY_HOST": LOOPBACK, "BURSTLINE_GATEWAY_PORT": str(port)},
    )


def worker(common: CommonSettings, nats_url: str, health_port: int, *, number: int = 1) -> Command:
    """One worker; its model and sizes come from the caller's BURSTLINE_WORKER_ variables."""
    chosen = os.environ.get("BURSTLINE_WORKER_WORKER_ID") or worker_id(common)
    return _service(
        "worker",
        number,
        common,
        nats_url,
        {
            "BURSTLINE_WORKER_HEALTH_HOST": LOOPBACK,
            "BURSTLINE_WORKER_HEALTH_PORT": str(health_port),
            "BURSTLINE_WORKER_WORKER_ID": numbered(chosen, number),
        },
    )


def worker_id(common: CommonSettings) -> str:
    """One name for the worker of a data folder, whatever restarts it: a new epoch of a known worker ends the entries of
    the old one at once, while those of a worker that only fell silent keep their place for a minute."""
    place = f"{socket.gethostname()}:{common.data_dir}"
    return f"w-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def broker(
    common: CommonSettings, nats_url: str, database_url: str, health_port: int, *, number: int = 1
) -> Command:
    """A broker, the only service that is given the database."""
    return _service(
        "broker",
        number,
        common,
        nats_url,
        {
            "BURSTLINE_DATABASE_URL": database_url,
            "BURSTLINE_BROKER_HEALTH_HOST": LOOPBACK,
            "BURSTLINE_BROKER_HEALTH_PORT": str(health_port),
        },
    )


def _service(
    service: str, number: int, common: CommonSettings, nats_url: str, extra: dict[str, str]
) -> Command:
    inherited = {key: value for key, value in os.environ.items() if key not in _SECRET}
    data_dir = str(common.data_dir)
    return Command(
        name=numbered(service, number),
        # -P: a folder called `shared` where the user stands must not shadow ours.
        arguments=(sys.executable, "-P", "-m", "services.cli", service, "--supervised-by", data_dir),
        marker=data_dir,
        # Not SIGTERM: the supervisor died without a drain, and the servers die with it. Workers and gateways are built
        # to be killed; a slow drain would only keep the ports and the model's memory.
        death_signal=signal.SIGKILL,
        environment={**inherited, "BURSTLINE_NATS_URL": nats_url, "BURSTLINE_DATA_DIR": data_dir, **extra},
    )
