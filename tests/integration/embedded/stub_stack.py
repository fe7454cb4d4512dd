"""A supervisor with stand-in services, run as a process of its own: `python stub_stack.py`, settings from the environment.

The servers, the lock, the order of starting and stopping, restarts and signals are real; the three services are small
HTTP servers that are ready at once, so that these tests need no model.
"""

from __future__ import annotations

import signal
import sys

from services.embedded import commands, stack, up
from services.embedded.process import Command

SERVICE = """
import http.server, signal, sys
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if sys.argv[1] == "crashing":
    sys.exit("no such setting")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Ready).serve_forever()
"""


def stand_in(name: str, mode: str) -> object:
    """A replacement for `commands.<name>`; the port is always the last argument."""

    def command(*arguments: object, number: int) -> Command:
        port, data_dir = arguments[-1], str(arguments[0].data_dir)  # type: ignore[attr-defined]
        return Command(
            name=commands.numbered(name, number),
            arguments=(sys.executable, "-S", "-c", SERVICE, mode, str(port), data_dir),
            marker=data_dir,
            death_signal=signal.SIGKILL,
        )

    return command


def main() -> int:
    crashing = sys.argv[1] if len(sys.argv) > 1 else ""
    for name in ("gateway", "worker", "broker"):
        setattr(commands, name, stand_in(name, "crashing" if name == crashing else "ready"))
    stack.ensure_key = lambda folder, url, tenant: "bl_stub"
    return up.main()


if __name__ == "__main__":
    raise SystemExit(main())
