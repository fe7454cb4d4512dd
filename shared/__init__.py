"""What two or more services must agree on: protocol, transport, settings, telemetry, errors, time.

Knows no service, no device and no database; imports neither `services` nor `kernels`.

    protocol    what is said           transport   how it gets there
    config      settings               lifecycle   signals, shutdown, tasks that may not die quietly
    asgi        HTTP in a process      health      /healthz, /readyz, /metrics
    telemetry   traces, metrics        spans       told when they end          tracestore  those of a machine, kept
    logs        lines without secrets
    errors      the tree               evidence    what `--json` writes        clock   the one place that reads time
    outage      a fault that goes on, told once            storing     does a stream take what is written
    grammar     what an answer may have to follow, and the vocabulary that it is walked over
    memory      what is loaded, in huge pages
    control     which tokens mark a place, and which are text                  panics  of libraries in Rust
"""
