"""The cache broker: the one service that touches Postgres.

It keeps tenants, keys, quotas, prefix entries with their replicas and leases, the byte ledger (C5), usage and workers.
It knows chain keys and byte counts, never tokens, texts or devices.

    models      the tables                        database   the pool, the one place that commits, error translation
    accounts    a tenant's limit and ledger       catalogue  entries: lookup, commit, drop
    reserving   room for new entries              report     the audit as evidence
    splitting   rows that pass between entries    tracing    SQL as child spans
    leasing     lease, release, withdraw, freed   eviction   pure: which entries to ask for
    identity    keys -> tenants                   presence   workers, epochs, what dies with them
    handlers    one function per broker call      server     calls, heartbeats and terminal frames from the queue
    sweeper     what expires                      settle     terminal frames -> usage rows
    journals    what nobody reads any more        idempotency  which request a caller's key stands for
    hearing     whose silence counts              migrate    the schema, brought to this build's by `migrations`
    admin, audit        administration            app, config          the process
"""
