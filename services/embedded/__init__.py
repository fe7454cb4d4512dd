"""The embedded stack: NATS and Postgres from wheels, and the three services as child processes of one supervisor.

    up.py          `burstline up`
    stack.py       what `burstline up`, `make demo` and the end-to-end tests start; commands.py says how each service starts
    sizes.py       how many processes of each service
    children.py    a supervised service: start, readiness, bounded restarts (restarts.py), drain
    mending.py     a queue whose disk was full is started again when there is room
    bootstrap.py   a first tenant and its key
    nats.py, postgres.py, cluster.py    one server each, on loopback, with its own password
    process.py, guard.py                spawning so that no process outlives its supervisor
    discovery.py   `stack.json`: how other commands find a running stack
    config.py, faults.py, accounts.py, files.py, ports.py, waiting.py    the small things these stand on

Synchronous on purpose: one thread waits for a handful of processes, and on Linux a child's parent-death signal is bound
to the thread that spawned it, so every spawn happens in the thread that calls `start`.
"""

from services.embedded.discovery import StackInfo, discover

__all__ = ["StackInfo", "discover"]
