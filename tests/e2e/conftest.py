"""One running stack for the folder: `burstline up`, as a user starts it, on private ports and a folder of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from services.embedded import StackInfo, discover
from services.embedded.process import alive
from services.embedded.waiting import until

START_S = 280.0
STOP_S = 120.0


@dataclass(frozen=True)
class Line:
    """The running stack as a user sees it: a URL, a key, a data folder, the command."""

    folder: Path
    environment: dict[str, str]
    log: Path

    @property
    def info(self) -> StackInfo:
        info = discover(self.folder)
        assert info is not None, self.log.read_text()
        return info

    @property
    def key(self) -> str:
        return (self.folder / "keys" / "demo").read_text()

    def client(self, key: str | None = None) -> httpx.Client:
        return httpx.Client(
            base_url=self.info.gateway_url,
            headers={"Authorization": f"Bearer {key or self.key}"},
            timeout=httpx.Timeout(180.0),
            trust_env=False,
        )

    def burstline(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command against the stack's data folder."""
        return subprocess.run(
            [sys.executable, "-m", "services.cli", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )

    def logs(self) -> str:
        """The ends of all logs, for a failing assertion."""
        files = sorted((self.folder / "logs").glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in (self.log, *files))


@pytest.fixture(scope="package")
def line() -> Iterator[Line]:
    """Started once for this folder and stopped when its tests are done."""
    with running() as line:
        yield line


@contextmanager
def running(*arguments: str, **variables: str) -> Iterator[Line]:
    """`burstline up` with these arguments; at the end it must drain, leave no process and exit 0."""
    with tempfile.TemporaryDirectory(prefix="burstline-e2e-") as root:
        folder, log = Path(root) / "data", Path(root) / "up.log"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("BURSTLINE_")}
        environment = inherited | {
            "BURSTLINE_DATA_DIR": str(folder),
            "BURSTLINE_EMBEDDED_GATEWAY_PORT": "0",
            "BURSTLINE_EMBEDDED_DURABLE": "false",
            "BURSTLINE_EMBEDDED_RESTART_BACKOFF_S": "0.1",
            "BURSTLINE_WORKER_ACK_WAIT_S": "4",  # how soon a killed worker's request is delivered again
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "services.cli", "up", *arguments],
                env=environment,
                stdout=output,
                stderr=output,
            )
        line = Line(folder, environment, log)
        try:
            until(lambda: process.poll() is not None or discover(folder) is not None, timeout_s=START_S)
            assert discover(folder) is not None, line.logs()
            yield line
            _stops_clean(process, line)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _stops_clean(process: subprocess.Popen[bytes], line: Line) -> None:
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=STOP_S) == 0, line.logs()
    assert until(lambda: not any(map(alive, family)), timeout_s=30), [
        item.cmdline() for item in family if alive(item)
    ]
