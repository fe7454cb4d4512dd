"""Burstline's services: gateway, gpu_worker and cache_broker; they never import one another.

The rest are composition roots, which may import all of them and which none of them knows:

    cli              the `burstline` command          embedded   `burstline up`: servers and services on one machine
    administration   tenants, keys, quotas, audit     demo       `burstline demo`
    dead_command     `burstline dead`, of             prove      exactness, shown
    dead_letters     requests that were given up      bench      speed and reuse, measured
    trace            a request's spans, drawn         chaos      the line, disturbed
    models           `burstline model`, `--model`
"""
