"""A private Postgres server: loopback, scram password, one database, never as root."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from typing import Final, Self

import psutil

from services.embedded.cluster import SUPERUSER, Place, make_cluster, server_environment, settle
from services.embedded.faults import EmbeddedFault, PortTaken
from services.embedded.files import private_folder, secret, tail
from services.embedded.ports import LOOPBACK, free_port
from services.embedded.process import GONE, Child, Command, end, end_leftover, spawn
from services.embedded.waiting import Stop, never, until

START_TIMEOUT_S: Final = 120.0  # crash recovery of a killed server is part of it
STOP_STEP_S: Final = 20.0
ATTEMPTS: Final = 5
TOOL_TIMEOUT_S: Final = 60.0
IDENTIFIER: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")


class PostgresServer:
    """One server under `folder` (secret, pid file, log; the cluster where `cluster.settle` says).

    `durable=False` is for tests: no fsync, so that a commit costs no disk.
    """

    def __init__(
        self,
        folder: Path,
        *,
        database: str = "burstline",
        durable: bool = True,
        max_connections: int = 64,
        stop: Stop = never,
    ) -> None:
        self._folder = folder
        self._database = database
        self._durable = durable
        self._max_connections = max_connections
        self._stop = stop
        self._place: Place | None = None
        self._child: Child | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Where to connect, password included."""
        return self.url_of(self._database)

    def url_of(self, database: str) -> str:
        """The URL of another database of this server."""
        return f"postgresql://{SUPERUSER}:{self._password}@{LOOPBACK}:{self._port}/{database}"

    @property
    def log(self) -> Path:
        return self._folder / "postgres.log"

    @property
    def child(self) -> Child | None:
        return self._child

    def start(self) -> None:
        """Make the cluster if there is none, start, wait until it answers, make the database. Keeps its port.

        Raises:
            EmbeddedFault: with what to do, or the end of the log.
            Cancelled: asked to stop while waiting.
        """
        private_folder(self._folder)
        end_leftover(self._run / "initdb.json", ask=signal.SIGKILL, timeout_s=STOP_STEP_S)
        end_leftover(self._run / "postgres.json", ask=signal.SIGINT, timeout_s=STOP_STEP_S)
        place = self._place = settle(self._folder)
        make_cluster(
            place,
            password=self._password,
            durable=self._durable,
            log=self.log,
            run_folder=self._run,
            stop=self._stop,
        )
        self._end_foreign_owner(place)
        for _ in range(ATTEMPTS):
            port = self._port or free_port()
            try:
                self._start_on(place, port)
            except PortTaken:
                continue
            self._port = port
            self.create_database(self._database)
            return
        raise PortTaken(f"Postgres found no free port in {ATTEMPTS} attempts. Its log is {self.log}.")

    def stop(self) -> None:
        """Stop it: fast shutdown, then immediate. Idempotent."""
        if self._child is not None:
            self._child.stop(ask=[signal.SIGINT, signal.SIGQUIT], each_s=STOP_STEP_S)
            self._child = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def create_database(self, name: str) -> None:
        """Make a database. Idempotent."""
        _check_identifier(name)
        known = self.sql(f"SELECT 1 FROM pg_database WHERE datname = '{name}'")
        if not known:
            self.sql(f'CREATE DATABASE "{name}"')

    def sql(self, statement: str) -> str:
        """Run one statement as the superuser by psql; its output, unaligned."""
        assert self._place is not None, "start() comes first"
        result = subprocess.run(
            [
                str(self._place.binaries / "psql"), "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1",
                "-h", LOOPBACK, "-p", str(self._port), "-U", SUPERUSER, "-d", "postgres", "-c", statement,
            ],
            env={**server_environment(), "PGPASSWORD": self._password, "PGCONNECT_TIMEOUT": "30"},
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
            check=False,
        )  # fmt: skip
        if result.returncode != 0:
            raise EmbeddedFault(f"psql refused: {result.stderr.strip()}")
        return result.stdout.strip()

    @property
    def _password(self) -> str:
        return secret(self._folder / "password")

    @property
    def _run(self) -> Path:
        return self._folder / "run"

    def _start_on(self, place: Place, port: int) -> None:
        command = Command(
            name="postgres",
            arguments=(str(place.binaries / "postgres"), "-D", str(place.cluster), *self._options(port)),
            marker=str(place.cluster),
            death_signal=signal.SIGINT,
            account=place.account,
            environment=server_environment(),
            cwd="/",
        )
        began = self.log.stat().st_size if self.log.exists() else 0
        child = self._child = spawn(command, run_folder=self._run, log=self.log)
        try:
            until(
                lambda: not child.running or self._answers(place, child),
                timeout_s=START_TIMEOUT_S,
                stop=self._stop,
            )
            up = child.running and self._answers(place, child)
        except EmbeddedFault:
            self.stop()
            raise
        if up:
            return
        self.stop()
        said = self.log.read_bytes()[began:].decode("utf-8", "replace")
        if "Address already in use" in said:
            raise PortTaken(f"port {port} was taken")
        raise EmbeddedFault(f"Postgres did not start. The end of {self.log}:\n{tail(self.log, began=began)}")

    def _options(self, port: int) -> list[str]:
        values: dict[str, object] = {
            "listen_addresses": LOOPBACK,
            "port": port,
            "unix_socket_directories": "",
            "max_connections": self._max_connections,
            "shared_buffers": "64MB",
            "timezone": "UTC",
            "log_timezone": "UTC",
        }
        if not self._durable:
            values |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        return [item for name, value in values.items() for item in ("-c", f"{name}={value}")]

    def _answers(self, place: Place, child: Child) -> bool:
        """Whether our own server takes connections: it says so in its cluster (line 8), under its pid (line 1)."""
        try:
            lines = (place.cluster / "postmaster.pid").read_text(encoding="ascii").splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0].strip() == str(child.pid) and lines[7].strip() == "ready"

    def _end_foreign_owner(self, place: Place) -> None:
        """End a server that still holds the cluster though no pid file of ours tells of it."""
        try:
            pid = int((place.cluster / "postmaster.pid").read_text(encoding="ascii").split()[0])
            process = psutil.Process(pid)
            ours = str(place.cluster) in process.cmdline()
        except (OSError, ValueError, IndexError, *GONE, psutil.AccessDenied):
            return
        if ours:
            end(process, ask=signal.SIGINT, timeout_s=STOP_STEP_S)


def _check_identifier(name: str) -> None:
    if not IDENTIFIER.fullmatch(name):
        raise EmbeddedFault(f"not a database name: {name!r}")
