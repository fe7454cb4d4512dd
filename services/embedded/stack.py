"""The whole line on one machine: NATS, Postgres, broker, worker and gateway under one supervisor.

Start order: NATS, then worker and gateway at once (loading a model takes longest), Postgres beside them, the broker,
the first tenant; ready when every service says so. Stop order: gateway (finishes its streams), worker, broker, Postgres,
NATS. A crashed child is restarted within limits; one that ends while the stack starts stops everything, and the fault
shows the end of its log.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from services.embedded import commands
from services.embedded.bootstrap import ensure_key
from services.embedded.children import Keeper, Report, Service, Startable, describe, said, why
from services.embedded.config import EmbeddedSettings
from services.embedded.discovery import StackInfo, announce, withdraw
from services.embedded.faults import EmbeddedFault
from services.embedded.files import FolderLock, limit_log, private_folder, require_room
from services.embedded.mending import Mender
from services.embedded.nats import NatsServer
from services.embedded.ports import LOOPBACK, free_port, require_free
from services.embedded.postgres import PostgresServer
from services.embedded.process import Command, end_leftover
from services.embedded.restarts import RestartPolicy
from services.embedded.sizes import Sizes
from services.embedded.waiting import Stop, never, until
from shared.clock import SYSTEM
from shared.config import CommonSettings

ROOM_BYTES: Final = 1 << 30
STOP_ORDER: Final = ("gateway", "worker", "broker")
KILL_WAIT_S: Final = 10.0


class Stack:
    """One stack on one data folder: `start`, then `tick` a few times a second, then `stop`. Once only."""

    def __init__(
        self,
        settings: EmbeddedSettings,
        common: CommonSettings,
        *,
        report: Report,
        stop: Stop = never,
        hurry: Stop = never,
        sizes: Sizes = Sizes(),
        front: Callable[[str], str] | None = None,
        worker: Callable[..., Command] | None = None,
    ) -> None:
        """`front`: NATS is up at this URL, what shall the services be told instead (of a proxy before it). `worker`: what
        starts one instead of `commands.worker`. `report` gets progress lines; `stop` yes = give up starting; `hurry` yes =
        do not wait for drains.

        A NATS or database URL that was set in the environment replaces the embedded server.
        """
        self._settings = settings
        self._common = common
        self._report = report
        self._cancelled = stop
        self._hurry = hurry
        self._sizes = sizes
        self._front = front
        self._worker = worker
        self._folder = common.data_dir
        self._began_ns = SYSTEM.monotonic_ns()
        self._lock = FolderLock(self._folder)
        self._nats: NatsServer | None = None
        self._mender: Mender | None = None
        self._postgres: PostgresServer | None = None
        self._services: dict[str, Service] = {}
        self._keepers: list[Keeper] = []
        self._nats_url = ""
        self._database_url = ""
        self._key = ""

    @property
    def gateway_url(self) -> str:
        return f"http://{LOOPBACK}:{self._services['gateway'].port}"

    @property
    def gateway_urls(self) -> tuple[str, ...]:
        """Of every gateway."""
        return tuple(f"http://{LOOPBACK}:{self._services[name].port}" for name in self.names("gateway"))

    def names(self, service: str) -> tuple[str, ...]:
        """What the processes of a service are called; keys of `pids`."""
        return self._sizes.names(service)

    def ready(self, name: str) -> bool:
        """Whether a service's process runs and says that it is ready."""
        service = self._services[name]
        return service.child is not None and service.child.running and service.ready()

    def health_url(self, name: str) -> str:
        """Where a service answers /healthz, /readyz and /metrics."""
        return f"http://{LOOPBACK}:{self._services[name].port}"

    @property
    def nats_url(self) -> str:
        return self._nats_url

    @property
    def database_url(self) -> str:
        return self._database_url

    @property
    def key(self) -> str:
        """The first tenant's API key."""
        return self._key

    @property
    def pids(self) -> dict[str, int]:
        """The supervisor and every running child."""
        children = {name: target.child for name, target in self._targets().items()}
        return {"stack": os.getpid()} | {name: child.pid for name, child in children.items() if child}

    def start(self) -> None:
        """Start everything and wait until it is ready. On any fault, what was started is stopped again.

        Raises:
            EmbeddedFault: what is wrong and what to do.
            Cancelled: the stop question was answered yes.
        """
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def tick(self) -> None:
        """Restart what crashed, and a queue that stores nothing any more; keep logs within their limit.

        Raises:
            EmbeddedFault: a child crashed too often. The caller stops the stack.
        """
        if self._mender is not None:
            self._mender.tick()
        restarted = [keeper.tick() for keeper in self._keepers]
        for target in self._targets().values():
            limit_log(target.log)
        if any(restarted):
            self._announce()

    def stop(self) -> None:
        """Stop all in order, each within its drain time. Idempotent."""
        self._keepers, self._mender = [], None
        if self._lock.held:
            withdraw(self._folder)
        for name in (name for service in STOP_ORDER for name in self.names(service)):
            service = self._services.get(name)
            if service is not None and service.child is not None:
                self._report(f"stopping {name}")
                service.stop(timeout_s=self._settings.drain_timeout_s, hurry=self._hurry)
        for server in (self._postgres, self._nats):
            if server is not None:
                server.stop()
        self._lock.release()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        # Search for others, so that as root the database's account reaches its own folder; what is inside is private.
        private_folder(self._folder, 0o711)
        require_room(self._folder, ROOM_BYTES, "The embedded stack")
        self._lock.take()
        withdraw(self._folder)
        for file in sorted((self._folder / "run").glob("*.json")):
            if end_leftover(file, ask=signal.SIGKILL, timeout_s=KILL_WAIT_S):
                self._report(f"ended a {file.stem} that a killed stack had left")
        port = self._settings.gateway_port
        if port:
            require_free(port, "BURSTLINE_EMBEDDED_GATEWAY_PORT")
        self._start_nats()
        self._launch_services(port)
        for name in self.names("broker"):
            self._await_ready(name)
        self._key = ensure_key(self._folder, self._database_url, self._settings.tenant)
        for name in (*self.names("worker"), *self.names("gateway")):
            self._await_ready(name)
        self._keep()
        self._announce()

    def _launch_services(self, gateway_port: int) -> None:
        """All processes; the first gateway takes `gateway_port` unless it is 0."""
        common, sizes = self._common, self._sizes
        nats_url = self._nats_url if self._front is None else self._front(self._nats_url)
        for number in range(1, sizes.workers + 1):
            port = free_port()
            make = self._worker or commands.worker
            self._launch(make(common, nats_url, port, number=number), port)
        for number in range(1, sizes.gateways + 1):
            port = (gateway_port if number == 1 else 0) or free_port()
            self._launch(commands.gateway(common, nats_url, port, number=number), port)
        self._start_postgres()
        for number in range(1, sizes.brokers + 1):
            port = free_port()
            self._launch(commands.broker(common, nats_url, self._database_url, port, number=number), port)

    def _start_nats(self) -> None:
        if "nats_url" in self._common.model_fields_set:
            self._nats_url = self._common.nats_url
            self._say("NATS: yours (BURSTLINE_NATS_URL)")
            return
        self._nats = NatsServer(self._folder / "nats", stop=self._cancelled)
        self._nats.start()
        self._nats_url = self._nats.url
        self._say("NATS is up")

    def _start_postgres(self) -> None:
        given = self._common.database_url
        if given is not None:
            self._database_url = given.get_secret_value()
            self._say("Postgres: yours (BURSTLINE_DATABASE_URL)")
            return
        self._postgres = PostgresServer(
            self._folder / "postgres", durable=self._settings.durable, stop=self._cancelled
        )
        self._postgres.start()
        self._database_url = self._postgres.url
        self._say("Postgres is up")

    def _launch(self, command: Command, port: int) -> None:
        log = self._folder / "logs" / f"{command.name}.log"
        service = Service(command, port=port, run_folder=self._folder / "run", log=log)
        self._services[command.name] = service
        service.start()

    def _await_ready(self, name: str) -> None:
        timeout_s, service = self._settings.start_timeout_s, self._services[name]
        if not until(
            lambda: self._all_run() and service.ready(),
            timeout_s=timeout_s,
            stop=self._cancelled,
            interval_s=0.1,
        ):
            raise EmbeddedFault(
                f"{name} was not ready within {timeout_s:g} s (BURSTLINE_EMBEDDED_START_TIMEOUT_S). The end of its "
                f"log:\n{said(service)}"
            )
        self._say(f"{name} is ready")

    def _all_run(self) -> bool:
        """True, or an EmbeddedFault about the first child that ended."""
        for name, target in self._targets().items():
            if target.child is not None and not target.child.running:
                raise EmbeddedFault(
                    f"{name} ended while starting ({describe(target.child.exit_code)}){why(target)}"
                )
        return True

    def _keep(self) -> None:
        policy = RestartPolicy(
            limit=self._settings.restart_limit,
            window_s=self._settings.restart_window_s,
            backoff_s=self._settings.restart_backoff_s,
            backoff_limit_s=self._settings.restart_backoff_limit_s,
        )
        self._mender = Mender(self._nats, self._report) if self._nats is not None else None
        self._keepers = [
            Keeper(name, target, policy, self._report) for name, target in self._targets().items()
        ]

    def _targets(self) -> dict[str, Startable]:
        servers: dict[str, Startable | None] = {"nats": self._nats, "postgres": self._postgres}
        return {name: server for name, server in servers.items() if server is not None} | {**self._services}

    def _announce(self) -> None:
        announce(
            self._folder,
            StackInfo(
                nats_url=self._nats_url,
                database_url=self._database_url,
                gateway_url=self.gateway_url,
                pids=self.pids,
                version=commands.version(),
            ),
        )

    def _say(self, what: str) -> None:
        self._report(f"{(SYSTEM.monotonic_ns() - self._began_ns) / 1e9:6.1f} s  {what}")
